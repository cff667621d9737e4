"""Cross-entropy of all rows by torch's kernels, with its gradient in closed form; no graph is kept: for speed only.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Axis letters: B rows, n samples of one row, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines._levels import Levels, Node, OutsideTransforms, Pass, apply_node, is_row, of_rows

_ENTROPY = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
_WITHOUT = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
_REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "none": lambda losses, target, ignored: losses,
    "sum": lambda losses, target, ignored: losses.sum(),
    "mean": lambda losses, target, ignored: losses.sum() / (target != ignored).sum(),
}
_NONE = 0  # torch's number of the reduction "none"


class _CrossEntropy(Node):
    """Losses of all positions, (B, n, ...) of logits (B, n, C, ...)."""

    @staticmethod
    def forward(over: Levels, ignored: int, kept: list[Any], logits: Tensor, target: Tensor) -> Tensor:
        logits_B, target_B = of_rows(logits), of_rows(target)
        with OutsideTransforms():
            x, classes = logits_B.flatten(0, 1), target_B.flatten(0, 1)  # type: ignore[union-attr]  # rows
            if x.ndim > 2:
                x, classes = x.reshape(*x.shape[:2], 1, -1), classes.reshape(len(x), 1, -1)
            log_probs = x.log_softmax(1)
            run = torch.ops.aten.nll_loss_forward if x.ndim == 2 else torch.ops.aten.nll_loss2d_forward
            losses, weight = run(log_probs, classes, None, _NONE, ignored)
            losses = losses.reshape(target_B.shape)  # type: ignore[union-attr]  # rows
        kept += (log_probs, classes, None, _NONE, ignored, weight)
        return over.row(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.over, _, ctx.kept, logits, _ = inputs
        ctx.shape, ctx.dtype = logits.shape, logits.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        log_probs, classes, *_ = ctx.kept
        grad_B = ctx.over.all_rows(grad)
        with OutsideTransforms(), torch._C.DisableTorchFunction():
            run = torch.ops.aten.nll_loss_backward if log_probs.ndim == 2 else torch.ops.aten.nll_loss2d_backward
            of_log = run(grad_B.reshape(classes.shape), *ctx.kept)
            found = torch.ops.aten._log_softmax_backward_data(of_log, log_probs, 1, log_probs.dtype)
            found = found.to(ctx.dtype).reshape(len(grad_B), *ctx.shape)
        return None, None, None, ctx.over.row(found), None


def cross_entropy(owner: Pass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`F.cross_entropy` of classes in whole numbers; NotImplemented where vmap and grad are to do it."""
    over, bound = owner.levels, {**dict(zip(_ENTROPY, args, strict=False)), **kwargs}
    logits, target, ignored = bound["input"], bound["target"], bound.get("ignore_index", -100)
    if not owner.is_open() or not (is_row(logits) and is_row(target)) or bound.keys() - set(_ENTROPY):
        return NotImplemented
    if any(bound.get(name, plain) != plain for name, plain in _WITHOUT.items()):
        return NotImplemented
    of_classes = target.dtype == torch.int64 and logits.ndim > 1 and target.shape == logits.shape[:1] + logits.shape[2:]
    if not of_classes or not logits.requires_grad:
        return NotImplemented
    losses = apply_node(_CrossEntropy, over, ignored, [], logits, target)
    return _REDUCTIONS[bound.get("reduction", "mean")](losses, target, ignored)
