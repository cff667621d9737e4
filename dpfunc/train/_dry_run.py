"""Dry run of a job: its plan and an estimate of its memory, without training and without writing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpfunc import accounting
from dpfunc.engines import explain
from dpfunc.errors import DPFuncError
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.train._dataset import collator, seen_lines
from dpfunc.train._recipe import recipe_lines
from dpfunc.train._run_folder import recorded_job
from dpfunc.train.config import Job
from dpfunc.train.run import Prepared, check_job, loss_of_job, prepare, training_arguments
from dpfunc.types import LossFn, Params

_MIB = 2**20
_PROBED = 2  # samples of the measured batch, at full length
# Numbers of float32 that optimizers keep for each trained parameter; most of the others are of Adam's kind.
_OPTIMIZER_STATES = {"sgd": 1, "adagrad": 1, "rmsprop": 1, "adafactor": 1}


def dry_run(job: Job, *, resume: bool = False, insecure_seed: int | None = None) -> list[str]:
    """The plan and an estimate of memory, as lines (tests/train/test_dry_run.py::test_dry_run_writes_nothing)."""
    check_job(job, resume, insecure_seed)
    job = recorded_job(job) if resume else job
    missing, prepared = job.training.missing, prepare(job)
    training_arguments(prepared)
    job, records = prepared.job, prepared.records
    plan, n = prepared.plan, job.privacy.public_size(len(records.units))
    total = sum(p.numel() for p in prepared.model.parameters())
    q = job.batch_size / n if plan is None else plan.sampler.expected_batch_size(0) / n
    people = (
        f"people: {n}, each of them protected, with at most {job.data.max_records_per_unit} records each. Batches "
        "count people"
    )
    unit = "records" if records.persons is None else "people"
    return [  # of the private table no number but that which the plan publishes
        f"{unit}: {n} to train on, {len(records.evaluation)} to evaluate on",
        *seen_lines(records),
        *([people] if records.persons is not None else []),
        *recipe_lines(prepared.recipe, missing),
        f"steps: {prepared.num_steps}",
        f"logical batch: {job.batch_size} expected, physical batch: {job.physical_batch_size}",
        f"sampling probability: {q:.4g}" + ("" if plan is None else f" ({type(plan.sampler).__name__})"),
        f"trained parameters: {prepared.num_trained:,} of {total:,} ({job.strategy})",
        *_budget_lines(prepared),
        *_memory_lines(job, prepared),
        "Nothing was trained, written or spent.",
    ]


def _budget_lines(prepared: Prepared) -> list[str]:
    """Noise and epsilon of the plan, and epsilon together with earlier runs."""
    plan = prepared.plan
    if plan is None:
        return ["epsilon: inf (the twin without privacy)"]
    spent = plan.guarantee()
    rdp = accounting.epsilon(plan.ledger(), plan.delta, "rdp").epsilon
    lines = [
        f"noise multiplier: {plan.noise_multiplier:.4g}, clip norm: {plan.clip.clip_norm} "
        f"({type(plan.clip).__name__.lower()})",
        f"epsilon: {spent.epsilon:.4g} ({spent.method}), {rdp:.4g} (rdp) at delta = {plan.delta:g}, {plan.adjacency}",
    ]
    if prepared.spent is not None:
        both = accounting.epsilon(prepared.spent.compose(plan.ledger()), plan.delta, plan.accountant)
        lines.append(f"with {prepared.spent.num_steps} steps of earlier runs: epsilon: {both.epsilon:.4g} in all")
    return lines


def _memory_lines(job: Job, prepared: Prepared) -> list[str]:
    """An estimate of memory, and how it was made."""
    trained = prepared.num_trained
    held = sum(p.numel() * p.element_size() for p in prepared.model.parameters())
    states = _OPTIMIZER_STATES.get(job.training.optimizer.split("_")[0], 2)
    parts = {
        "parameters": held,
        "gradients and noise": 2 * 4 * trained,
        f"optimizer ({job.training.optimizer})": 4 * states * trained,
    }
    collate = collator(job, prepared.processing, longest=True)
    batch: dict[str, Tensor] = collate([prepared.records.units[0]] * _PROBED)  # only its shapes count
    model = prepared.model
    # functionalize wants modules with checkpoints in evaluation mode; losses and shapes are those of training.
    forward, start = functionalize(model.train(False))
    model.train()
    params = {name: param.detach().requires_grad_() for name, param in start.items()}
    loss_fn = make_loss_fn(forward, loss_of_job(job))
    physical = job.physical_batch_size
    device_type = next(model.parameters()).device.type
    with torch.autocast(device_type, torch.bfloat16, enabled=job.training.bf16):
        parts["activations"] = _saved_bytes(loss_fn, params, batch, model) * physical // _PROBED
        how = "activations: what one forward pass of 2 records at full length keeps for its backward pass"
        try:
            factors = explain(loss_fn, params, batch).num_bytes
        except DPFuncError:
            how += "; per-sample gradients: not estimated for this model"
        else:
            parts["per-sample gradients"] = factors * physical // _PROBED
            how += "; per-sample gradients: what engines.explain counts for them"
    if job.training.gradient_checkpointing:
        how += "; gradient checkpointing, which is not counted, lowers the activations"
    total = sum(parts.values())
    listed = ", ".join(f"{name} {value / _MIB:.3g}" for name, value in parts.items())
    return [
        f"memory: about {total / _MIB:.3g} MiB ({listed})",
        f"  Estimated, both scaled to the physical batch. {how}. The framework itself comes on top.",
    ]


def _saved_bytes(loss_fn: LossFn, params: Params, batch: Mapping[str, Any], model: nn.Module) -> int:
    """Bytes that a forward pass keeps for its backward pass, parameters and buffers not counted.

    >>> model = nn.Linear(8, 8)
    >>> params = dict(model.named_parameters())
    >>> loss_fn = lambda params, batch: torch.func.functional_call(model, params, (batch["x"],)).exp().sum(1)
    >>> _saved_bytes(loss_fn, params, {"x": torch.ones(4, 8)}, model)  # the input, and the result of exp
    256
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *params.values())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_fn(params, batch)
    return sum(kept.values())
