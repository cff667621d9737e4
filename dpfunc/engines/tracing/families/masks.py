"""Positions that a mask selects, in the order of the batch."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type, broadcast, combined, shaped_too
from dpfunc.engines.tracing.families.positions import COORDINATES
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, gathered, samples_by_position


def _nonzero(call: Call) -> Type:
    """The coordinates of what is not zero, (N, ndim): each of the sample that it is found in."""
    input: Tensor = call.args[0]
    kind = call.type_of(input)
    if not isinstance(kind, Rows) or kind.axis == ONE_SAMPLE:
        return shaped_too(kind)
    call.types.mark(COORDINATES, call.out[:, kind.axis])
    ids = samples_by_position(kind)[call.out[:, kind.axis].cpu()]
    return gathered(ids, 0, call.types.num_samples, kind.doubt)._replace(ragged=True)


def _masked_scatter(call: Call) -> Type:
    """`self[mask] = source`, in order: each sample must have as many positions as its own source has numbers."""
    self, mask, source = call.args[:3]
    kind, filled = call.type_of(self), call.type_of(source)
    if isinstance(kind, Mixed) or isinstance(filled, Mixed):
        return kind if isinstance(kind, Mixed) else filled
    if call.type_of(mask) is None and kind is None and filled is None:
        return None
    mask_rows = combined(call, [broadcast(self, self.ndim), broadcast(mask, self.ndim)])
    if not _one_sample_after_the_other(mask_rows) or not _one_sample_after_the_other(filled):
        return call.mixed("in the order of the batch")
    counts_B = mask.expand_as(self).reshape(call.types.num_samples, -1).sum(1)
    if not bool((counts_B == source.numel() // call.types.num_samples).all()):
        return mask_rows.doubted("masked_scatter with counts that differ between samples")
    return mask_rows.doubted(filled.doubt)


def _one_sample_after_the_other(kind: Type) -> TypeGuard[Rows]:
    """True for rows of all samples on axis 0, in the order of the batch."""
    return isinstance(kind, Rows) and kind.axis == 0 and kind.ids is None and kind.pre == 1


def _masked_scatter_backward(call: Call) -> Type:
    """`(grad, mask, sizes)`: the gradient of the source."""
    grad, mask, sizes = call.args[:3]
    kind = combined(call, [broadcast(grad, grad.ndim), broadcast(mask, grad.ndim)])
    if not _one_sample_after_the_other(kind):
        return kind if isinstance(kind, Mixed) else call.mixed()
    count = call.types.num_samples
    counts_B = mask.expand_as(grad).reshape(count, -1).sum(1)
    wanted = call.out.numel() // count
    if sizes[0] % count or not bool((counts_B == wanted).all()):
        return call.mixed("with counts that differ between samples")
    return Rows(0, count, 1, sizes[0] // count, doubt=kind.doubt)


FAMILY: dict[str, Handler] = {
    "nonzero": _nonzero,
    "masked_scatter": _masked_scatter,
    "masked_scatter_backward": _masked_scatter_backward,
}
