"""Reading and writing at positions along one axis: gather, scatter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Handler, Type, broadcast, combined
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Rows, axes_of


def _along_one(call: Call, self: Tensor, dim: int, others: Sequence[Tensor]) -> Type:
    """gather, scatter: tensors of equal axes but for `dim`, along which positions are looked up in `self`."""
    (axis,) = axes_of(dim, self.ndim)
    kind = call.type_of(self)
    if isinstance(kind, Rows) and kind.axis == axis:
        return call.mixed("of other samples")
    table = Aligned(self, lambda own: own, lambda common: -1 if common == axis else common)
    return combined(call, [table, *(broadcast(other, self.ndim) for other in others)])


def _gather(call: Call) -> Type:
    """`out[i, j] = self[i, index[i, j]]`."""
    return _along_one(call, call.args[0], call.arg(1, "dim"), [call.arg(2, "index")])


def _gather_backward(call: Call) -> Type:
    """`(grad, self, dim, index, sparse)`: written back to the positions that were read."""
    return _along_one(call, call.args[1], call.args[2], [call.args[0], call.args[3]])


def _scatter(call: Call) -> Type:
    """`self[i, index[i, j]] = source[i, j]`, or a sum, or a number."""
    self, index, source = call.args[0], call.arg(2, "index"), call.arg(3, "src")
    others = [index, *([source] if isinstance(source, Tensor) and source.ndim else [])]
    (axis,) = axes_of(call.arg(1, "dim"), self.ndim)
    kinds = [call.type_of(other) for other in others]
    if any(isinstance(kind, Rows) and kind.axis == axis for kind in kinds):
        return call.mixed("into positions of other samples")
    kind = _along_one(call, self, axis, others)
    if isinstance(kind, Rows) and kind.axis != ONE_SAMPLE and index.shape[kind.axis] != self.shape[kind.axis]:
        return call.mixed("into a part of the samples")  # an index is not broadcast
    return kind


FAMILY: dict[str, Handler] = {
    "gather": _gather,
    "gather_backward": _gather_backward,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _scatter),
}
