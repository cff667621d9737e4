"""Positions on the axes of a tensor: their values, and what they depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Type
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, gathered, same_ids, same_slots, samples_by_position

COORDINATES = "coordinates of samples"
"""Mark of positions that were found by searching along the axis of the samples."""


class Positions(NamedTuple):
    """Positions on one axis: the values, what they depend on, and if they are coordinates of samples."""

    values: Tensor
    kind: Type
    are_coordinates: bool = False


def positions_of(call: Call, index: Tensor) -> Positions:
    """The positions that an index tensor of integers holds."""
    return Positions(index, call.type_of(index), call.types.marked(COORDINATES, index))


def expanded_masks(call: Call, indices: Sequence[Tensor | None]) -> list[Positions | None]:
    """Masks as lists of positions, one an axis."""
    found: list[Positions | None] = []
    for index in indices:
        if index is None:
            found.append(None)
        elif index.dtype in (torch.bool, torch.uint8):
            kind = call.type_of(index)
            coordinates, sample_axis = index.nonzero(), kind.axis if isinstance(kind, Rows) else ONE_SAMPLE
            if isinstance(kind, Rows) and kind.axis != ONE_SAMPLE:
                kind = gathered(
                    samples_by_position(kind)[coordinates[:, kind.axis].cpu()], 0, call.types.num_samples, kind.doubt
                )
                kind = kind._replace(ragged=True)
            found.extend(Positions(coordinates[:, axis], kind, axis == sample_axis) for axis in range(index.ndim))
        else:
            found.append(positions_of(call, index))
    return found


def single_axis(target: Tensor) -> tuple[int, Tensor] | None:
    """The axis along which the samples of positions change, and the sample at each position of it."""
    changing = [
        axis for axis in range(target.ndim)
        if target.shape[axis] > 1 and not bool((target == target.narrow(axis, 0, 1)).all())
    ]  # fmt: skip
    if len(changing) > 1 or not target.numel():
        return None
    axis = changing[0] if changing else ONE_SAMPLE
    if axis == ONE_SAMPLE:
        return ONE_SAMPLE, target.reshape(-1)[:1]
    others = [0] * target.ndim
    line = target[tuple(slice(None) if k == axis else others[k] for k in range(target.ndim))]
    return axis, line


def doubt_of(positions: Positions) -> str:
    """Reason why positions on the axis of the samples may depend on other samples; empty if they do not.

    Positions that several samples decide are handled before, in `indexing_read` and `indexing_write`.
    """
    if isinstance(positions.kind, Mixed):
        return f"positions from {positions.kind.reason}"
    return positions.kind.doubt if isinstance(positions.kind, Rows) else ""


def all_once(flat: Tensor, length: int) -> bool:
    """True if positions are a permutation."""
    return bool((flat.sort().values == torch.arange(length, device=flat.device)).all())


def equally_often(values: Tensor, length: int) -> bool:
    """True if positions are all of `length`, each as often."""
    if not length or not len(values) or len(values) % length:
        return False
    return bool((values.sort().values == torch.arange(length).repeat_interleave(len(values) // length)).all())


def doubt_of_counts(rows: Rows, positions: Positions, length: int) -> str:
    """Reason why fixed positions mean other samples if earlier samples have other numbers of rows; empty if none."""
    if not rows.ragged or positions.kind is not None or len(positions.values.unique()) == length:
        return ""
    return "fixed positions among rows whose number depends on values of the batch"


def indexed_axes(indices: Sequence[Positions | None], ndim: int) -> tuple[int, int, list[int]]:
    """Start and number of the common axes of the positions in the result, and the axes that are indexed."""
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    width = max(index.values.ndim for index in indices if index is not None)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    return (indexed[0] if adjacent else 0), width, indexed


def kept_axis(axis: int, start: int, width: int, indexed: Sequence[int]) -> int:
    """Position in the result of an axis that is not indexed."""
    before = sum(other < axis for other in indexed)
    return axis - before + (width if axis - before >= start else 0)


def rows_in_result(kind: Rows, positions: Positions, width: int) -> Rows:
    """Rows of positions, on the axis that theirs has among the `width` common axes of all positions."""
    return kind if kind.axis == ONE_SAMPLE else kind.moved(kind.axis + width - positions.values.ndim)


def joint_rows(rows: Rows | None, given: Iterable[Positions], width: int) -> Rows | Mixed | None:
    """The rows of positions on their common axes, and of `rows`; None without any, Mixed if they are different ones."""
    for item in given:
        if isinstance(item.kind, Rows):
            here = rows_in_result(item.kind, item, width)
            if rows is not None and (here.axis != rows.axis or not same_rows(here, rows)):
                return Mixed("positions of different samples")
            rows = here if rows is None else rows
    return rows


def same_rows(one: Rows, other: Rows) -> bool:
    """True if positions of two axes belong to the same samples, in the same order."""
    return same_ids(samples_by_position(one), samples_by_position(other)) and same_slots(one, other)
