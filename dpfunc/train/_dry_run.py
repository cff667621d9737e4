"""Dry run of a job: its plan and an estimate of its memory, without training and without writing.

May import: its folder, features and below. Privacy depends on it: no.
"""

from dataclasses import replace

import torch

from dpfunc import accounting
from dpfunc.accounting.accountant import upper
from dpfunc.engines.explain import explain
from dpfunc.engines.microbatches import saved_bytes
from dpfunc.errors import DPFuncError
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.train._collate import collator
from dpfunc.train._dataset import seen_lines
from dpfunc.train._frozen import kept_bytes
from dpfunc.train._made_up import chat_lines
from dpfunc.train._preferences import without_references
from dpfunc.train._recipe import recipe_lines
from dpfunc.train._run_folder import recorded_job
from dpfunc.train._views import view_lines
from dpfunc.train.config import Job
from dpfunc.train.run import Prepared, check_job, loss_of_job, prepare, rehearse

_MIB = 2**20
# Numbers of float32 that optimizers keep for each trained parameter; most of the others are of Adam's kind.
_OPTIMIZER_STATES = {"sgd": 1, "adagrad": 1, "rmsprop": 1, "adafactor": 1}


def dry_run(job: Job, *, resume: bool = False, insecure_seed: int | None = None) -> list[str]:
    """The plan and an estimate of memory, as lines (tests/train/test_dry_run.py::test_dry_run_writes_nothing)."""
    check_job(job, resume, insecure_seed)
    job = recorded_job(job) if resume else job
    missing, prepared = job.training.missing, prepare(job)
    records = prepared.records
    train, evaluation = (without_references(job, each) for each in (records.train, records.evaluation))
    prepared = replace(prepared, records=replace(records, train=train, evaluation=evaluation))
    rehearse(prepared)
    job, records, held_out = prepared.job, prepared.records, f", {len(prepared.records.evaluation)} to evaluate on"
    if job.privacy.dp_dataset_size is not None:  # the size is private, and so is that of each part
        held_out, prepared = "", replace(prepared, records=replace(records, evaluation=()))
    plan, n = prepared.plan, job.privacy.public_size(len(records.units))
    total = sum(p.numel() for p in prepared.model.parameters())
    q = job.batch_size / n if plan is None else plan.sampler.expected_batch_size(0) / n
    unit, most = "records" if records.persons is None else "people", job.data.max_records_per_unit
    return [  # of the private table no number but that which the plan publishes
        f"{unit}: {n} to train on{held_out}",
        *seen_lines(records),
        *chat_lines(job, prepared.processing),
        *[f"people: {n}, each of them protected, with at most {most} records each. Batches count people"]
        * (records.persons is not None),
        *view_lines(job.privacy.dp_views),
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
        f"epsilon: {upper(spent.epsilon, 4)} ({spent.method}), {upper(rdp, 4)} (rdp) at delta = {plan.delta:g}, "
        f"{plan.adjacency}",
    ]
    if prepared.recipe is None and (advice := plan.advice()) is not None:
        lines.append(f"WARNING: {advice}")
    if prepared.spent is not None:
        both = accounting.epsilon(prepared.spent.compose(plan.ledger()), plan.delta, plan.accountant)
        lines.append(f"with {prepared.spent.num_steps} steps of earlier runs: epsilon: {upper(both.epsilon, 4)} in all")
    return lines


def _memory_lines(job: Job, prepared: Prepared) -> list[str]:
    """An estimate of memory, and how it was made."""
    trained, optimizer = prepared.num_trained, job.training.optimizer
    parts = {
        "parameters": sum(p.nbytes for p in prepared.model.parameters()),
        "gradients and noise": 2 * 4 * trained,
        "features": kept_bytes(job, prepared.model, getattr(prepared.processing, "size", 0), prepared.records),
        f"optimizer ({optimizer})": 4 * _OPTIMIZER_STATES.get(optimizer.split("_")[0], 2) * trained,
    }
    collate, unit = collator(job, prepared.processing, longest=True), prepared.records.units[0]  # only its shapes count
    model = prepared.model
    # functionalize wants modules with checkpoints in evaluation mode; losses and shapes are those of training.
    forward, params = functionalize(model.train(False))
    model.train()
    loss_fn, physical = make_loss_fn(forward, loss_of_job(job)), job.physical_batch_size
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=job.training.bf16):
        parts["activations"] = saved_bytes(loss_fn, params, collate([unit])) * physical
        how = "activations: what a forward pass keeps of one record at full length for its backward pass"
        try:
            parts["per-sample gradients"] = explain(loss_fn, params, collate([unit] * 2)).num_bytes * physical // 2
            how += "; per-sample gradients: what engines.explain counts for them"
        except DPFuncError:
            how += "; per-sample gradients: not estimated for this model"
    if job.training.gradient_checkpointing:
        how += "; gradient checkpointing, which is not counted, lowers the activations"
    if parts["features"]:
        how += "; features: those of all records, which are computed once and kept"
    listed = ", ".join(f"{name} {value / _MIB:.3g}" for name, value in parts.items() if value)
    return [
        f"memory: about {sum(parts.values()) / _MIB:.3g} MiB ({listed})",
        f"  Estimated, both scaled to the physical batch. {how}. The framework itself comes on top.",
    ]
