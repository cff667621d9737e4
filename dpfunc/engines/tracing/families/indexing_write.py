"""Writing at lists of positions: each sample into its own rows, or all rows into another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type, combined, doubt_in, doubted, leading
from dpfunc.engines.tracing.families.positions import (
    Positions,
    all_once,
    doubt_of,
    doubt_of_counts,
    equally_often,
    expanded_masks,
    indexed_axes,
    joint_rows,
    kept_axis,
    positions_of,
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


class _Write(NamedTuple):
    """Values that are written into a tensor at positions.

    Args:
        call: the operation. target: the tensor; kind: its rows before, None if it was constant.
        indices: the positions on its axes, None where all are taken; start, width: of their common axes.
        values: what is written; shift: their axes start that far behind those of the positions.
        rows: of the values on the common axes, or of the positions; None for constants.
        doubt: reason why the values, or the positions, may depend on other samples; empty if none.
    """

    call: Call
    target: Tensor
    kind: Rows | None
    indices: Sequence[Positions | None]
    start: int
    width: int
    values: Tensor
    shift: int
    rows: Rows | None
    doubt: str

    def positions(self) -> dict[int, Positions]:
        """The indexed axes, with their positions."""
        return {axis: item for axis, item in enumerate(self.indices) if item is not None}

    def values_are_uniform(self, rows: Rows, axis: int) -> bool:
        """True if the values are the same for each row along an axis of the positions."""
        return self.call.types.uniform(self.values, rows, axis - self.shift)

    def is_ragged(self) -> bool:
        """True if the number of rows depends on values of the batch."""
        return any(rows is not None and rows.ragged for rows in (self.kind, self.rows))


def _written(call: Call, self: Tensor, indices: Sequence[Positions | None], values: Tensor) -> Type:
    """The rows of a tensor after values were written at positions."""
    kind, incoming = call.type_of(self), call.type_of(values)
    if isinstance(kind, Mixed):
        return kind
    start, width, indexed = indexed_axes(indices, self.ndim)
    shift = self.ndim - len(indexed) + width - values.ndim - start
    rows = incoming if isinstance(incoming, Rows) else None
    write = _Write(call, self, kind, indices, start, width, values, shift, rows, doubt_in(incoming))
    if rows is None or rows.axis == ONE_SAMPLE:
        return _written_along_positions(write)
    axis = rows.axis + shift
    if 0 <= axis < width:
        return _written_along_positions(write._replace(rows=rows.moved(axis)))
    others = [axis for axis in range(self.ndim) if axis not in indexed]
    return _written_on_other_axis(write, rows.moved(others[start + axis - (0 if axis < 0 else width)]))


def _written_along_positions(write: _Write) -> Type:
    """Rows written along the common axes of the positions; numbers of one sample; or constants."""
    reordered = None if write.doubt else _written_in_changed_order(write)
    if reordered is not None:
        return reordered._replace(ragged=True) if isinstance(reordered, Rows) and write.is_ragged() else reordered
    if any(given is not None and given.slots is not None for given in (write.rows, write.kind)):
        return write.call.mixed("in an order that depends on several samples")
    given = write.positions().values()
    rows = joint_rows(write.rows, given, write.width)  # samples may decide by positions alone what is written where
    if isinstance(rows, Mixed):
        return write.call.mixed("at positions of different samples")
    write = write._replace(rows=rows, doubt=next(filter(None, (write.doubt, *map(doubt_of, given))), ""))
    return _constants_written(write) if rows is None else _written_by_samples(write, rows)


def _written_by_samples(write: _Write, rows: Rows) -> Type:
    """Numbers written for each of these rows, at positions of its own."""
    one_chose = rows.axis == ONE_SAMPLE and all(map(_chosen_by_one_sample, write.positions().values()))
    if write.kind is None and one_chose:
        return rows.doubted(write.doubt)
    constant = write.call.type_of(write.values) is None
    if constant and not write.values_are_uniform(rows, rows.axis):
        write = write._replace(doubt=write.doubt or "values that differ between positions of the batch")
    return _written_at_own_positions(write, rows)


def _constants_written(write: _Write) -> Type:
    """Constants written at positions that depend on no sample."""
    kind, start, indexed = write.kind, write.start, list(write.positions())
    if kind is None or kind.axis == ONE_SAMPLE:
        return doubted(kind, write.doubt)
    if kind.axis in indexed:
        same = _same_for_each_row(write, kind)
    else:
        same = write.values_are_uniform(kind, kept_axis(kind.axis, start, write.width, indexed) - start)
    return kind.doubted(write.doubt or ("" if same else "constants written at positions of the batch"))


def _written_on_other_axis(write: _Write, rows: Rows) -> Type:
    """Rows written along their own axis, that of `rows` in the tensor, which is not indexed."""
    call, kind, doubt = write.call, write.kind, write.doubt
    if any(item.kind is not None for item in write.positions().values()):
        return call.mixed("at positions of samples")
    if kind is not None and (kind.axis != rows.axis or not same_rows(kind, rows)):
        return call.mixed()
    return rows.doubted(doubt or _doubt_of_target(write, rows))


def _written_in_changed_order(write: _Write) -> Rows | Mixed | None:
    """All rows, written or added at positions that several samples decide; None if that is not the case."""
    rows, ((axis, item), *others) = write.rows, write.positions().items()
    if rows is None or rows.axis != 0 or others or item.values.ndim != 1:
        return None
    if rows.slots is None and not isinstance(item.kind, Mixed):
        return None
    values = item.values.cpu()
    if len(values) != len(samples_by_position(rows)) or not equally_often(values, write.target.shape[axis]):
        return None
    return _permuted(write, axis, values, rows) if rows.slots is None else _put_back(write, axis, values, rows)


def _permuted(write: _Write, axis: int, values: Tensor, rows: Rows) -> Rows | None:
    """Ordinary rows, written over constants in another order; None if that is not the case."""
    length, count = write.target.shape[axis], write.call.types.num_samples
    if len(values) != length or write.kind is not None:
        return None
    slots, of = slots_of(rows, count)
    inverse = torch.empty(length, dtype=torch.int64).index_put((values,), torch.arange(length))
    return shuffled(samples_by_position(rows)[inverse], axis, slots[inverse], of, count, False)


def _put_back(write: _Write, axis: int, values: Tensor, rows: Rows) -> Rows | Mixed:
    """Rows in a changed order, back at the positions `values` that they had before, which are fixed."""
    call, ids, length = write.call, samples_by_position(rows), write.target.shape[axis]
    slots, _ = slots_of(rows, call.types.num_samples)
    if rows.of % length or not torch.equal(slots // (rows.of // length), values):
        return call.mixed("at other positions than those of the rows before")
    if len(values) != length and not ("add" in call.name or call.arg(3, "accumulate", False) is True):
        return call.mixed("several rows at one position")
    owner = torch.empty(length, dtype=torch.int64).index_put((values,), ids)
    found = gathered(owner, axis, call.types.num_samples, "")
    if not torch.equal(owner[values], ids) or (write.kind is not None and not same_rows(write.kind, found)):
        return call.mixed("at positions of other samples")
    return found


def _chosen_by_one_sample(item: Positions) -> bool:
    """True for positions that one sample chose; not for coordinates of several samples, of which only one has any."""
    return isinstance(item.kind, Rows) and item.kind.axis == ONE_SAMPLE and not item.are_coordinates


def _same_for_each_row(write: _Write, kind: Rows) -> bool:
    """True if the same constants are written for each row: at positions of its own, or at all positions."""
    item = write.indices[kind.axis]
    if item is None or not bool((write.values == write.values.reshape(-1)[:1]).all()):
        return False
    everywhere = item.values.ndim == 1 and equally_often(item.values.cpu(), write.target.shape[kind.axis])
    return isinstance(item.kind, Rows) or everywhere


def _written_at_own_positions(write: _Write, rows: Rows) -> Type:
    """Rows written at positions of their own samples, on some indexed axis."""
    kind, samples_B = write.kind, _broadcast_samples(rows, write.width)
    along = (_written_along(write, rows, axis, item, samples_B) for axis, item in write.positions().items())
    found = list(filter(None, along))
    of_one_sample = kind is None or (kind.axis == ONE_SAMPLE and same_ids(kind.ids, rows.ids))
    if not found and rows.axis == ONE_SAMPLE and of_one_sample:  # what is written into is of that sample
        return rows.doubted(write.doubt) if write.doubt else rows._replace(ragged=False)
    return found[0] if len(found) == 1 else write.call.mixed("at positions of other samples")


def _written_along(write: _Write, rows: Rows, axis: int, item: Positions, samples_B: Tensor) -> Rows | None:
    """The rows of the tensor, if they are along this axis and its positions are those of their own samples."""
    own = write.kind or _rows_of_constants(write, axis, item, samples_B)
    if own is None or own.axis != axis or bool((samples_by_position(own)[item.values.cpu()] != samples_B).any()):
        return None
    doubt = write.doubt or doubt_of(item) or doubt_of_counts(own, item, write.target.shape[axis])
    return own.doubted(doubt or _doubt_of_other_axes(write, item, rows) or _doubt_of_target(write, own))


def _doubt_of_target(write: _Write, rows: Rows) -> str:
    """Reason why a tensor of constants that is written into would be another one for each row; empty if it is not."""
    if write.kind is not None or write.call.types.uniform(write.target, rows, rows.axis):
        return ""
    return "a tensor whose values differ between positions of the batch"


def _doubt_of_other_axes(write: _Write, own: Positions, rows: Rows) -> str:
    """Reason why positions on the other axes may depend on other samples, or on the position of a row; or empty."""
    for item in write.positions().values():
        if item is own:
            continue
        if isinstance(item.kind, Mixed):
            return doubt_of(item)
        if item.kind is not None or rows.axis == ONE_SAMPLE:
            continue
        if not write.call.types.uniform(item.values, rows, rows.axis - (write.width - item.values.ndim)):
            return "indices that differ between positions of the batch"
    return ""


def _rows_of_constants(write: _Write, axis: int, item: Positions, samples_B: Tensor) -> Rows | None:
    """Rows of a tensor of constants, from the first samples that are written at positions of an axis."""
    count, length, values = write.call.types.num_samples, write.target.shape[axis], item.values.cpu()
    # where samples choose positions themselves, a permutation, or the sample's own position, is an accident
    own_choice = isinstance(item.kind, Rows)
    if isinstance(item.kind, Rows) and not item.kind.doubt and not item.are_coordinates:
        return None
    samples = samples_B.reshape(-1)
    if not own_choice and values.ndim == 1 and len(values) == len(samples) == length and all_once(values, length):
        return gathered(torch.empty_like(samples).index_put((values,), samples), axis, count, "")
    owner = _owner_of_fixed_positions(values, samples_B, length) if item.kind is None else None
    if owner is not None:
        return gathered(owner, axis, count, "")
    return _evenly_spaced(values, samples_B, axis, length, count)


def _evenly_spaced(values: Tensor, samples_B: Tensor, axis: int, length: int, count: int) -> Rows | None:
    """Rows of equal size, one after the other or in turn, at whose positions their samples are written; or None."""
    if length % count:
        return None
    other = length // count
    if bool((values // other == samples_B).all()):
        return Rows(axis, count, 1, other)
    return Rows(axis, count, other, 1) if bool((values % count == samples_B).all()) else None


def _owner_of_fixed_positions(values: Tensor, samples_B: Tensor, length: int) -> Tensor | None:
    """The sample of each of `length` positions, from those that are written; None if one is of several samples.

    Args:
        values: the positions that are written. samples_B: their samples, in a shape that broadcasts with theirs.
    """
    owner = torch.full((length,), -1)
    owner[values] = samples_B.expand(values.shape)
    period = len(samples_B.unique())
    if bool((owner < 0).any()) and length % period == 0:
        # positions that are left out belong to the same sample as those a multiple of the period away
        owner = owner.view(-1, period).amax(0).repeat(length // period)
    return owner if bool((owner >= 0).all()) and bool((owner[values] == samples_B).all()) else None


def _broadcast_samples(rows: Rows, width: int) -> Tensor:
    """The sample at each position of rows, in the shape that broadcasts with the `width` common axes of positions."""
    if rows.axis == ONE_SAMPLE:
        return torch.zeros(1, dtype=torch.int64) if rows.ids is None else rows.ids
    samples = samples_by_position(rows)
    return samples.reshape([len(samples) if axis == rows.axis else 1 for axis in range(width)])


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), _index_put),
    **dict.fromkeys(("index_add", "index_copy"), _index_add),
}
