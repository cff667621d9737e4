"""Norms of layers, groups of channels, and batches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Handler, Type, broadcast, combined, leading
from dpfunc.engines.tracing.families.aligning import nowhere
from dpfunc.engines.tracing.rows import Rows


def _layer_norm(call: Call) -> list[Type]:
    """`(input, shape, weight, bias, eps)` and the fused RMS norm: results, then statistics."""
    input, features = call.args[0], len(call.args[1])
    ndim = input.ndim
    tensors = [tensor for tensor in call.inputs if tensor is not input]
    operands = [broadcast(input, ndim), *(broadcast(tensor, ndim) for tensor in tensors)]
    return [combined(call, operands, range(ndim - features, ndim))] * len(call.out)


def _layer_norm_backward(call: Call) -> list[Type]:
    """`(grad, input, shape, mean, rstd, weight, bias, mask)`; of the fused RMS norm without mean and bias."""
    grad, input, shape = call.args[0], call.args[1], call.args[2]
    ndim, features = input.ndim, len(shape)
    statistics = [value for value in call.args[3:] if isinstance(value, Tensor) and value.ndim == ndim]
    weights = [v for v in call.args[3:] if isinstance(v, Tensor) and v.ndim != ndim]
    operands = [broadcast(tensor, ndim) for tensor in (grad, input, *statistics, *weights)]
    kind = combined(call, operands, range(ndim - features, ndim))
    return [kind, *[call.mixed("gradient of weights")] * (len(call.out) - 1)]


def _group_norm(call: Call) -> list[Type]:
    """`(input, weight, bias, N, C, HxW, group, eps)`."""
    operands = [leading(call.args[0]), *(nowhere(t) for t in call.args[1:3] if isinstance(t, Tensor))]
    return [combined(call, operands, range(1, 8))] * 3


def _group_norm_backward(call: Call) -> list[Type]:
    """`(grad, input, mean, rstd, weight, ...)`."""
    tensors = [leading(t) for t in call.args[:4]] + [nowhere(t) for t in call.args[4:5] if isinstance(t, Tensor)]
    return [combined(call, tensors, range(1, 8)), call.mixed("gradient of weights"), call.mixed("gradient of biases")]


def _channelwise(tensor: Tensor) -> Aligned:
    """One number a channel: its axis 0 is axis 1."""
    return Aligned(tensor, lambda axis: 1 if axis == 0 else -1, lambda axis: 0 if axis == 1 else -1)


def _batch_norm(call: Call) -> list[Type]:
    """`(input, weight, bias, running_mean, running_var, training, ...)`: fixed statistics, or those of each channel."""
    input = call.args[0]
    fixed = all(isinstance(value, Tensor) for value in call.args[3:5])
    training = call.name == "_batch_norm_with_update" or not fixed or any(value is True for value in call.args[5:6])
    others = [value for value in call.args[1:5] if isinstance(value, Tensor)]
    return _normed(call, [input], others, training, len(call.out))


def _normed(call: Call, data: Sequence[Tensor], others: Sequence[Tensor], training: bool, count: int) -> list[Type]:
    forbidden = [axis for axis in range(8) if axis != 1] if training else []
    operands = [*(leading(tensor) for tensor in data), *(_channelwise(t) for t in others if t.numel())]
    kind = combined(call, operands, forbidden)
    statistics = (
        kind.moved(0) if isinstance(kind, Rows) and kind.axis == 1 else None if isinstance(kind, Rows) else kind
    )
    return [kind, *[statistics] * (count - 1)]


def _batch_norm_backward(call: Call) -> list[Type]:
    """`(grad, input, weight, running_mean, running_var, mean, rstd, training, eps, mask)`."""
    tensors = [value for value in call.args[2:7] if isinstance(value, Tensor)]
    training = bool(next((value for value in call.args[5:9] if isinstance(value, bool)), True))
    kind, *rest = _normed(call, call.args[:2], tensors, training, 3)
    if not training:
        rest = [call.mixed("gradient of weights")] * 2
    return [kind, *rest]


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _layer_norm_backward),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
         "_batch_norm_with_update", "_batch_norm_no_update"),
        _batch_norm,
    ),
    **dict.fromkeys(("native_batch_norm_backward", "cudnn_batch_norm_backward"), _batch_norm_backward),
}  # fmt: skip
