"""Reads at lists of positions: indexing by tensors, index_select.

A sample may choose among its own numbers and among constants. Positions on the axis of the samples are followed row by
row: the sample at each position is computed with the same positions. Positions that were computed from several samples
must be a permutation of all rows, which leaves none out because of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type, doubt_in, doubted, shaped_too
from dpfunc.engines.tracing.families.positions import (
    Positions,
    doubt_of,
    doubt_of_counts,
    equally_often,
    expanded_masks,
    indexed_axes,
    joint_rows,
    kept_axis,
    rows_in_result,
    single_axis,
)
from dpfunc.engines.tracing.readers import loops_over_experts
from dpfunc.engines.tracing.rows import (
    ONE_SAMPLE,
    Mixed,
    Rows,
    axes_of,
    gathered,
    same_ids,
    same_slots,
    samples_by_position,
    shuffled,
    slots_of,
)


def _index(call: Call) -> Type:
    """Elements at tensors of positions or masks: `self[i, j, ...]`."""
    self: Tensor = call.args[0]
    kind = _indexed(call, self, expanded_masks(call, call.args[1]))
    masks = [item for item in call.args[1] if item is not None and item.dtype in (torch.bool, torch.uint8)]
    if any(call.type_of(mask) is not None for mask in masks):  # how many there are depends on values
        return shaped_too(kind)
    return kind


def _index_select(call: Call) -> Type:
    """Rows of whole slices at a list of positions on one axis: `self[..., index, ...]`."""
    self: Tensor = call.args[0]
    (axis,) = axes_of(call.args[1], self.ndim)
    positions = call.args[2].reshape(-1)
    return _indexed(call, self, [*[None] * axis, Positions(positions, call.type_of(call.args[2]))])


class _Read(NamedTuple):
    """Numbers that are read from a table at positions.

    Args:
        call: the operation. table: what is read; kind: its rows, None if it is constant.
        indexed: the axes that are indexed; given: the positions on each of them.
        start, width: of the common axes of the positions, in the result.
    """

    call: Call
    table: Tensor
    kind: Rows | None
    indexed: Sequence[int]
    given: Sequence[Positions]
    start: int
    width: int

    def positions_are_uniform(self, item: Positions, rows: Rows) -> bool:
        """True if fixed positions are the same for each of these rows on the common axes."""
        if rows.axis == ONE_SAMPLE:
            return True
        return self.call.types.uniform(item.values, rows, rows.axis - (self.width - item.values.ndim))

    def is_ragged(self) -> bool:
        """True if the number of rows depends on values of the batch."""
        return any(isinstance(kind, Rows) and kind.ragged for kind in (self.kind, *(item.kind for item in self.given)))

    def in_result(self, rows: Rows) -> Rows:
        """Rows on the common axes, on those of the result."""
        return rows if rows.axis == ONE_SAMPLE else rows.moved(rows.axis + self.start)


def _indexed(call: Call, self: Tensor, indices: Sequence[Positions | None]) -> Type:
    """The rows of what is read at positions."""
    kind = call.type_of(self)
    if isinstance(kind, Mixed):
        return kind
    start, width, indexed = indexed_axes(indices, self.ndim)
    read = _Read(call, self, kind, indexed, list(filter(None, indices)), start, width)
    if kind is None or (kind.axis not in indexed and kind.axis != ONE_SAMPLE):
        return _of_other_axes(read)
    if kind.axis == ONE_SAMPLE:
        own = all(item.kind is None or _of_same_sample(item.kind, kind) for item in read.given)
        return kind if own else call.mixed()
    return _of_samples(read, kind, read.given[indexed.index(kind.axis)])


def _of_samples(read: _Read, kind: Rows, on_samples: Positions) -> Type:
    """Positions on the axis of the samples, and perhaps on others."""
    call = read.call
    found = single_axis(samples_by_position(kind)[on_samples.values.cpu()])
    if found is None:
        return call.mixed("of several samples")
    axis, ids = found
    ordered = _reordered(read, kind, on_samples, ids)
    if ordered is not None:
        return ordered if len(read.given) == 1 else ordered.doubted("several lists of positions in a changed order")
    rows = _rows_at(call, on_samples, ids, axis, read.width - on_samples.values.ndim)
    if rows is None:
        return call.mixed("at several positions of each row")
    doubts = [kind.doubt, doubt_of(on_samples), doubt_of_counts(kind, on_samples, read.table.shape[kind.axis])]
    if kind.slots is not None:
        doubts.append("positions of samples among rows whose order depends on several samples")
    for item in read.given:
        if isinstance(item.kind, Rows) and not _same_samples(item, item.kind, rows, read.width):
            return call.mixed("at positions of other samples")
        doubts.append(_doubt_about(read, item, rows, item is on_samples))
    return read.in_result(rows)._replace(doubt=next(filter(None, doubts), ""), ragged=read.is_ragged())


def _rows_at(call: Call, item: Positions, ids: Tensor, axis: int, shift: int) -> Rows | None:
    """Rows of numbers at positions whose samples are `ids` along an axis; None if rows have several positions.

    Args:
        axis: of the positions; ONE_SAMPLE if all are of one sample. shift: from their axes to the common ones.
    """
    if axis == ONE_SAMPLE:
        return Rows(ONE_SAMPLE, 1, ids=ids)
    if not isinstance(item.kind, Rows) or item.kind.slots is None:
        return gathered(ids, axis, call.types.num_samples, "").moved(axis + shift)
    if len(item.kind.slots) != len(ids):
        return None
    return Rows(axis + shift, len(ids), 1, 1, ids, slots=item.kind.slots, of=item.kind.of)


def _of_same_sample(one: Type, other: Rows) -> bool:
    """True if both tensors belong to one sample each, the same one."""
    return isinstance(one, Rows) and one.axis == other.axis == ONE_SAMPLE and same_ids(one.ids, other.ids)


def _reordered(read: _Read, kind: Rows, item: Positions, ids: Tensor) -> Rows | None:
    """Rows at positions that several samples decide: all of them, each as often as the others, in another order."""
    values, length, types = item.values.cpu(), read.table.shape[kind.axis], read.call.types
    if not isinstance(item.kind, Mixed) or values.ndim != 1 or kind.doubt or not equally_often(values, length):
        return None
    slots, of = slots_of(kind, types.num_samples)
    if len(slots) != length:  # several positions a row
        return None
    found = shuffled(ids, read.start, slots[values], of, types.num_samples, kind.slots is not None)
    if found.slots is not None and not read.call.out.is_floating_point() and read.call.out.ndim == 1:
        types.keep_integers(read.call.out)
    return found


def _same_samples(item: Positions, kind: Rows, rows: Rows, width: int) -> bool:
    """True if positions belong to the samples of these rows, or to rows in another order, which is a doubt."""
    if not same_slots(kind, rows):
        return True
    here = rows_in_result(kind, item, width)
    if ONE_SAMPLE in (kind.axis, rows.axis):
        return kind.axis == rows.axis and same_ids(kind.ids, rows.ids)
    return here.axis == rows.axis and same_ids(samples_by_position(kind), samples_by_position(rows))


def _doubt_about(read: _Read, item: Positions, rows: Rows, on_samples: bool) -> str:
    """A doubt about positions; empty if none."""
    if isinstance(item.kind, Mixed):
        return "" if on_samples else item.kind.reason
    if item.kind is None:
        uniform = on_samples or read.positions_are_uniform(item, rows)
        return "" if uniform else "indices that differ between positions of the batch"
    return item.kind.doubt if same_slots(item.kind, rows) else "positions in another order"


def _of_other_axes(read: _Read) -> Type:
    """Positions on axes without samples: of a constant table, or the same for each sample."""
    call, kind = read.call, read.kind
    rows = joint_rows(None, reversed(read.given), read.width)
    if isinstance(rows, Mixed):
        return call.mixed("at positions of different samples")
    doubt = next(filter(None, map(_doubt_of_choice, read.given)), "")
    if rows is None:
        return doubted(kind and kind.moved(kept_axis(kind.axis, read.start, read.width, read.indexed)), doubt)
    if kind is not None:
        return call.mixed("at positions of other samples")
    for item, axis in zip(read.given, read.indexed, strict=True):
        fixed = item.kind is not None or read.positions_are_uniform(item, rows) or _all_equal_along(read.table, axis)
        doubt = doubt or ("" if fixed else "indices that differ between positions of the batch")
    return read.in_result(rows)._replace(doubt=doubt)


def _doubt_of_choice(item: Positions) -> str:
    """A doubt about positions on axes without samples; none about the number of an expert, over which a loop runs."""
    is_expert = isinstance(item.kind, Mixed) and item.values.numel() <= 1 and loops_over_experts()
    return "" if is_expert else doubt_in(item.kind)


def _all_equal_along(table: Tensor, axis: int) -> bool:
    """True if all slices of a table along an axis are equal, so that it does not matter which one is read."""
    return bool((table == table.narrow(axis, 0, 1)).all())


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    "index_select": _index_select,
}
