"""Autograd function that returns an output unchanged and catches its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpfunc._utils.dtensor import is_dtensor
from dpfunc.engines.guards.modes import unseen
from dpfunc.engines.uses.tensor_parallel import full_tensor_of, gradient_placements, local_part

Catch = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor | None, ...]]
"""(gradient of the output, saved tensors) -> gradients of the leaves."""


class GradientTap(torch.autograd.Function):
    """Identity; in the backward pass `catch` makes the gradients of the leaves from that of the output.

    The leaves are tensors without memory, whose gradients are requested: so there are no side effects, and autograd
    itself saves the saved tensors, which gradient checkpointing relies on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        catch: Catch,
        num_saved: int,
        *tensors: Tensor,
    ) -> Tensor:
        """Return the output; `tensors` are those to save, then the leaves."""
        ctx.catch, ctx.num_saved, ctx.num_leaves = catch, num_saved, len(tensors) - num_saved
        ctx.save_for_backward(*tensors[:num_saved])
        if torch.compiler.is_compiling():
            return output.view_as(output)
        if output._is_view():  # an alias that is no view: an in-place activation may write into it
            alias: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
            return alias
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient unchanged for the output, and the caught ones for the leaves."""
        caught = ctx.catch(grad, ctx.saved_tensors)
        return (grad, None, None, *(None for _ in range(ctx.num_saved)), *caught)


def tapped(output: Tensor, catch: Catch, saved: Sequence[Tensor], leaves: Sequence[Tensor]) -> Tensor:
    """An output whose gradient is caught; of one that is split over ranks, this rank's part as a plain tensor."""
    if is_dtensor(output):
        catch = partial(_caught_local, catch, gradient_placements(output))
    result: Tensor = GradientTap.apply(output, catch, len(saved), *saved, *leaves)  # type: ignore[no-untyped-call]  # `apply` has no types
    return result


def watched(output: Tensor, catch: Catch, leaves: Sequence[Tensor]) -> Tensor:
    """An output whose gradient is caught, all of it on every rank."""
    if is_dtensor(output):
        catch = partial(_caught_full, catch)
    result: Tensor = GradientTap.apply(output, catch, 0, *leaves)  # type: ignore[no-untyped-call]  # `apply` has no types
    return result


def _caught_local(
    catch: Catch, placements: tuple[Any, ...], grad: Tensor, saved: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    return catch(local_part(grad, placements), saved)


def _caught_full(catch: Catch, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return catch(full_tensor_of(grad), saved)


def leaf(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A leaf of any shape without memory."""
    with unseen():
        return torch.empty((), dtype=dtype, device=device).expand(shape).requires_grad_()


def catch_any(grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Catch a number that exists if any gradient does."""
    return (grad.detach().abs().sum().reshape(()),)


def pass_gradient(grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Catch the gradient of the output itself."""
    return (grad,)
