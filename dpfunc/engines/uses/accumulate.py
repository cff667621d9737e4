"""Gradients of parameters from the uses of tracked tensors, and the check that no use was missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpfunc._utils.dtensor import local
from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.validation import shorten
from dpfunc.engines.guards.modes import unseen
from dpfunc.engines.per_sample import Dense, Outer, PerSampleGrad, Zeros, add
from dpfunc.engines.uses.tracked import Tracked, version
from dpfunc.engines.uses.tracker import Tracker
from dpfunc.errors import UnsupportedModel


def refuse_escaped(params: Mapping[str, Tensor], grads: Sequence[Tensor | None]) -> None:
    """Refuse uses of parameters that ordinary autograd would reach: every use must go through a rule.

    Raises:
        UnsupportedModel: some use has no rule.
    """
    escaped = [name for name, grad in zip(params, grads, strict=True) if grad is not None]
    if escaped:
        raise UnsupportedModel(
            f"The loss uses {shorten(escaped)} in a way that gives no per-sample gradients: a custom "
            "autograd.Function, an operation whose result all samples share down to the loss, or one that mixes the "
            'samples. Use engine="vmap" or "loop", or leave the parameters out.'
        )


def collect(
    tracker: Tracker, params: Mapping[str, Tensor], uses: dict[int, list[PerSampleGrad]]
) -> dict[str, PerSampleGrad]:
    """The gradient of each parameter: its own uses, and those of everything that was computed from it.

    Args:
        uses: identity of a tracked tensor -> its gradients, one a use. Used up.
    """
    with unseen():
        written = {target for target, own in tracker.tracked.items() if own.used and version(own.tensor) != own.used[0]}
    for target, derived in reversed(tuple(tracker.tracked.items())):
        if target in written:
            raise UnsupportedModel(
                f"The loss writes into a value computed from {derived.name!r}, or into a view of it, after it was "
                'used: its gradient would be that of other values. Use out-of-place operations, or engine="loop".'
            )
        if derived.name in params and params[derived.name] is derived.tensor:
            continue
        if target not in uses:
            continue
        total = add(uses.pop(target))
        handed = _to_parent(derived, total, tracker)
        if handed is not None:
            uses.setdefault(derived.parent or 0, []).append(handed)
        else:
            for name, grad in _backwards(derived, total, params, tracker.sentinels).items():
                uses.setdefault(id(params[name]), []).append(grad)
    return {
        name: add(uses[id(param)]) if id(param) in uses else Zeros(tracker.num_samples, local(param.detach()))
        for name, param in params.items()
    }


def _to_parent(derived: Tracked, total: PerSampleGrad, tracker: Tracker) -> PerSampleGrad | None:
    if derived.parent is None:
        return None
    shape = tuple(tracker.tracked[derived.parent].tensor.shape)
    own = tuple(derived.tensor.shape)
    if isinstance(total, Outer) and derived.transposed and (total.a_BTp.shape[2], total.b_BTd.shape[2]) != own:
        total = Dense(total.dense().reshape(-1, *own))  # reshaped in between: the sides are not those of the matrix
    if isinstance(total, Outer):
        sides = (total.b_BTd, total.a_BTp) if derived.transposed else (total.a_BTp, total.b_BTd)
        return Outer(*sides, shape)
    if isinstance(total, Dense):
        grads_B = total.grads_B.reshape(-1, *own)
        grads_B = grads_B.mT if derived.transposed else grads_B
        return Dense(grads_B.reshape(-1, *shape))
    return None if derived.transposed or tuple(derived.tensor.shape) != shape else replace(total)  # type: ignore[type-var]  # a dataclass


def _backwards(
    derived: Tracked, total: PerSampleGrad, params: Mapping[str, Tensor], sentinels: Mapping[str, Tensor]
) -> dict[str, PerSampleGrad]:
    """Differentiate through the graph that made the value, for all samples at once where torch can batch it."""
    leaves, grads_B = (*params.values(), *sentinels.values()), total.dense().to(derived.tensor.dtype)

    def differentiate(grad: Tensor, batched: bool) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            derived.tensor, leaves, grad, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )

    try:
        grads = differentiate(grads_B, True)
    except RuntimeError as error:  # an operation of a custom autograd.Function that has no batching rule
        refuse_out_of_memory(error)
        rows = [differentiate(grad, False) for grad in grads_B.unbind(0)]
        grads = [None if any(g is None for g in each) else torch.stack(each) for each in zip(*rows, strict=True)]
    refuse_escaped(sentinels, grads[len(params) :])
    return {name: Dense(grad) for name, grad in zip(params, grads, strict=False) if grad is not None}
