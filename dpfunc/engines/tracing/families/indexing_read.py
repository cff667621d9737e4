"""Reading at lists of positions.

A sample may choose among its own numbers and among constants. Positions on the axis of the samples are followed row by
row: which sample stands where is computed with the same positions. Positions that were computed from several samples
must be a permutation of all rows, which leaves none out because of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type
from dpfunc.engines.tracing.families.positions import (
    Positions,
    doubt_of,
    doubt_of_counts,
    equally_often,
    expanded_masks,
    kept_axis,
    place_of,
    same_rows,
    single_axis,
)
from dpfunc.engines.tracing.readers import loops_over_experts
from dpfunc.engines.tracing.rows import (
    WHOLE,
    Mixed,
    Rows,
    axes_of,
    gathered,
    same_ids,
    same_slots,
    shuffled,
    slots_of,
    spread,
)


def index(call: Call) -> Type:
    """`self[i, j, ...]` with tensors."""
    self: Tensor = call.args[0]
    kind = indexed(call, self, expanded_masks(call, call.args[1]))
    masks = [item for item in call.args[1] if item is not None and item.dtype in (torch.bool, torch.uint8)]
    if any(call.type_of(mask) is not None for mask in masks):  # how many there are depends on values
        return kind._replace(shaped=True) if isinstance(kind, Mixed) else kind and kind._replace(ragged=True)
    return kind


def index_select(call: Call) -> Type:
    """Rows of whole slices at a list of positions on one axis: `self[..., index, ...]`."""
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
        return _beside(call, self, kind, given, start, width, taken)
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
    doubt = kind.doubt or doubt_of(on_samples) or doubt_of_counts(kind, on_samples, self.shape[kind.axis])
    if kind.slots is not None:
        doubt = doubt or "positions of samples among rows whose order depends on several samples"
    rows = Rows(WHOLE, 1, ids=ids) if place == WHOLE else gathered(ids, place, call.types.num_samples, "")
    if place != WHOLE:
        rows = rows.moved(place + width - target.ndim)
    if isinstance(on_samples.kind, Rows) and on_samples.kind.slots is not None and place != WHOLE:
        if len(on_samples.kind.slots) != len(ids):
            return call.mixed("at several positions of each row")
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
    if kind.slots is not None and len(kind.slots) != length:  # several positions a row
        return None
    slots, of = (kind.slots, kind.of) if kind.slots is not None else slots_of(kind, call.types.num_samples)
    found = shuffled(ids, start, slots[values], of, call.types.num_samples, kind.slots is not None)
    if found.slots is not None and not call.out.is_floating_point() and call.out.ndim == 1:
        call.types.remember(call.out)
    return found


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
    if item.kind.axis + shift != rows.axis or not same_ids(spread(item.kind), spread(rows)):
        return None
    return item.kind.doubt


def _beside(
    call: Call, self: Tensor, kind: Rows | None, given: Sequence[Positions], start: int, width: int, taken: list[int]
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
            here = item.kind if item.kind.axis == WHOLE else item.kind.moved(item.kind.axis + width - item.values.ndim)
            if rows is not None and (here.axis != rows.axis or not same_rows(here, rows)):
                return call.mixed("at positions of different samples")
            rows = here
    if kind is not None and rows is not None:
        return call.mixed("at positions of other samples")
    if kind is not None:
        moved = kind.moved(kept_axis(kind.axis, start, width, taken))
        return moved.doubted(doubt) if doubt else moved
    if rows is None:
        return Mixed(doubt) if doubt else None
    for item, axis in zip(given, taken, strict=True):
        if item.kind is not None or rows.axis == WHOLE:
            continue
        uniform = call.types.uniform(item.values, rows, rows.axis - (width - item.values.ndim))
        if not uniform and not bool(
            (self == self.narrow(axis, 0, 1)).all()
        ):  # of a table of equal rows each is the same
            doubt = doubt or "positions that differ between places in the batch"
    moved = rows if rows.axis == WHOLE else rows.moved(rows.axis + start)
    return moved._replace(doubt=doubt)


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(("index", "_unsafe_index"), index),
    "index_select": index_select,
}
