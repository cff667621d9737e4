"""Losses that torch has as one operation."""

from __future__ import annotations

from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Handler, Type, broadcast, combined, leading
from dpfunc.engines.tracing.families.aligning import first_axis, nowhere
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Rows


def _class_axis(tensor: Tensor) -> Aligned:
    """Targets (N, ...) beside scores (N, C, ...): the axis of the classes is missing."""
    return Aligned(tensor, lambda axis: axis + (axis > 0), lambda axis: axis - (axis > 1) if axis != 1 else -1)


def _nll_loss(call: Call) -> list[Type]:
    """`(scores (N, C, ...), targets (N, ...), weight, reduction, ...)`."""
    scores, targets, reduction = call.args[0], call.args[1], call.args[3]
    weights = [nowhere(weight) for weight in [call.arg(2, "weight")] if isinstance(weight, Tensor)]
    if scores.ndim == 1:
        return [combined(call, [nowhere(scores), nowhere(targets), *weights])] * 2
    kind = combined(call, [leading(scores), _class_axis(targets), *weights], (1,))
    if not isinstance(kind, Rows) or kind.axis == ONE_SAMPLE:
        return [kind, kind]
    if reduction != 0:
        return [call.mixed("over the batch")] * 2
    return [kind.moved(kind.axis - (kind.axis > 1)), None]


def _nll_loss_backward(call: Call) -> Type:
    """`(grad, scores, targets, weight, reduction, ...)`."""
    grad, scores, targets = call.args[0], call.args[1], call.args[2]
    others = [
        nowhere(value) for value in (call.arg(3, "weight"), call.arg(6, "total_weight")) if isinstance(value, Tensor)
    ]
    if scores.ndim == 1:
        return combined(call, [nowhere(tensor) for tensor in (grad, scores, targets)] + others)
    operands = [leading(scores), _class_axis(targets), _class_axis(grad) if grad.ndim else nowhere(grad)]
    return combined(call, operands + others, (1,))


def _elementwise_loss(position: int) -> Handler:
    """A loss of two tensors with a reduction at a position of its arguments, 1 (the mean) where it is missing."""

    def handler(call: Call) -> Type:
        tensors = call.inputs
        ndim = max(tensor.ndim for tensor in tensors)
        kind = combined(call, [broadcast(tensor, ndim) for tensor in tensors])
        reduces = call.arg(position, "reduction", 1) != 0
        if call.name.endswith("_backward"):
            return kind
        return call.mixed("over the batch") if isinstance(kind, Rows) and reduces and kind.axis != ONE_SAMPLE else kind

    return handler


def _margin_loss(call: Call) -> Type:
    """Losses of scores (N, C) with one target or several a row; mixed where they are reduced."""
    kind = first_axis(call)
    out = call.out if isinstance(call.out, Tensor) else call.out[0]
    return kind if out.ndim or not isinstance(kind, Rows) else call.mixed("over the batch")


def _ctc_loss(call: Call) -> list[Type]:
    """`(log_probs (T, B, C), targets (B, S), input_lengths, target_lengths, ...)`.

    Targets may be joined to one axis: the lengths of a sample then say where the targets of the next one begin.
    """
    lengths = [call.arg(2, "input_lengths"), call.arg(3, "target_lengths")]
    if any(isinstance(given, (list, tuple)) and len(set(given)) > 1 for given in lengths):
        return [call.mixed("with lengths that differ between positions of the batch")] * 2
    if call.args[1].ndim == 1 and isinstance(lengths[1], Tensor) and call.type_of(lengths[1]) is not None:
        return [call.mixed("of targets whose positions follow from the lengths of other samples")] * 2
    scores = Aligned(call.args[0], lambda axis: 0 if axis == 1 else -1, lambda axis: 1 if axis == 0 else -1)
    others = [leading(t) for t in call.args[1:] if isinstance(t, Tensor)]
    return [combined(call, [scores, *others], range(1, 4))] * 2


def _ctc_loss_backward(call: Call) -> Type:
    """`(grad (B,), log_probs (T, B, C), targets, ..., losses (B,), log_alpha (B, ...), ...)`."""
    scores = Aligned(call.args[1], lambda axis: 0 if axis == 1 else -1, lambda axis: 1 if axis == 0 else -1)
    others = [leading(t) for t in (call.args[0], *call.args[2:]) if isinstance(t, Tensor)]
    kind = combined(call, [scores, *others], range(1, 4))
    return kind.moved(1) if isinstance(kind, Rows) and kind.axis != ONE_SAMPLE else kind


_LOSSES = {
    "mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}  # fmt: skip


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll_loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_loss_backward),
    **{name: _elementwise_loss(position) for name, position in _LOSSES.items()},
    # that of huber_loss is elementwise, see `layers`
    **{f"{name}_backward": _elementwise_loss(at + 1) for name, at in _LOSSES.items() if name != "huber_loss"},
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss_forward"), _margin_loss),
    **dict.fromkeys(("multi_margin_loss_backward", "multilabel_margin_loss_backward"), first_axis),
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _ctc_loss_backward,
}  # fmt: skip
