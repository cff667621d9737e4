"""Writing at lists of positions: each sample into its own rows, or all rows into another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type, combined, leading
from dpfunc.engines.tracing.families.positions import (
    Positions,
    all_once,
    doubt_of,
    doubt_of_counts,
    equally_often,
    expanded_masks,
    indexed_axes,
    kept_axis,
    positions_of,
    rows_in_result,
    same_rows,
)
from dpfunc.engines.tracing.rows import (
    ONE_SAMPLE,
    Mixed,
    Rows,
    axes_of,
    gathered,
    same_ids,
    samples_by_position,
    shuffled,
    slots_of,
)


def _index_put(call: Call) -> Type:
    """`self[i, j, ...] = values`, or `+=`."""
    self, indices, values = call.args[:3]
    mask = indices[0]
    filled = (
        len(indices) == 1 and mask is not None and mask.dtype == torch.bool and values.ndim <= self.ndim - mask.ndim
    )
    if filled and call.type_of(values) is None:  # the same values wherever the mask is true
        return combined(call, [leading(self), leading(mask)])
    return _written(call, self, expanded_masks(call, indices), values)


def _index_add(call: Call) -> Type:
    """`self[..., index, ...] += source`, for whole slices; index_copy writes instead."""
    self: Tensor = call.args[0]
    (axis,) = axes_of(call.arg(1, "dim"), self.ndim)
    positions = positions_of(call, call.arg(2, "index"))
    return _written(call, self, [*[None] * axis, positions], call.arg(3, "source"))


def _written(call: Call, self: Tensor, indices: Sequence[Positions | None], values: Tensor) -> Type:
    """The rows of a tensor after values were written at positions."""
    kind, incoming = call.type_of(self), call.type_of(values)
    if isinstance(kind, Mixed):
        return kind
    start, width, indexed = indexed_axes(indices, self.ndim)
    out_ndim = self.ndim - len(indexed) + width
    shift = out_ndim - values.ndim
    rows = incoming if isinstance(incoming, Rows) else None
    doubt = incoming.reason if isinstance(incoming, Mixed) else rows.doubt if rows is not None else ""
    if rows is not None and rows.axis != ONE_SAMPLE:
        rows = rows.moved(rows.axis + shift)
        if not start <= rows.axis < start + width:
            before = rows.axis if rows.axis < start else rows.axis - width
            own = [axis for axis in range(self.ndim) if axis not in indexed][before]
            return _written_on_other_axis(call, self, kind, indices, rows.moved(own), doubt)
        rows = rows.moved(rows.axis - start)
    reordered = _written_in_changed_order(call, self, kind, indices, rows, doubt) if rows is not None else None
    if reordered is not None:
        ragged = (kind is not None and kind.ragged) or (rows is not None and rows.ragged)
        return reordered._replace(ragged=True) if isinstance(reordered, Rows) and ragged else reordered
    if (rows is not None and rows.slots is not None) or (kind is not None and kind.slots is not None):
        return call.mixed("in an order that depends on several samples")
    found = _rows_of_positions(indices, rows, width)
    if found is None:
        return call.mixed("at positions of different samples")
    rows, doubt = found[0], doubt or found[1]
    if rows is None and kind is not None:
        if kind.axis in indexed:
            same = _same_for_each_row(self, kind, indices, values)
        else:
            axis = kind.axis if kind.axis == ONE_SAMPLE else kept_axis(kind.axis, start, width, indexed) - shift
            same = kind.axis == ONE_SAMPLE or call.types.uniform(values, kind, axis)
        doubt = doubt or ("" if same else "constants written at positions of the batch")
        return kind.doubted(doubt) if doubt else kind
    if rows is None:
        return Mixed(doubt) if doubt else None
    if (
        kind is None
        and rows.axis == ONE_SAMPLE
        and all(item is None or _chosen_by_one_sample(item) for item in indices)
    ):
        return rows.doubted(doubt) if doubt else rows
    if incoming is None and not call.types.uniform(values, rows, rows.axis + start - shift):
        doubt = doubt or "values that differ between positions of the batch"
    return _written_at_own_positions(call, self, kind, indices, rows, width, doubt)


def _rows_of_positions(
    indices: Sequence[Positions | None], rows: Rows | None, width: int
) -> tuple[Rows | None, str] | None:
    """The rows of values and of all positions, and a doubt about positions; None if they are of different samples.

    Args:
        rows: of the values, None for constants: then samples decide by their positions alone what is written where.
    """
    doubt = ""
    for item in indices:
        if item is not None and isinstance(item.kind, Rows):
            here = rows_in_result(item.kind, item, width)
            if rows is None:
                rows = here
            elif here.axis != rows.axis or not same_rows(here, rows):
                return None
            doubt = doubt or item.kind.doubt
        elif item is not None and isinstance(item.kind, Mixed):
            doubt = doubt or doubt_of(item)
    return rows, doubt


def _written_on_other_axis(
    call: Call, self: Tensor, kind: Rows | None, indices: Sequence[Positions | None], rows: Rows, doubt: str
) -> Type:
    """Rows written along their own axis, that of `rows` in `self`, which is not indexed."""
    if any(item is not None and item.kind is not None for item in indices):
        return call.mixed("at positions of samples")
    if kind is not None and (kind.axis != rows.axis or not same_rows(kind, rows)):
        return call.mixed()
    if kind is None and not call.types.uniform(self, rows, rows.axis):
        doubt = doubt or "a tensor whose values differ between positions of the batch"
    return rows.doubted(doubt) if doubt else rows


def _written_in_changed_order(
    call: Call, self: Tensor, kind: Rows | None, indices: Sequence[Positions | None], rows: Rows, doubt: str
) -> Type:
    """All rows, written or added at positions that several samples decide; None if that is not the case."""
    axis = next(position for position, item in enumerate(indices) if item is not None)
    item, length = indices[axis], self.shape[axis]
    if item is None or len([i for i in indices if i is not None]) > 1 or item.values.ndim != 1 or rows.axis != 0:
        return None
    if rows.slots is None and not isinstance(item.kind, Mixed):
        return None
    values, ids, count = item.values.cpu(), samples_by_position(rows), call.types.num_samples
    if len(values) != len(ids) or doubt or not equally_often(values, length):
        return None
    if rows.slots is not None:  # back to the positions before the change of order, which are fixed
        if rows.of % length or not torch.equal(rows.slots // (rows.of // length), values):
            return call.mixed("at other positions than those of the rows before")
        if len(values) != length and not _adds(call):
            return call.mixed("several rows at one position")
        found = gathered(torch.empty(length, dtype=torch.int64).index_put((values,), ids), axis, count, "")
        is_complete = bool((samples_by_position(found)[values] == ids).all())
        return (
            found
            if is_complete and (kind is None or same_rows(kind, found))
            else call.mixed("at positions of other samples")
        )
    if len(values) != length or kind is not None:
        return None
    slots, of = slots_of(rows, count)
    inverse = torch.empty(length, dtype=torch.int64).index_put((values,), torch.arange(length))
    return shuffled(ids[inverse], axis, slots[inverse], of, count, False)


def _chosen_by_one_sample(item: Positions) -> bool:
    """True for positions that one sample chose; not for coordinates of several samples, of which only one has any."""
    return isinstance(item.kind, Rows) and item.kind.axis == ONE_SAMPLE and not item.are_coordinates


def _same_for_each_row(self: Tensor, kind: Rows, indices: Sequence[Positions | None], values: Tensor) -> bool:
    """True if the same constants are written for each row: at positions of its own, or at all positions."""
    item = indices[kind.axis]
    if item is None or not bool((values == values.reshape(-1)[:1]).all()):
        return False
    everywhere = item.values.ndim == 1 and equally_often(item.values.cpu(), self.shape[kind.axis])
    return isinstance(item.kind, Rows) or everywhere


def _adds(call: Call) -> bool:
    return "add" in call.name or call.arg(3, "accumulate", False) is True


def _written_at_own_positions(
    call: Call, self: Tensor, kind: Rows | None, indices: Sequence[Positions | None], rows: Rows, width: int, doubt: str
) -> Type:
    """Rows written at positions of their own samples, on some indexed axis."""
    samples = samples_by_position(rows) if rows.axis != ONE_SAMPLE else rows.ids
    if samples is None:
        samples = torch.zeros(1, dtype=torch.int64)
    found: list[Type] = []
    for axis, item in enumerate(indices):
        if item is None or (kind is not None and kind.axis not in (axis, ONE_SAMPLE)):
            continue
        own = kind if kind is not None else _rows_of_constants(call, self, axis, item, samples, rows, width)
        if own is None or own.axis != axis:
            continue
        target = samples_by_position(own)[item.values.cpu()]
        if bool((target == _broadcast_samples(samples, rows, width)).all()):
            problem = doubt or doubt_of(item) or doubt_of_counts(own, item, self.shape[axis])
            problem = problem or _doubt_of_other_axes(call, indices, item, rows, width)
            if kind is None and not call.types.uniform(self, own, axis):
                problem = problem or "a tensor whose values differ between positions of the batch"
            found.append(own.doubted(problem) if problem else own)
    if (
        not found
        and rows.axis == ONE_SAMPLE
        and (kind is None or (kind.axis == ONE_SAMPLE and same_ids(kind.ids, rows.ids)))
    ):
        return rows.doubted(doubt) if doubt else rows._replace(ragged=False)  # what is written into is of that sample
    return found[0] if len(found) == 1 else call.mixed("at positions of other samples")


def _doubt_of_other_axes(
    call: Call, indices: Sequence[Positions | None], own: Positions, rows: Rows, width: int
) -> str:
    """Reason why positions on the other axes may depend on other samples, or on the position of a row; or empty."""
    for item in indices:
        if item is None or item is own:
            continue
        if isinstance(item.kind, Mixed):
            return f"positions from {item.kind.reason}"
        if item.kind is not None or rows.axis == ONE_SAMPLE:
            continue
        if not call.types.uniform(item.values, rows, rows.axis - (width - item.values.ndim)):
            return "indices that differ between positions of the batch"
    return ""


def _rows_of_constants(
    call: Call, self: Tensor, axis: int, item: Positions, samples: Tensor, rows: Rows, width: int
) -> Rows | None:
    """Rows of a tensor of constants, from the first samples that are written at positions of an axis."""
    count, length = call.types.num_samples, self.shape[axis]
    values = item.values.cpu()
    # where samples choose positions themselves, a permutation, or the sample's own position, is an accident
    own_choice = isinstance(item.kind, Rows)
    if isinstance(item.kind, Rows) and not item.kind.doubt and not item.are_coordinates:
        return None
    if not own_choice and values.ndim == 1 and len(values) == len(samples) == length and all_once(values, length):
        return gathered(torch.empty_like(samples).index_put((values,), samples), axis, count, "")
    wanted = _broadcast_samples(samples, rows, width)
    owner = _owner_of_fixed_positions(values, wanted, samples, length) if item.kind is None else None
    if owner is not None:
        return gathered(owner, axis, count, "")
    if length % count:
        return None
    other = length // count
    if bool((values // other == wanted).all()):
        return Rows(axis, count, 1, other)
    return Rows(axis, count, other, 1) if bool((values % count == wanted).all()) else None


def _owner_of_fixed_positions(values: Tensor, wanted: Tensor, samples: Tensor, length: int) -> Tensor | None:
    """The sample of each of `length` positions, from those that are written; None if one is of several samples.

    Args:
        values: the positions that are written. wanted: their samples. samples: the same, in one axis.
    """
    owner = torch.full((length,), -1)
    owner[values] = wanted.expand(values.shape)
    period = len(samples.unique())  # type: ignore[no-untyped-call]
    if bool((owner < 0).any()) and length % period == 0:
        # positions that are left out belong to the same sample as those a multiple of the period away
        owner = owner.view(-1, period).amax(0).repeat(length // period)
    return owner if bool((owner >= 0).all()) and bool((owner[values] == wanted).all()) else None


def _broadcast_samples(samples: Tensor, rows: Rows, width: int) -> Tensor:
    """Samples of rows, in the shape that broadcasts with the `width` common axes of positions."""
    if rows.axis == ONE_SAMPLE:
        return samples
    return samples.reshape([len(samples) if axis == rows.axis else 1 for axis in range(width)])


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), _index_put),
    **dict.fromkeys(("index_add", "index_copy"), _index_add),
}
