"""Cross-entropy of classes by its native kernels below both levels: vmap takes it apart into many operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines.islands import Pass
from dpfunc.engines.levels import Below, Levels, apply_node, inside, is_row, of_rows

_NAMES = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
_PLAIN = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
_REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda losses, counted: losses,
    "sum": lambda losses, counted: losses.sum(),
    "mean": lambda losses, counted: losses.sum() / counted.sum(),
}
_NONE = 0  # torch's number of the reduction "none"


class _Node(torch.autograd.Function):
    """Losses of all positions, (B, n, ...) of logits (B, n, C, ...)."""

    @staticmethod
    def forward(ctx: Any, over: Levels, ignored: int, logits: Tensor, target: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        logits_B, target_B = of_rows(logits), of_rows(target)
        with Below():
            x, classes = logits_B.flatten(0, 1), target_B.flatten(0, 1)  # type: ignore[union-attr]  # rows
            if x.ndim > 2:
                x, classes = x.reshape(*x.shape[:2], 1, -1), classes.reshape(len(x), 1, -1)
            log_probs = x.log_softmax(1)
            run = torch.ops.aten.nll_loss_forward if x.ndim == 2 else torch.ops.aten.nll_loss2d_forward
            losses, weight = run(log_probs, classes, None, _NONE, ignored)
            losses = losses.reshape(target_B.shape)  # type: ignore[union-attr]  # rows
        ctx.over, ctx.kept = over, (log_probs, classes, None, _NONE, ignored, weight)
        ctx.given = logits_B.shape, logits_B.dtype  # type: ignore[union-attr]  # rows
        return over.row(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        log_probs, classes, *_ = ctx.kept
        shape, dtype = ctx.given
        grad_B = of_rows(grad)
        with Below(), torch._C.DisableTorchFunction():
            if grad_B is None:
                grad_B = inside(grad).expand(shape[0], *grad.shape)
            run = torch.ops.aten.nll_loss_backward if log_probs.ndim == 2 else torch.ops.aten.nll_loss2d_backward
            of_log = run(grad_B.reshape(classes.shape), *ctx.kept)
            found = torch.ops.aten._log_softmax_backward_data(of_log, log_probs, 1, log_probs.dtype)
            found = found.to(dtype).reshape(shape)
        return None, None, ctx.over.row(found), None


def cross_entropy(owner: Pass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`F.cross_entropy` of classes in whole numbers; NotImplemented where vmap and grad are to do it."""
    over, bound = owner.levels, {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    logits, target, ignored = bound["input"], bound["target"], bound.get("ignore_index", -100)
    if not over.on_top() or not torch.is_grad_enabled() or not (is_row(logits) and is_row(target)):
        return NotImplemented
    if any(bound.get(name, plain) != plain for name, plain in _PLAIN.items()):
        return NotImplemented
    of_classes = target.dtype == torch.int64 and logits.ndim > 1 and target.shape == logits.shape[:1] + logits.shape[2:]
    if not of_classes or not logits.requires_grad:
        return NotImplemented
    losses = apply_node(_Node, over, ignored, logits, target)
    return _REDUCTIONS[bound.get("reduction", "mean")](losses, target != ignored)
