"""Recurrent layers that are one operation."""

from __future__ import annotations

from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Handler, Type, combined
from dpfunc.engines.tracing.families.aligning import nowhere
from dpfunc.engines.tracing.rows import Rows


def time_first(tensor: Tensor) -> Aligned:
    """(T, B, d) or (B, d)."""
    return Aligned(tensor, lambda axis: axis + (tensor.ndim == 2), lambda axis: axis - (tensor.ndim == 2))


def _recurrent(call: Call) -> list[Type]:
    """A whole layer over (T, B, d), with its states; the workspace is opaque, and only goes to the backward pass."""
    states = [call.args[0], *call.args[5:7]]
    operands = [time_first(t) for t in states] + [nowhere(t) for t in call.args[1:5] if isinstance(t, Tensor)]
    kind = combined(call, operands, (0, 2))
    return [as_time_first(kind, value) for value in call.out[:-1]] + [None]


def as_time_first(kind: Type, value: object) -> Type:
    if isinstance(kind, Rows) and isinstance(value, Tensor) and value.ndim == 2:
        return kind.moved(0)
    return kind


def _recurrent_backward(call: Call) -> list[Type]:
    """Gradients of inputs, four weights, and two states."""
    beside = [v for v in (call.args[0], *call.args[5:]) if isinstance(v, Tensor) and v.is_floating_point()]
    kind = combined(call, [time_first(tensor) for tensor in beside if tensor.ndim >= 2], (0, 2))
    weights = [call.mixed("gradient of weights")] * 4
    return [as_time_first(kind, call.out[0]), *weights, *(as_time_first(kind, value) for value in call.out[5:])]


FAMILY: dict[str, Handler] = {
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
}  # fmt: skip
