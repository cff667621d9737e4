"""Reading and writing at positions: by one axis (gather, scatter), by lists of positions, by masks, by tables.

A sample may choose among its own numbers and among constants. Positions on the axis of the samples are followed row by
row: which sample stands where is computed with the same positions. Positions that were computed from several samples
must be a permutation of all rows, which leaves none out because of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Type, broadcast, combined, leading
from dpfunc.engines.tracing.rows import (
    WHOLE,
    Mixed,
    Rows,
    axes_of,
    gathered,
    normal,
    same_ids,
    same_slots,
    shuffled,
    slots_of,
    spread,
)


def along_one(call: Call, self: Tensor, dim: int, others: Sequence[Tensor]) -> Type:
    """gather, scatter: tensors of equal axes but for `dim`, along which positions are looked up in `self`."""
    (axis,) = axes_of(dim, self.ndim)
    kind = call.type_of(self)
    if isinstance(kind, Rows) and kind.axis == axis:
        return call.mixed("of other samples")
    table = Aligned(self, lambda own: own, lambda place: -1 if place == axis else place)
    return combined(call, [table, *(broadcast(other, self.ndim) for other in others)])


def gather(call: Call) -> Type:
    """`out[i, j] = self[i, index[i, j]]`."""
    return along_one(call, call.args[0], call.arg(1, "dim"), [call.arg(2, "index")])


def gather_backward(call: Call) -> Type:
    """`(grad, self, dim, index, sparse)`."""
    return along_one(call, call.args[1], call.args[2], [call.args[0], call.args[3]])


def scatter(call: Call) -> Type:
    """`self[i, index[i, j]] = source[i, j]`, or a sum, or a number."""
    self, index, source = call.args[0], call.arg(2, "index"), call.arg(3, "src")
    others = [index, *([source] if isinstance(source, Tensor) and source.ndim else [])]
    (axis,) = axes_of(call.arg(1, "dim"), self.ndim)
    kinds = [call.type_of(other) for other in others]
    if any(isinstance(kind, Rows) and kind.axis == axis for kind in kinds):
        return call.mixed("into positions of other samples")
    return along_one(call, self, axis, others)


class Positions(NamedTuple):
    """Positions on one axis: the values, and what they depend on."""

    values: Tensor
    kind: Type


def expanded_masks(call: Call, indices: Sequence[Tensor | None]) -> list[Positions | None]:
    """Masks as lists of positions, one an axis."""
    found: list[Positions | None] = []
    for index in indices:
        if index is None:
            found.append(None)
        elif index.dtype in (torch.bool, torch.uint8):
            kind = call.type_of(index)
            places = index.nonzero()
            if isinstance(kind, Rows) and kind.axis != WHOLE:
                kind = gathered(spread(kind)[places[:, kind.axis].cpu()], 0, call.types.num_samples, kind.doubt)
                kind = kind._replace(ragged=True)
            found.extend(Positions(places[:, axis], kind) for axis in range(index.ndim))
        else:
            found.append(Positions(index, call.type_of(index)))
    return found


def single_axis(target: Tensor) -> tuple[int, Tensor] | None:
    """The axis along which the samples of positions change, and the sample at each place of it."""
    changing = [
        axis for axis in range(target.ndim)
        if target.shape[axis] > 1 and not bool((target == target.narrow(axis, 0, 1)).all())
    ]  # fmt: skip
    if len(changing) > 1 or not target.numel():
        return None
    axis = changing[0] if changing else WHOLE
    if axis == WHOLE:
        return WHOLE, target.reshape(-1)[:1]
    others = [0] * target.ndim
    line = target[tuple(slice(None) if k == axis else others[k] for k in range(target.ndim))]
    return axis, line


def doubt_of(positions: Positions) -> str:
    """Why positions on the axis of the samples may depend on other samples; empty if they do not.

    Positions that several samples decide are looked at before, in `reordered` and `put_back`.
    """
    if isinstance(positions.kind, Mixed):
        return f"positions from {positions.kind.reason}"
    return positions.kind.doubt if isinstance(positions.kind, Rows) else ""


def _all_once(flat: Tensor, length: int) -> bool:
    """Whether positions are a permutation."""
    return bool((flat.sort().values == torch.arange(length, device=flat.device)).all())


def place_of(indices: Sequence[Positions | None], ndim: int) -> tuple[int, int, list[int]]:
    """Where the common axes of the positions begin in the result, how many they are, and the axes that are indexed."""
    taken = [axis for axis, index in enumerate(indices) if index is not None]
    width = max(index.values.ndim for index in indices if index is not None)
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    return (taken[0] if adjacent else 0), width, taken


def kept_axis(axis: int, start: int, width: int, taken: Sequence[int]) -> int:
    """Where an axis that is not indexed is in the result."""
    before = sum(other < axis for other in taken)
    return axis - before + (width if axis - before >= start else 0)


def index(call: Call) -> Type:
    """`self[i, j, ...]` with tensors."""
    self: Tensor = call.args[0]
    kind = indexed(call, self, expanded_masks(call, call.args[1]))
    masks = [item for item in call.args[1] if item is not None and item.dtype in (torch.bool, torch.uint8)]
    if any(call.type_of(mask) is not None for mask in masks):  # how many there are depends on values
        return kind._replace(shaped=True) if isinstance(kind, Mixed) else kind and kind._replace(ragged=True)
    return kind


def index_select(call: Call) -> Type:
    """`self[..., index, ...]`."""
    self: Tensor = call.args[0]
    (axis,) = axes_of(call.args[1], self.ndim)
    positions = call.args[2].reshape(-1)
    return indexed(call, self, [*[None] * axis, Positions(positions, call.type_of(call.args[2]))])


def indexed(call: Call, self: Tensor, indices: Sequence[Positions | None]) -> Type:
    """The rows of what is read at positions."""
    kind = call.type_of(self)
    if isinstance(kind, Mixed):
        return kind
    start, width, taken = place_of(indices, self.ndim)
    given = [item for item in indices if item is not None]
    if kind is not None and kind.axis == WHOLE:
        others = [item.kind for item in given if item.kind is not None]
        same = all(
            isinstance(other, Rows) and other.axis == WHOLE and same_ids(other.ids, kind.ids) for other in others
        )
        return kind if same else call.mixed()
    if kind is None or kind.axis not in taken:
        return _beside(call, kind, given, start, width, taken)
    on_samples = indices[kind.axis]
    if on_samples is None:
        return call.mixed()
    target = spread(kind)[on_samples.values.cpu()]
    found = single_axis(target)
    if found is None:
        return call.mixed("of several samples")
    place, ids = found
    ordered = reordered(call, self, kind, on_samples, ids, start)
    if ordered is not None:
        return ordered if len(given) == 1 else ordered.doubted("several lists of positions in a changed order")
    doubt = kind.doubt or doubt_of(on_samples)
    if kind.slots is not None:
        doubt = doubt or "positions of samples among rows whose order depends on several samples"
    rows = Rows(WHOLE, 1, ids=ids) if place == WHOLE else gathered(ids, place, call.types.num_samples, "")
    if place != WHOLE:
        rows = rows.moved(place + width - target.ndim)
    if isinstance(on_samples.kind, Rows) and on_samples.kind.slots is not None and place != WHOLE:
        rows = Rows(rows.axis, len(ids), 1, 1, ids, slots=on_samples.kind.slots, of=on_samples.kind.of)
    for item in given:
        problem = _disagrees(call, item, rows, width, item is on_samples)
        if problem is None:
            return call.mixed("at positions of other samples")
        doubt = doubt or problem
    ragged = any(isinstance(item.kind, Rows) and item.kind.ragged for item in given)
    moved = rows if rows.axis == WHOLE else rows.moved(rows.axis + start)
    return moved._replace(doubt=doubt, ragged=ragged or kind.ragged)


def reordered(call: Call, self: Tensor, kind: Rows, item: Positions, ids: Tensor, start: int) -> Rows | None:
    """Rows at positions that several samples decide: all of them, each as often as the others, in another order."""
    values, length = item.values.cpu(), self.shape[kind.axis]
    if not isinstance(item.kind, Mixed) or values.ndim != 1 or kind.doubt or not equally_often(values, length):
        return None
    slots, of = (kind.slots, kind.of) if kind.slots is not None else slots_of(kind, call.types.num_samples)
    found = shuffled(ids, start, slots[values], of, call.types.num_samples, kind.slots is not None)
    if found.slots is not None and not call.out.is_floating_point() and call.out.ndim == 1:
        call.types.remember(call.out)
    return found


def equally_often(values: Tensor, length: int) -> bool:
    """Whether positions are all of `length`, each as often."""
    if not length or not len(values) or len(values) % length:
        return False
    return bool((values.sort().values == torch.arange(length).repeat_interleave(len(values) // length)).all())


def _disagrees(call: Call, item: Positions, rows: Rows, width: int, on_samples: bool) -> str | None:
    """None if positions belong to other samples than the rows do; otherwise a doubt, or nothing."""
    shift = width - item.values.ndim
    if item.kind is None:
        if on_samples or rows.axis == WHOLE or call.types.uniform(item.values, rows, rows.axis - shift):
            return ""
        return "positions that differ between places in the batch"
    if isinstance(item.kind, Mixed):
        return "" if on_samples else item.kind.reason
    if (item.kind.slots is not None or rows.slots is not None) and not same_slots(item.kind, rows):
        return "positions in another order"
    if item.kind.axis == WHOLE or rows.axis == WHOLE:
        same = item.kind.axis == rows.axis and same_ids(item.kind.ids, rows.ids)
        return item.kind.doubt if same else None
    if item.kind.axis + shift != rows.axis or not same_ids(_each(item.kind), _each(rows)):
        return None
    return item.kind.doubt


def _same(one: Rows, other: Rows) -> bool:
    return same_ids(_each(one), _each(other)) and same_slots(one, other)


def _each(rows: Rows) -> Tensor:
    return spread(rows)


def _beside(
    call: Call, kind: Rows | None, given: Sequence[Positions], start: int, width: int, taken: list[int]
) -> Type:
    """Positions on axes without samples: of a constant table, or the same for each sample."""
    rows: Rows | None = None
    doubt = ""
    for item in given:
        if isinstance(item.kind, Mixed):
            doubt = doubt or item.kind.reason
        elif item.kind is not None:
            doubt = doubt or item.kind.doubt
            here = item.kind if item.kind.axis == WHOLE else item.kind.moved(item.kind.axis + width - item.values.ndim)
            if rows is not None and (here.axis != rows.axis or not _same(here, rows)):
                return call.mixed("at positions of different samples")
            rows = here
    if kind is not None and rows is not None:
        return call.mixed("at positions of other samples")
    if kind is not None:
        moved = kind.moved(kept_axis(kind.axis, start, width, taken))
        return moved.doubted(doubt) if doubt else moved
    if rows is None:
        return Mixed(doubt) if doubt else None
    for item in given:
        if item.kind is None and rows.axis != WHOLE:
            if not call.types.uniform(item.values, rows, rows.axis - (width - item.values.ndim)):
                doubt = doubt or "positions that differ between places in the batch"
    moved = rows if rows.axis == WHOLE else rows.moved(rows.axis + start)
    return moved._replace(doubt=doubt)


def index_put(call: Call) -> Type:
    """`self[i, j, ...] = values`, or `+=`."""
    self, indices, values = call.args[:3]
    mask = indices[0]
    filled = (
        len(indices) == 1 and mask is not None and mask.dtype == torch.bool and values.ndim <= self.ndim - mask.ndim
    )
    if filled and call.type_of(values) is None:  # the same values wherever the mask is true
        return combined(call, [leading(self), leading(mask)])
    return written(call, self, expanded_masks(call, indices), values)


def index_add(call: Call) -> Type:
    """`self[..., index, ...] += source`, for whole slices; index_copy writes instead."""
    self: Tensor = call.args[0]
    (axis,) = axes_of(call.arg(1, "dim"), self.ndim)
    positions = Positions(call.arg(2, "index"), call.type_of(call.arg(2, "index")))
    return written(call, self, [*[None] * axis, positions], call.arg(3, "source"))


def written(call: Call, self: Tensor, indices: Sequence[Positions | None], values: Tensor) -> Type:
    """The rows of a tensor after values were written at positions."""
    kind, incoming = call.type_of(self), call.type_of(values)
    if isinstance(kind, Mixed):
        return kind
    start, width, taken = place_of(indices, self.ndim)
    out_ndim = self.ndim - len(taken) + width
    shift = out_ndim - values.ndim
    rows = incoming if isinstance(incoming, Rows) else None
    doubt = incoming.reason if isinstance(incoming, Mixed) else rows.doubt if rows is not None else ""
    if rows is not None and rows.axis != WHOLE:
        rows = rows.moved(rows.axis + shift)
        if not start <= rows.axis < start + width:  # an axis that is not indexed
            before = rows.axis if rows.axis < start else rows.axis - width
            own = [axis for axis in range(self.ndim) if axis not in taken][before]
            if any(item is not None and item.kind is not None for item in indices):
                return call.mixed("at positions of samples")
            here = rows.moved(own)
            if kind is not None and (kind.axis != own or not _same(kind, here)):
                return call.mixed()
            if kind is None and not call.types.uniform(self, here, own):
                doubt = doubt or "a tensor whose values differ between places in the batch"
            return here.doubted(doubt) if doubt else here
        rows = rows.moved(rows.axis - start)
    back = put_back(call, self, kind, indices, rows, doubt) if rows is not None else None
    if back is not None:
        return back
    if (rows is not None and rows.slots is not None) or (kind is not None and kind.slots is not None):
        return call.mixed("in an order that depends on several samples")
    for item in indices:  # what is written where may be decided by the samples' positions alone
        if item is not None and isinstance(item.kind, Rows):
            here = item.kind if item.kind.axis == WHOLE else item.kind.moved(item.kind.axis + width - item.values.ndim)
            if rows is None:
                rows = here
            elif here.axis != rows.axis or not _same(here, rows):
                return call.mixed("at positions of different samples")
            doubt = doubt or item.kind.doubt
        elif item is not None and isinstance(item.kind, Mixed):
            doubt = doubt or doubt_of(item)
    if rows is None and kind is not None:
        axis = -1 if kind.axis == WHOLE or kind.axis in taken else kept_axis(kind.axis, start, width, taken) - shift
        same = kind.axis in taken and bool((values == values.reshape(-1)[:1]).all())
        if kind.axis != WHOLE and not same and (kind.axis in taken or not call.types.uniform(values, kind, axis)):
            doubt = doubt or "constants written at places in the batch"
        return kind.doubted(doubt) if doubt else kind
    if rows is None:
        return Mixed(doubt) if doubt else None
    if incoming is None and not call.types.uniform(values, rows, rows.axis + start - shift):
        doubt = doubt or "values that differ between places in the batch"
    return _placed(call, self, kind, indices, rows, width, doubt)


def put_back(
    call: Call, self: Tensor, kind: Rows | None, indices: Sequence[Positions | None], rows: Rows, doubt: str
) -> Type:
    """All rows, written or added at positions that several samples decide; None if that is not the case."""
    axis = next(place for place, item in enumerate(indices) if item is not None)
    item, length = indices[axis], self.shape[axis]
    if item is None or len([i for i in indices if i is not None]) > 1 or item.values.ndim != 1 or rows.axis != 0:
        return None
    if rows.slots is None and not isinstance(item.kind, Mixed):
        return None
    values, ids, count = item.values.cpu(), spread(rows), call.types.num_samples
    if len(values) != len(ids) or doubt or not equally_often(values, length):
        return None
    if rows.slots is not None:  # back to where they were: fixed places, whatever the order was
        if rows.of % length or not torch.equal(rows.slots // (rows.of // length), values):
            return call.mixed("at other places than where rows were")
        if len(values) != length and not _adds(call):
            return call.mixed("several at one place")
        found = gathered(torch.empty(length, dtype=torch.int64).index_put((values,), ids), axis, count, "")
        whole = bool((spread(found)[values] == ids).all())
        return found if whole and (kind is None or _same(kind, found)) else call.mixed("at positions of other samples")
    if len(values) != length or kind is not None:
        return None
    slots, of = slots_of(rows, count)
    inverse = torch.empty(length, dtype=torch.int64).index_put((values,), torch.arange(length))
    return shuffled(ids[inverse], axis, slots[inverse], of, count, False)


def _adds(call: Call) -> bool:
    return "add" in call.name or call.arg(3, "accumulate", False) is True


def _placed(
    call: Call, self: Tensor, kind: Rows | None, indices: Sequence[Positions | None], rows: Rows, width: int, doubt: str
) -> Type:
    """Rows written at positions of their own samples, on some indexed axis."""
    samples = spread(rows) if rows.axis != WHOLE else rows.ids
    if samples is None:
        samples = torch.zeros(1, dtype=torch.int64)
    found: list[Type] = []
    for axis, item in enumerate(indices):
        if item is None or (kind is not None and kind.axis not in (axis, WHOLE)):
            continue
        own = kind if kind is not None else _own(call, self, axis, item, samples, rows, width)
        if own is None or own.axis != axis:
            continue
        target = spread(own)[item.values.cpu()]
        shape = [1] * width
        if rows.axis != WHOLE:
            shape[rows.axis] = len(samples)
        wanted = samples.reshape(shape) if rows.axis != WHOLE else samples
        if bool((target == wanted).all()):
            problem = doubt or doubt_of(item) or _others(call, indices, item, rows, width)
            if kind is None and not call.types.uniform(self, own, axis):
                problem = problem or "a tensor whose values differ between places in the batch"
            found.append(own.doubted(problem) if problem else own)
    return found[0] if len(found) == 1 else call.mixed("at positions of other samples")


def _others(call: Call, indices: Sequence[Positions | None], own: Positions, rows: Rows, width: int) -> str:
    """Why positions on the other axes may depend on other samples, or on the place of a row; empty if they do not."""
    for item in indices:
        if item is None or item is own:
            continue
        if isinstance(item.kind, Mixed):
            return f"positions from {item.kind.reason}"
        if item.kind is None and rows.axis != WHOLE:
            if not call.types.uniform(item.values, rows, rows.axis - (width - item.values.ndim)):
                return "positions that differ between places in the batch"
    return ""


def _own(call: Call, self: Tensor, axis: int, item: Positions, samples: Tensor, rows: Rows, width: int) -> Rows | None:
    """Rows of a tensor of constants, from the first samples that are written at positions of an axis."""
    count, length = call.types.num_samples, self.shape[axis]
    flat = item.values.reshape(-1).cpu()
    own_choice = isinstance(item.kind, Rows)  # then that it is a permutation is an accident
    if not own_choice and len(flat) == len(samples) == length and item.values.ndim == 1 and _all_once(flat, length):
        return gathered(torch.empty_like(samples).index_put((flat,), samples), axis, count, "")
    shape = [1] * width
    if rows.axis != WHOLE:
        shape[rows.axis] = len(samples)
    wanted = samples.reshape(shape) if rows.axis != WHOLE else samples
    values = item.values.cpu()
    if item.kind is None:  # fixed positions: each must be of one sample
        owner = torch.full((length,), -1)
        owner[values] = wanted.expand(values.shape)
        period = len(samples.unique())
        if bool((owner < 0).any()) and length % period == 0:  # places that are left out are as those beside them
            owner = owner.view(-1, period).amax(0).repeat(length // period)
        if bool((owner >= 0).all()) and bool((owner[values] == wanted).all()):
            return gathered(owner, axis, count, "")
    if length % count:
        return None
    other = length // count
    if bool((values // other == wanted).all()):
        return Rows(axis, count, 1, other)
    return Rows(axis, count, other, 1) if bool((values % count == wanted).all()) else None


def nonzero(call: Call) -> Type:
    """The coordinates of what is not zero, (N, ndim): each of the sample that it is found in."""
    input: Tensor = call.args[0]
    kind = call.type_of(input)
    if isinstance(kind, Mixed):
        return kind._replace(shaped=True)
    if kind is None or kind.axis == WHOLE:
        return kind and kind._replace(ragged=True)
    ids = spread(kind)[call.out[:, kind.axis].cpu()]
    return gathered(ids, 0, call.types.num_samples, kind.doubt)._replace(ragged=True)


def embedding(call: Call) -> Type:
    """Rows of a constant table."""
    if call.type_of(call.args[0]) is not None:
        return call.mixed("of a table that depends on the batch")
    return call.type_of(call.args[1])


def masked_scatter(call: Call) -> Type:
    """`self[mask] = source`, in order: each sample must have as many places as its own source has numbers."""
    self, mask, source = call.args[:3]
    kind, filled = call.type_of(self), call.type_of(source)
    if isinstance(kind, Mixed) or isinstance(filled, Mixed):
        return kind if isinstance(kind, Mixed) else filled
    if call.type_of(mask) is None and kind is None and filled is None:
        return None
    mask_rows = combined(call, [broadcast(self, self.ndim), broadcast(mask, self.ndim)])
    if (
        filled is None
        or not isinstance(mask_rows, Rows)
        or mask_rows.axis != 0
        or mask_rows.ids is not None
        or mask_rows.pre != 1
    ):
        return call.mixed("in the order of the batch")
    if not isinstance(filled, Rows) or filled.axis != 0 or filled.ids is not None or filled.pre != 1:
        return call.mixed("in the order of the batch")
    places_B = mask.expand_as(self).reshape(call.types.num_samples, -1).sum(1)
    if not bool((places_B == source.numel() // call.types.num_samples).all()):
        return mask_rows.doubted("masked_scatter with counts that differ between samples")
    return mask_rows.doubted(filled.doubt) if filled.doubt else mask_rows


def masked_scatter_backward(call: Call) -> Type:
    """`(grad, mask, sizes)`: the gradient of the source."""
    grad, mask, sizes = call.args[:3]
    kind = combined(call, [broadcast(grad, grad.ndim), broadcast(mask, grad.ndim)])
    if not isinstance(kind, Rows) or kind.axis != 0 or kind.ids is not None or kind.pre != 1:
        return kind if isinstance(kind, Mixed) else call.mixed()
    count = call.types.num_samples
    places_B = mask.expand_as(grad).reshape(count, -1).sum(1)
    wanted = call.out.numel() // count
    if sizes[0] % count or not bool((places_B == wanted).all()):
        return call.mixed("with counts that differ between samples")
    return Rows(0, count, 1, sizes[0] // count, doubt=kind.doubt)


def searchsorted(call: Call) -> Type:
    """Values among sorted ones: constants, or the sample's own."""
    names = {"bucketize": (1, 0), "searchsorted": (0, 1)}
    table_at, values_at = names[call.name]
    table, values = call.args[table_at], call.args[values_at]
    kind = call.type_of(table)
    sorter = call.kwargs.get("sorter")
    if isinstance(sorter, Tensor) and call.type_of(sorter) is not None:
        return call.mixed("with an order that depends on the batch")
    if not isinstance(values, Tensor):
        return kind if kind is None else call.mixed()
    if kind is None and table.ndim == 1:
        return call.type_of(values)
    return combined(call, [broadcast(table, values.ndim), broadcast(values, values.ndim)], (values.ndim - 1,))


def isin(call: Call) -> Type:
    """Values among constants."""
    test = call.args[1]
    if isinstance(test, Tensor) and call.type_of(test) is not None:
        return call.mixed()
    return call.type_of(call.args[0]) if isinstance(call.args[0], Tensor) else None


def embedding_bag(call: Call) -> Type | list[Type]:
    """`(weight, indices, offsets, ...)`: each bag must hold the ids of one sample."""
    kind, offsets = call.type_of(call.args[1]), call.args[2]
    if call.type_of(call.args[0]) is not None or not isinstance(kind, Rows) or kind.axis != 0:
        return call.mixed()
    weights = call.arg(6, "per_sample_weights")
    if isinstance(weights, Tensor):
        together = combined(call, [broadcast(call.args[1], 1), broadcast(weights, 1)])
        if not isinstance(together, Rows):
            return call.mixed("with weights of other samples")
        kind = together
    starts = offsets.cpu().reshape(-1)
    bags = call.out[0].shape[0]
    samples = spread(kind)
    bag_of = torch.searchsorted(starts[:bags].contiguous(), torch.arange(len(samples)), right=True) - 1
    first = samples[starts[:bags].clamp(max=len(samples) - 1)]
    if not bool((first[bag_of] == samples).all()) or call.type_of(offsets) is not None:
        return call.mixed("with bags of several samples")
    rows = gathered(first, 0, call.types.num_samples, kind.doubt)
    return [rows, kind if call.out[1].shape[:1] == call.args[1].shape[:1] else None, rows, rows]


def multinomial(call: Call) -> Type:
    """Draws from each row of probabilities."""
    input: Tensor = call.args[0]
    return combined(call, [broadcast(input, input.ndim)], (input.ndim - 1,))


def pack(call: Call) -> list[Type]:
    """`_pack_padded_sequence(input, lengths, batch_first)`: the rows of each time, in the order of falling length."""
    input, batch_first = call.args[0], call.args[2]
    kind = call.type_of(input)
    if not isinstance(kind, Rows) or kind.axis != (0 if batch_first else 1) or kind.pre != 1 or kind.post != 1:
        return [call.mixed() if kind is not None else None, None]
    samples, sizes = spread(kind), call.out[1]
    ids = torch.cat([samples[: int(size)] for size in sizes])  # sizes are typed as constant: recurrent layers read them
    return [gathered(ids, 0, call.types.num_samples, kind.doubt)._replace(ragged=True), None]


def pack_backward(call: Call) -> Type:
    """`(grad, sizes, batch_sizes, batch_first)`: rows back at their places; sample r stands where it stood."""
    grad, sizes, batch_sizes, batch_first = call.args[:4]
    kind = call.type_of(grad)
    if not isinstance(kind, Rows) or kind.axis != 0:
        return kind if kind is None else call.mixed()
    samples = spread(kind)
    first = samples[: int(batch_sizes[0])]
    if not torch.equal(samples, torch.cat([first[: int(size)] for size in batch_sizes])):
        return call.mixed()
    own = normal(first, call.types.num_samples)
    if len(first) != sizes[0 if batch_first else 1]:
        return call.mixed()
    return Rows(0 if batch_first else 1, len(first), 1, 1, own, kind.doubt)


FAMILY: dict[str, Callable[[Call], object]] = {
    "gather": gather,
    "gather_backward": gather_backward,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scatter),
    **dict.fromkeys(("index", "_unsafe_index"), index),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), index_put),
    "index_select": index_select,
    **dict.fromkeys(("index_add", "index_copy"), index_add),
    "nonzero": nonzero,
    "embedding": embedding,
    "masked_scatter": masked_scatter,
    "masked_scatter_backward": masked_scatter_backward,
    **dict.fromkeys(("searchsorted", "bucketize"), searchsorted),
    "isin": isin,
    "_embedding_bag": embedding_bag,
    "_embedding_bag_forward_only": embedding_bag,
    "multinomial": multinomial,
    "_pack_padded_sequence": pack,
    "_pack_padded_sequence_backward": pack_backward,
}
