"""The sample that each number in memory belongs to: the type that tracing carries through a step.

A tensor that depends on the batch has one axis whose positions belong to samples, in rows: an axis of
`pre * count * post` positions runs through `count` rows of `post` positions each, `pre` times over. Row r belongs to
sample r, or to sample `ids[r]` where rows were permuted, selected or packed.

The type belongs to memory, not to tensors: row `r` is the block of `step` bytes at `base + r * step`, repeated after
`count` rows. So a view (a transpose, a slice, a reshape) has the type that follows from its strides, and no operation
that only views needs a rule; all aliases of a memory have types from the same entry.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

ONE_SAMPLE = -1
"""The axis of a tensor whose numbers all belong to one row."""
_UNBOUNDED_STEP = 1 << 62
"""The bytes of a row where all of a memory belongs to it."""


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rows(NamedTuple):
    """Type of a tensor whose numbers each depend on at most one sample, with the positions of the samples.

    Args:
        axis: whose positions belong to samples; ONE_SAMPLE if the whole tensor belongs to one row.
        count: number of rows. pre, post: the axis has `pre * count * post` positions.
        ids: sample of each row, int64 (count,); None is 0, 1, 2, ...
        doubt: why this is not proven; empty where it is.
        ragged: the number of rows depends on values of the batch.
        slots: of rows that were put in an order which depends on several samples (sorted by expert): the position that
            each row had before, of `of` positions, int64 (count,). Such rows stay together: a part of them has a doubt.
    """

    axis: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    pre: int = 1
    post: int = 1
    ids: Tensor | None = None
    doubt: str = ""
    ragged: bool = False
    slots: Tensor | None = None
    of: int = 0

    def doubted(self, reason: str) -> Rows:
        """The same, assumed and not proven for this reason; unchanged if it is empty."""
        return self if self.doubt or not reason else self._replace(doubt=reason)

    def moved(self, axis: int) -> Rows:
        """The same rows on another axis."""
        return Rows(axis, *self[1:])


class Mixed(NamedTuple):
    """Numbers that depend on several samples.

    Args:
        reason: the operation that mixed them. agrees: a truth value that, if the number has it, every sample alone has
            as well (`all` true, `any` false). shaped: its shape depends on values.
    """

    reason: str
    agrees: bool | None = None
    shaped: bool = False


def is_shaped_by_values(kind: Rows | Mixed | None) -> bool:
    """True of the type of a tensor whose shape depends on values of the batch."""
    return kind is not None and (kind.ragged if isinstance(kind, Rows) else kind.shaped)


@dataclass(slots=True)
class Stored:
    """Rows in memory; see the module. Bytes from the start of the storage; `end` is where the last row ends, or 0.

    Never changed once it is made. `numbers`: all that a rule may read of rows 0, 1, 2, ... without a doubt; None of
    others.
    """

    base: int
    step: int
    count: int
    ids: Tensor | None
    doubt: str
    end: int = 0
    ragged: bool = False
    slots: Tensor | None = None
    of: int = 0

    numbers: tuple[int, ...] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain = self.ids is None and not self.doubt and not self.ragged and self.slots is None
        self.numbers = (self.base, self.step, self.count, self.end) if plain else None


def same_ids(one: Tensor | None, other: Tensor | None) -> bool:
    """True if two rows lists name the same samples."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    return bool(torch.equal(one, other))


def same_slots(one: Rows, other: Rows) -> bool:
    """True if the rows of two tensors had the same positions before their order was changed.

    Where one distinguishes `of` positions and the other a multiple of them, the first repeats each of its positions.
    """
    if one.slots is None or other.slots is None:
        return one.slots is other.slots
    coarse, fine = (one, other) if one.of <= other.of else (other, one)
    if fine.slots is None or len(fine.slots) != one.slots.numel() or fine.of % max(coarse.of, 1):
        return False
    return bool(torch.equal(fine.slots // (fine.of // coarse.of), coarse.slots))  # type: ignore[arg-type]  # neither is None


def shuffled(ids: Tensor, axis: int, slots: Tensor, of: int, num_samples: int, again: bool) -> Rows:
    """Rows in an order that depends on several samples; ordinary ones where each is put back at its position `again`.

    An order that happens to be that of the batch is one that depends on several samples all the same.
    """
    if (
        again
        and of
        and len(slots) % of == 0
        and torch.equal(slots, torch.arange(of).repeat_interleave(len(slots) // of))
    ):
        return gathered(ids, axis, num_samples, "")
    return Rows(axis, len(ids), 1, 1, ids, slots=slots, of=of)


def slots_of(rows: Rows, num_samples: int) -> tuple[Tensor, int]:
    """The labels of positions along the axis: of ordinary rows the samples, where each has one, or the positions."""
    if rows.slots is not None:
        return rows.slots, rows.of
    ids = samples_by_position(rows)
    if len(ids) == num_samples and len(ids.unique()) == num_samples:
        return ids, num_samples
    return torch.arange(len(ids)), len(ids)


def alike(one: Rows, other: Rows) -> bool:
    """True if two tensors have the same rows, wherever their axes are."""
    return (
        one.count == other.count
        and one.pre == other.pre
        and one.post == other.post
        and (one.axis == ONE_SAMPLE) == (other.axis == ONE_SAMPLE)
        and same_ids(one.ids, other.ids)
        and same_slots(one, other)
    )


def normal(ids: Tensor, num_samples: int) -> Tensor | None:
    """None for 0, 1, 2, ..., num_samples - 1; the list itself otherwise."""
    if len(ids) == num_samples and bool((ids == torch.arange(num_samples)).all()):
        return None
    return ids


def stored(rows: Rows, tensor: Tensor) -> Stored:
    """Rows of a tensor that owns its memory, with the position of its rows in memory."""
    size = tensor.element_size()
    if rows.axis == ONE_SAMPLE:
        return Stored(0, _UNBOUNDED_STEP, 1, rows.ids, rows.doubt, 0, rows.ragged)
    step = tensor.stride(rows.axis) * rows.post * size
    base = int(tensor.storage_offset()) * size
    return Stored(base, step, rows.count, rows.ids, rows.doubt, 0, rows.ragged, rows.slots, rows.of)


def located(memory: Stored, tensor: Tensor, num_samples: int) -> Rows | None:
    """Rows of any tensor in this memory; None where its axes run across rows in no regular way."""
    offset = tensor.storage_offset() * tensor.element_size() - memory.base
    if offset < 0 or (memory.end and end_in_storage(tensor) > memory.end):  # before the rows, or behind them
        return None
    if memory.step == _UNBOUNDED_STEP:
        return Rows(ONE_SAMPLE, 1, ids=memory.ids, doubt=memory.doubt, ragged=memory.ragged)
    view = _rows_in_view(memory.step, memory.count, offset, tensor.element_size(), tensor.shape, tensor.stride())
    if view is None:
        return None
    whole = view.count == memory.count and view.axis != ONE_SAMPLE
    ids = memory.ids if whole else _chosen(memory, view, num_samples)
    found = Rows(view.axis, view.count, view.pre, view.post, ids, memory.doubt, memory.ragged)
    return found if memory.slots is None and not memory.ragged else _checked_part(memory, found, num_samples)


def _checked_part(memory: Stored, found: Rows, num_samples: int) -> Rows:
    """Rows of a view; with a doubt if they are a part of rows whose order, or number, depends on several samples.

    Where each sample has as many numbers as the others, a part is that of each sample, or of one, as it is of any rows:
    in a batch in which they have different numbers, it is not.
    """
    even = memory.ids is None and memory.count == num_samples
    if memory.ragged and not even and found.count < memory.count:
        return found.doubted("a part of rows whose number depends on values of the batch")
    if memory.slots is None:
        return found
    if found.axis == ONE_SAMPLE or found.count != memory.count or found.pre > 1:
        return found.doubted("a part of rows whose order depends on several samples")
    return found._replace(slots=memory.slots, of=memory.of)


class _View(NamedTuple):
    """The rows that a view shows: the axis they are along, the first one, the step from one to the next."""

    axis: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    pre: int
    post: int
    first: int
    step: int


@functools.lru_cache(maxsize=1 << 14)
def _rows_in_view(
    step: int, count: int, offset: int, size: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> _View | None:
    """The inverse of `stored`, for all views: axes are taken by rising stride. A step has the same views each time.

    Axes that stay within a block are of one row; one axis may run over rows; those that skip whole periods of all rows
    are free. `step`, `offset` and `size` are bytes.
    """
    if step <= 0:  # rows that share their memory
        return None
    first, inner = (offset // step) % count, offset % step
    found = _View(ONE_SAMPLE, 1, 1, 1, first, 1)
    for stride, length, axis in sorted(zip(strides, shape, range(len(shape)), strict=True)):
        jump = stride * size
        if length <= 1 or jump % (step * count) == 0:
            continue
        if jump < step and inner + jump * (length - 1) < step:
            inner += jump * (length - 1)
            continue
        over = _over_rows(step, jump, inner, length)
        view = None if over is None else _in_periods(found._replace(axis=axis), count, *over)
        if view is None or found.axis != ONE_SAMPLE:
            return None
        found = view
    return found


def _over_rows(step: int, jump: int, inner: int, length: int) -> tuple[int, int, int] | None:
    """The rows that an axis runs over, its positions in each, and its step from one to the next; None if irregular.

    Args:
        step, jump: bytes of a row, and from one position of the axis to the next. inner: bytes of a row before the
            first position. length: of the axis.
    """
    if jump >= step:
        return None if jump % step else (length, 1, jump // step)
    post = step // jump
    return None if step % jump or length % post or inner >= jump else (length // post, post, 1)


def _in_periods(view: _View, count: int, rows: int, post: int, step: int) -> _View | None:
    """A view of that many rows, or of whole periods of all `count` rows; None for a part of several periods."""
    if view.first + step * (rows - 1) < count:
        return view._replace(count=rows, post=post, step=step)
    if view.first or step != 1 or rows % count:
        return None
    return view._replace(count=count, pre=rows // count, post=post)


def end_in_storage(tensor: Tensor) -> int:
    """End of the last number of a tensor, in bytes of its storage."""
    last = sum(stride * (length - 1) for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def _chosen(memory: Stored, view: _View, num_samples: int) -> Tensor | None:
    ids = torch.arange(memory.count) if memory.ids is None else memory.ids
    chosen = ids[view.first : view.first + view.step * (view.count - 1) + 1 : view.step]
    return normal(chosen, num_samples) if view.count == num_samples else chosen


def samples_by_position(rows: Rows) -> Tensor:
    """The sample of each position along the axis, int64 (pre * count * post,)."""
    ids = torch.arange(rows.count) if rows.ids is None else rows.ids
    return ids.repeat_interleave(rows.post).repeat(rows.pre)


def gathered(ids: Tensor, axis: int, num_samples: int, doubt: str) -> Rows:
    """Rows from the sample of each position, as regular as they are.

    >>> gathered(torch.tensor([0, 0, 1, 1, 2, 2]), 0, 3, "").post
    2
    """
    length = len(ids)
    if length and length % num_samples == 0:
        other = length // num_samples
        arange = torch.arange(num_samples)
        if bool((ids.view(num_samples, other) == arange[:, None]).all()):
            return Rows(axis, num_samples, 1, other, None, doubt)
        if bool((ids.view(other, num_samples) == arange).all()):
            return Rows(axis, num_samples, other, 1, None, doubt)
    again = (ids[1:] == ids[0]).nonzero() if length else ids
    period = int(again[0]) + 1 if len(again) else length
    if 1 < period < length and length % period == 0 and bool((ids.view(-1, period) == ids[:period]).all()):
        return Rows(axis, period, length // period, 1, ids[:period], doubt)
    return Rows(axis, length, 1, 1, ids, doubt)


def uniform(tensor: Tensor, rows: Rows, axis: int) -> bool:
    """True if a tensor that does not depend on the batch is the same for every row along an axis.

    Where it is not, a sample would be treated by its position in the batch, which others move.
    """
    if axis < 0 or axis >= tensor.ndim or tensor.shape[axis] == 1 or tensor.stride(axis) == 0:
        return True
    if tensor.shape[axis] != rows.pre * rows.count * rows.post:
        return False
    blocks = torch.unflatten(tensor, axis, (rows.pre, rows.count, rows.post))
    first = blocks.narrow(axis + 1, 0, 1)
    if tensor.is_floating_point():  # bit by bit: 0.0 and -0.0 are equal, and so may be numbers that are not
        blocks, first = (part.contiguous().view(_BITS[tensor.element_size()]) for part in (blocks, first))
    return bool((blocks == first).all())


def axes_of(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Axes from 0; None and an empty list are all.

    >>> axes_of(-1, 3), axes_of(None, 2)
    ((2,), (0, 1))
    """
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return tuple(range(ndim))
    given = (dims,) if isinstance(dims, int) else dims
    return tuple(dim % ndim if ndim else 0 for dim in given)
