"""Reads at lists of positions: indexing by tensors, index_select.

A sample may choose among its own numbers and among constants. Positions on the axis of the samples are followed row by
row: the sample at each position is computed with the same positions. Positions that were computed from several samples
must be a permutation of all rows, which leaves none out because of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type, doubted
from dpfunc.engines.tracing.families.positions import (
    Positions,
    doubt_of,
    doubt_of_counts,
    equally_often,
    expanded_masks,
    indexed_axes,
    kept_axis,
    rows_in_result,
    same_rows,
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
        return kind._replace(shaped=True) if isinstance(kind, Mixed) else kind and kind._replace(ragged=True)
    return kind


def _index_select(call: Call) -> Type:
    """Rows of whole slices at a list of positions on one axis: `self[..., index, ...]`."""
    self: Tensor = call.args[0]
    (axis,) = axes_of(call.args[1], self.ndim)
    positions = call.args[2].reshape(-1)
    return _indexed(call, self, [*[None] * axis, Positions(positions, call.type_of(call.args[2]))])


def _indexed(call: Call, self: Tensor, indices: Sequence[Positions | None]) -> Type:
    """The rows of what is read at positions."""
    kind = call.type_of(self)
    if isinstance(kind, Mixed):
        return kind
    start, width, indexed = indexed_axes(indices, self.ndim)
    given = [item for item in indices if item is not None]
    if kind is not None and kind.axis == ONE_SAMPLE:
        return kind if all(item.kind is None or _of_same_sample(item.kind, kind) for item in given) else call.mixed()
    if kind is None or kind.axis not in indexed:
        return _of_other_axes(call, self, kind, given, start, width, indexed)
    on_samples = indices[kind.axis]
    if on_samples is None:
        return call.mixed()
    target = samples_by_position(kind)[on_samples.values.cpu()]
    found = single_axis(target)
    if found is None:
        return call.mixed("of several samples")
    axis, ids = found
    ordered = _reordered(call, self, kind, on_samples, ids, start)
    if ordered is not None:
        return ordered if len(given) == 1 else ordered.doubted("several lists of positions in a changed order")
    doubt = kind.doubt or doubt_of(on_samples) or doubt_of_counts(kind, on_samples, self.shape[kind.axis])
    if kind.slots is not None:
        doubt = doubt or "positions of samples among rows whose order depends on several samples"
    rows = _rows_at(call, on_samples, ids, axis, width - target.ndim)
    if rows is None:
        return call.mixed("at several positions of each row")
    for item in given:
        problem = _doubt_about(call, item, rows, width, item is on_samples)
        if problem is None:
            return call.mixed("at positions of other samples")
        doubt = doubt or problem
    ragged = any(isinstance(item.kind, Rows) and item.kind.ragged for item in given)
    moved = rows if rows.axis == ONE_SAMPLE else rows.moved(rows.axis + start)
    return moved._replace(doubt=doubt, ragged=ragged or kind.ragged)


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


def _reordered(call: Call, self: Tensor, kind: Rows, item: Positions, ids: Tensor, start: int) -> Rows | None:
    """Rows at positions that several samples decide: all of them, each as often as the others, in another order."""
    values, length = item.values.cpu(), self.shape[kind.axis]
    if not isinstance(item.kind, Mixed) or values.ndim != 1 or kind.doubt or not equally_often(values, length):
        return None
    if kind.slots is not None and len(kind.slots) != length:  # several positions a row
        return None
    slots, of = (kind.slots, kind.of) if kind.slots is not None else slots_of(kind, call.types.num_samples)
    found = shuffled(ids, start, slots[values], of, call.types.num_samples, kind.slots is not None)
    if found.slots is not None and not call.out.is_floating_point() and call.out.ndim == 1:
        call.types.keep_integers(call.out)
    return found


def _doubt_about(call: Call, item: Positions, rows: Rows, width: int, on_samples: bool) -> str | None:
    """A doubt about positions, empty if none; None if they belong to other samples than the rows do."""
    shift = width - item.values.ndim
    if item.kind is None:
        if on_samples or rows.axis == ONE_SAMPLE or call.types.uniform(item.values, rows, rows.axis - shift):
            return ""
        return "indices that differ between positions of the batch"
    if isinstance(item.kind, Mixed):
        return "" if on_samples else item.kind.reason
    if (item.kind.slots is not None or rows.slots is not None) and not same_slots(item.kind, rows):
        return "positions in another order"
    if item.kind.axis == ONE_SAMPLE or rows.axis == ONE_SAMPLE:
        same = item.kind.axis == rows.axis and same_ids(item.kind.ids, rows.ids)
        return item.kind.doubt if same else None
    if item.kind.axis + shift != rows.axis or not same_ids(samples_by_position(item.kind), samples_by_position(rows)):
        return None
    return item.kind.doubt


def _of_other_axes(
    call: Call, self: Tensor, kind: Rows | None, given: Sequence[Positions], start: int, width: int, indexed: list[int]
) -> Type:
    """Positions on axes without samples: of a constant table, or the same for each sample."""
    rows: Rows | None = None
    doubt = ""
    for item in given:
        if isinstance(item.kind, Mixed):
            if item.values.numel() > 1 or not loops_over_experts():
                doubt = doubt or item.kind.reason
        elif item.kind is not None:
            doubt = doubt or item.kind.doubt
            here = rows_in_result(item.kind, item, width)
            if rows is not None and (here.axis != rows.axis or not same_rows(here, rows)):
                return call.mixed("at positions of different samples")
            rows = here
    if kind is not None and rows is not None:
        return call.mixed("at positions of other samples")
    if rows is None:
        return doubted(kind and kind.moved(kept_axis(kind.axis, start, width, indexed)), doubt)
    for item, axis in zip(given, indexed, strict=True):
        if item.kind is not None or rows.axis == ONE_SAMPLE:
            continue
        uniform = call.types.uniform(item.values, rows, rows.axis - (width - item.values.ndim))
        if not uniform and not _all_equal_along(self, axis):
            doubt = doubt or "indices that differ between positions of the batch"
    moved = rows if rows.axis == ONE_SAMPLE else rows.moved(rows.axis + start)
    return moved._replace(doubt=doubt)


def _all_equal_along(table: Tensor, axis: int) -> bool:
    """True if all slices of a table along an axis are equal, so that it does not matter which one is read."""
    return bool((table == table.narrow(axis, 0, 1)).all())


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    "index_select": _index_select,
}
