"""The engine of single samples with ordinary autograd: slow, correct, and without requirements on the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dpfunc._utils.dtensor import local
from dpfunc.batches import batch_size, row_alone, rows
from dpfunc.engines.guards.collectives import CollectiveRecorder, own_only
from dpfunc.engines.guards.lockstep import in_lockstep, on_any_process, refused_by_all
from dpfunc.engines.guards.loss import check_depends, check_differentiable, parameters_unchanged, refuse_reentrant
from dpfunc.engines.guards.python_state import note_kept, refuse_counting, refuse_kept, was_kept
from dpfunc.engines.guards.replicated import check_replicated
from dpfunc.engines.guards.scope import backward_inside
from dpfunc.engines.per_sample import Dense, PerSample
from dpfunc.engines.tracing.trace import Trace, state_before, tracing_rows_alone
from dpfunc.engines.uses.tensor_parallel import local_like
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Batch, LossFn, Params

_LoopEngine = Callable[[LossFn, Params, Batch], PerSample]


def loop() -> Callable[[LossFn, Params, Batch], PerSample]:
    """The engine of last resort: one forward and backward pass a sample. All B gradients are in memory.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: the loss communicates between ranks, other than in tensor parallel layers; or these give
            parameters that are not split gradients in parts.

    Guarantees:
        equals the reference (tests/engines/test_parity.py).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> loop()(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])).sq_norms()["w"]
    tensor([25.,  1.])
    """

    def engine(loss_fn: LossFn, params: Params, batch: Batch) -> PerSample:
        num_samples = batch_size(batch)
        losses: list[Tensor] = []
        recorder = CollectiveRecorder()
        parts = {name: local(param.detach()) for name, param in params.items()}
        grads_B = {name: part.new_zeros(num_samples, *part.shape) for name, part in parts.items()}
        reached, reads = not num_samples, list[str]()
        random, before = 0, state_before(loss_fn, params, rows(batch, 0, 1), alone=True)
        for sample in range(num_samples):
            losses_1, grads, trace = _single(loss_fn, params, row_alone(batch, sample), recorder)
            reached |= bool(grads)
            reads, random = reads + trace.reads, random + len(trace.random_calls)
            losses.append(losses_1)
            _keep(grads_B, sample, grads)
        check_depends(reached)
        first = next(iter(parts.values()))
        losses_B = torch.cat(losses) if losses else first.new_zeros(0)
        if recorder.meshes:
            check_replicated(losses_B, grads_B, params, recorder.meshes)
        result = PerSample(losses_B, {name: Dense(grad_B) for name, grad_B in grads_B.items()}, alone=True)
        if on_any_process(bool(reads) or was_kept(loss_fn)):
            note_kept(loss_fn, before, next(iter(reads), ""))
            with refused_by_all():
                refuse_kept(loss_fn)
            if not random:
                _check_repeats(engine, loss_fn, params, batch, result)
        if num_samples > 1 and not in_lockstep():  # FSDP keeps what it communicates
            refuse_counting(loss_fn, before)
        return result

    return engine


def _single(
    loss_fn: LossFn, params: Params, row: Batch, recorder: CollectiveRecorder
) -> tuple[Tensor, dict[str, Tensor], Trace]:
    """The loss (1,) of one row, the gradients of the parameters that it uses, on this rank, and the trace."""
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    with (
        tracing_rows_alone(row) as trace,
        own_only(recorder),
        parameters_unchanged(params),
        torch.enable_grad(),
        backward_inside(),
    ):
        losses_1 = loss_fn(leaves, row)
        check_differentiable(losses_1, 1)
        refuse_reentrant((), losses_1)
        trace.check_own(losses_1, "the loss")
        grads = torch.autograd.grad(losses_1.sum(), tuple(leaves.values()), allow_unused=True)
        for name, grad in zip(leaves, grads, strict=True):
            trace.check_own(grad, f"the gradient of {name!r}")
    used = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    local_grads = {
        name: local_like(grad.to_dense() if grad.is_sparse else grad, params[name]).detach()
        for name, grad in used.items()
    }
    return losses_1.detach(), local_grads, trace


def _keep(grads_B: dict[str, Tensor], sample: int, grads: Mapping[str, Tensor]) -> None:
    """Put the gradients of a sample into their places; that of a single sample is not copied."""
    for name, grad in grads.items():
        if len(grads_B[name]) == 1 and grad.dtype == grads_B[name].dtype:
            grads_B[name] = grad[None]
        else:
            grads_B[name][sample] = grad


def _check_repeats(engine: _LoopEngine, loss_fn: LossFn, params: Params, batch: Batch, first: PerSample) -> None:
    """Check that the first of several rows gives the same again: a loss may keep Python numbers of its row."""
    if len(first.losses_B) < 2:
        return
    again = engine(loss_fn, params, rows(batch, 0, 1))
    pairs = [(again.losses_B, first.losses_B[:1])]
    pairs += [(again.sq_norms()[name], norms_B[:1]) for name, norms_B in first.sq_norms().items()]
    if not all(bool(torch.isclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True).all()) for one, other in pairs):
        raise UnsupportedModel(
            "The loss of a row, or its gradient, is another one after other rows were computed: it keeps Python "
            "numbers of rows from call to call, or draws random numbers. Compute each loss from its own row alone."
        )
