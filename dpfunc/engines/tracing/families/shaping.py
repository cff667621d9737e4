"""Operations that move numbers: joining, repeating, padding, and the backward passes of views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Type, broadcast, combined, shaped_too
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, axes_of, gathered, same_ids, samples_by_position


def _cat(call: Call) -> Type:
    """Along another axis, the rows of all; along theirs, the rows of each one after the other."""
    tensors: Sequence[Tensor] = [tensor for tensor in call.args[0] if tensor.shape != (0,)]
    (dim,) = axes_of(call.arg(1, "dim", 0), tensors[0].ndim)
    return _joined(call, tensors, dim)


def _joined(call: Call, tensors: Sequence[Tensor], dim: int) -> Type:
    """Tensors one after the other along `dim`."""
    kinds = [call.type_of(tensor) for tensor in tensors]
    if _keeps_rows_apart(kinds, dim):
        return combined(call, [broadcast(tensor, tensors[0].ndim) for tensor in tensors])
    pieces, doubt = [], ""
    for tensor, kind in zip(tensors, kinds, strict=True):
        if isinstance(kind, Mixed):
            return kind
        if kind is None or kind.axis not in (dim, ONE_SAMPLE):
            return call.mixed("of samples and other things")
        doubt = doubt or _doubt_of_piece(kind)
        pieces.append(_samples_along(kind, tensor.shape[dim]))
    return gathered(torch.cat(pieces), dim, call.types.num_samples, doubt)


def _keeps_rows_apart(kinds: Sequence[Type], dim: int) -> bool:
    """True if tensors are joined along another axis than that of their rows; or one sample and constants."""
    found = [kind for kind in kinds if isinstance(kind, Rows)]
    if all(kind.axis not in (dim, ONE_SAMPLE) for kind in found):
        return True
    of_one_sample = all(kind.axis == ONE_SAMPLE and same_ids(kind.ids, found[0].ids) for kind in found)
    return of_one_sample and len(found) < len(kinds)


def _doubt_of_piece(rows: Rows) -> str:
    return rows.doubt or ("" if rows.slots is None else "rows in an order that depends on several samples")


def _samples_along(rows: Rows, length: int) -> Tensor:
    """The sample of each position of an axis of that length: the axis of the rows, or any if all are of one sample."""
    if rows.axis != ONE_SAMPLE:
        return samples_by_position(rows)
    return (torch.zeros(1, dtype=torch.int64) if rows.ids is None else rows.ids).expand(length)


def _stack(call: Call) -> Type:
    """Tensors side by side on a new axis, before or behind that of the rows."""
    tensors: Sequence[Tensor] = call.args[0]
    (dim,) = axes_of(call.arg(1, "dim", 0), tensors[0].ndim + 1)
    kinds = [call.type_of(tensor) for tensor in tensors]
    if kinds and all(isinstance(kind, Rows) and kind.axis == ONE_SAMPLE for kind in kinds):
        return _joined(call, [tensor.unsqueeze(dim) for tensor in tensors], dim)
    kind = combined(call, [broadcast(tensor, tensors[0].ndim) for tensor in tensors])
    return kind.moved(kind.axis + (kind.axis >= dim)) if isinstance(kind, Rows) and kind.axis != ONE_SAMPLE else kind


def _repeat(call: Call) -> Type:
    """Each axis is repeated as a whole; axes may be added on the left."""
    input, sizes = call.args[0], call.args[1]
    kind = call.type_of(input)
    if not isinstance(kind, Rows) or kind.axis == ONE_SAMPLE:
        return kind
    shift = len(sizes) - input.ndim
    return kind._replace(axis=kind.axis + shift, pre=kind.pre * sizes[kind.axis + shift])


def _padded(call: Call) -> Type:
    """Padding by constants: pairs from the last axis on."""
    input, pads = call.args[0], call.args[1]
    axes = [input.ndim - 1 - pair // 2 for pair in range(len(pads)) if pads[pair]]
    return combined(call, [broadcast(input, input.ndim)], axes)


def _view_backward(dim: int) -> Callable[[Call], Type]:
    """`slice_backward(grad, sizes, dim, ...)`: the gradient put back into zeros."""

    def handler(call: Call) -> Type:
        grad: Tensor = call.args[0]
        sizes = call.args[1]
        (axis,) = axes_of(call.args[dim], len(sizes))
        kind = call.type_of(grad)
        if not isinstance(kind, Rows):
            return kind
        if kind.axis == axis or (kind.axis == ONE_SAMPLE and sizes[axis] == call.types.num_samples):
            return _samples_put_back(call, grad, kind, axis)
        return kind

    return handler


def _samples_put_back(call: Call, grad: Tensor, kind: Rows, axis: int) -> Type:
    """A part of the samples, put back at their positions."""
    if call.out.shape[axis] != call.types.num_samples:
        return call.mixed()
    start, step = call.args[3], call.args[5] if len(call.args) > 5 else 1
    positions = torch.arange(call.types.num_samples)[start : call.args[4] : step] if len(call.args) > 4 else None
    ids = samples_by_position(kind) if kind.axis != ONE_SAMPLE else kind.ids
    if positions is None or ids is None or not torch.equal(positions, ids):
        return call.mixed()
    return Rows(axis, call.types.num_samples, doubt=kind.doubt)


def _select_backward(call: Call) -> Type:
    """`(grad, sizes, dim, index)`: the gradient of one slice put back into zeros."""
    grad: Tensor = call.args[0]
    (axis,) = axes_of(call.args[2], len(call.args[1]))
    kind = call.type_of(grad)
    if not isinstance(kind, Rows):
        return kind
    if kind.axis == ONE_SAMPLE:
        sample = 0 if kind.ids is None else int(kind.ids[0])
        if call.args[1][axis] == call.types.num_samples and sample == call.args[3] % call.types.num_samples:
            return Rows(axis, call.types.num_samples, doubt=kind.doubt)
        return kind
    return kind.moved(kind.axis + (kind.axis >= axis))


def _slice_scatter(call: Call) -> Type:
    """`(self, source, dim, ...)`: both have all axes, and the positions along `dim` are combined."""
    (axis,) = axes_of(call.arg(2, "dim", 0), call.args[0].ndim)
    operands = [broadcast(call.args[0], call.out.ndim), broadcast(call.args[1], call.out.ndim)]
    return combined(call, operands, (axis,))


def _select_scatter(call: Call) -> Type:
    """`(self, source, dim, index)`: the source lacks the axis."""
    (axis,) = axes_of(call.args[2], call.args[0].ndim)
    return combined(
        call, [broadcast(call.args[0], call.out.ndim), broadcast(call.args[1].unsqueeze(axis), call.out.ndim)], (axis,)
    )


def _unfold_backward(call: Call) -> Type:
    """`(grad, sizes, dim, size, step)`: windows along an axis are added up; the last axis is that of the windows."""
    grad: Tensor = call.args[0]
    (axis,) = axes_of(call.args[2], len(call.args[1]))
    kind = call.type_of(grad)
    if isinstance(kind, Rows) and kind.axis in (axis, grad.ndim - 1):
        return call.mixed()
    return kind


def _split_with_copies(call: Call) -> list[Type]:
    """Splits that copy: each part as its input, unless the samples are split."""
    input: Tensor = call.args[0]
    kind = call.type_of(input)
    (axis,) = axes_of(call.arg(2, "dim", 0), input.ndim)
    mixed = isinstance(kind, Rows) and kind.axis == axis
    return [call.mixed() if mixed else kind] * len(call.out)


def _reshaped(call: Call) -> Type:
    """A copy of another shape: as the view of a contiguous copy would be."""
    input: Tensor = call.args[0]
    kind = call.type_of(input)
    if not isinstance(kind, Rows) or kind.axis == ONE_SAMPLE:
        return kind
    inner = math.prod(input.shape[kind.axis + 1 :]) * kind.post
    length_of_row = inner
    for axis in reversed(range(call.out.ndim)):  # the axis whose stride divides a row
        stride = math.prod(call.out.shape[axis + 1 :])
        if stride <= length_of_row < stride * call.out.shape[axis] and length_of_row % stride == 0:
            length = call.out.shape[axis]
            post = length_of_row // stride
            if length % (post * kind.count) == 0:
                return Rows(axis, kind.count, length // (post * kind.count), post, kind.ids, kind.doubt, kind.ragged)
    return call.mixed("a reshape across samples")


def _diagonal_backward(call: Call) -> Type:
    """`(grad, sizes, offset, dim1, dim2)`: rows must be on an axis that both have."""
    kind = call.type_of(call.args[0])
    grad: Tensor = call.args[0]
    dims = axes_of(call.args[3:5], len(call.args[1]))
    if not isinstance(kind, Rows) or kind.axis == ONE_SAMPLE:
        return kind
    if kind.axis == grad.ndim - 1:
        return call.mixed()
    kept = [axis for axis in range(len(call.args[1])) if axis not in dims]
    return kind.moved(kept[kind.axis])


def _diag_embed(call: Call) -> Type:
    """The last axis becomes two, the axes of a matrix with the numbers on a diagonal."""
    input: Tensor = call.args[0]
    kind = call.type_of(input)
    if not isinstance(kind, Rows) or kind.axis == ONE_SAMPLE:
        return kind
    if kind.axis == input.ndim - 1:
        return call.mixed()
    made = axes_of([call.arg(2, "dim1", -2), call.arg(3, "dim2", -1)], input.ndim + 1)
    return kind.moved([axis for axis in range(input.ndim + 1) if axis not in made][kind.axis])


def _like_first(call: Call) -> Type:
    """Copies: the type is that of the first argument."""
    return call.type_of(call.args[0])


def _pixel_shuffle(call: Call) -> Type:
    """Channels and space are exchanged; leading axes stay."""
    input: Tensor = call.args[0]
    return combined(call, [broadcast(input, input.ndim)], range(input.ndim - 3, input.ndim))


def _channel_shuffle(call: Call) -> Type:
    """Channels are exchanged: the positions of axis 1 are combined."""
    return combined(call, [broadcast(call.args[0], call.args[0].ndim)], (1,))


def _repeat_interleave(call: Call) -> Type:
    """With counts in a tensor: the positions that result."""
    return shaped_too(call.mixed("with counts from values")) if call.type_of(call.args[0]) is not None else None


FAMILY: dict[str, Callable[[Call], object]] = {
    "cat": _cat,
    "stack": _stack,
    "repeat": _repeat,
    "constant_pad_nd": _padded,
    "slice_backward": _view_backward(2),
    "select_backward": _select_backward,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "unfold_backward": _unfold_backward,
    "diagonal_backward": _diagonal_backward,
    "diag_embed": _diag_embed,
    "_reshape_copy": _reshaped,
    "clone": _like_first,
    "_to_copy": _like_first,
    "contiguous": _like_first,
    "_to_dense": _like_first,
    "split_with_sizes_copy": _split_with_copies,
    "split_copy": _split_with_copies,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_shuffle,
    "channel_shuffle": _channel_shuffle,
    "native_channel_shuffle": _channel_shuffle,
    "repeat_interleave": _repeat_interleave,
}
