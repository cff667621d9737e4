"""Check of a batch: the row of a record is made of this record alone, whatever the others are.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

A step cannot see what a collate function, or a data set that reads several records at once, has done before. One record
that changes the rows of others (mixed images, values standardised over the batch) has no bounded influence.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc.batches import dense, filled
from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, cpu_generators, cpu_seeds
from dpfunc.sampling.records import collated
from dpfunc.types import Batch

_ROUNDING = 1e-4  # of the largest number of a row
_MOST = 64  # records of a batch that are compared: they are copied


def check_rows(collate: Callable[[list[Any]], Batch], records: Sequence[Any], key: Key, row: int) -> None:
    """Check that a row stays when the other records are replaced by its own, and when they change places.

    All are replaced at once, so that any influence is found; a row may then be shorter, as nothing is filled
    up. A collate function that takes other random numbers for other records tells nothing, and is let through; so are
    records that cannot be copied. At most 64 records are compared, by copies, with CPU generators seeded by the key.

    Guarantees:
        tests/sampling/test_own_rows.py: what mixes rows is refused (test_what_mixes_rows_is_refused), what does not
        passes (test_what_keeps_rows_apart_passes); no record is changed (test_records_stay_as_they_are).
    """
    begin = max(0, min(row - _MOST // 2, len(records) - _MOST))
    records, row = list(records[begin : begin + _MOST]), row - begin

    def made(records: Sequence[Any]) -> dict[str, Tensor | None]:
        with cpu_seeds(key):  # of the batch, which may be large, only the row is kept
            return _row_of(collated(collate, records), row)

    def draws(records: Sequence[Any]) -> tuple[object, ...]:
        with cpu_seeds(key):
            collated(collate, records)
            return cpu_generators()

    own, others = records[row], records[:row] + records[row + 1 :]
    moved = others[1:] + others[:1]
    before = made(records)
    if not before:
        return
    for changed, holds in (([own] * len(records), _shorter_row), ([*moved[:row], own, *moved[row:]], same)):
        name = _other_leaf(before, made(changed), holds)
        if name is None or draws(changed) != draws(records) or _other_leaf(before, made(records), same):
            continue
        alone = [draws([record] * len(records)) for record in records]
        if any(each != alone[0] for each in alone):  # the draws of one record move those of the next ones on
            return
        raise InvalidArgument(
            f"Expected collate_fn to make the row of a record of this record alone, got another one in {name} when the "
            "other records of the batch were replaced, or changed places. One record would change the gradients of "
            "others, and epsilon would not hold. Do in the data set what is done to each record, with numbers that are "
            "public; leave out what mixes records (mixup, statistics of the batch, cropping to the shortest, a type or "
            "length that follows from the first record)."
        )


def check_reading(dataset: Any, index: int, record: Any, key: Key) -> None:
    """Check that a record reads the same alone and together with others, apart from padding."""
    with cpu_seeds(key):
        before = cpu_generators()
        (alone,) = dataset.__getitems__([index])
        drawn = before != cpu_generators()
        (again,) = dataset.__getitems__([index])
    if not drawn and same(alone, again) and not same(record, alone, filled=True):
        raise InvalidArgument(
            "Expected __getitems__ of the data set to read a record in the same way alone and with others, got another "
            "one. One record would change the gradients of others, and epsilon would not hold. Let transforms work on "
            "each record by itself, without statistics of those that are read with it."
        )


def _row_of(batch: Batch | None, row: int) -> dict[str, Tensor | None]:
    """A row of each leaf, by name; None for leaves that have no such row."""

    def part(leaf: object) -> Tensor | None:
        if not isinstance(leaf, Tensor) or not dense(leaf):  # the step says what it cannot take
            return None
        return leaf[row].clone() if leaf.ndim and len(leaf) > row else None

    leaves = [] if batch is None else pytree.tree_leaves_with_path(batch)
    return {f"batch{pytree.keystr(path)}": part(leaf) for path, leaf in leaves}


def _other_leaf(
    row: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None], holds: Callable[[Tensor, Tensor], bool]
) -> str | None:
    if list(row) != list(other):
        return "its structure"
    pairs = ((name, leaf, other[name]) for name, leaf in row.items())
    return next((name for name, one, two in pairs if one is not None and two is not None and not holds(one, two)), None)


def _shorter_row(one: Tensor, shorter: Tensor) -> bool:
    """True if a row equals the other one padded at its start or its end."""
    sizes = list(zip(one.shape, shorter.shape, strict=False))
    if one.ndim != shorter.ndim or any(long < short for long, short in sizes):
        return False
    first, last = [slice(short) for _, short in sizes], [slice(long - short, long) for long, short in sizes]
    return same(one[tuple(first)], shorter) or same(one[tuple(last)], shorter)


def same(one: Any, other: Any, *, filled: bool = False) -> bool:
    """True for records of equal contents, up to rounding; of objects of other classes only the class counts."""
    one, other = _as_tensor(one, filled), _as_tensor(other, filled)

    def both(*kinds: type) -> bool:
        return isinstance(one, kinds) and isinstance(other, kinds)

    if both(float):
        one, other = torch.tensor(one, device="cpu"), torch.tensor(other, device="cpu")
    if both(Tensor):
        return _shorter_row(one, other) if filled else _same_numbers(one, other)
    if both(Mapping):
        return list(one) == list(other) and _each_same(one.values(), other.values(), filled)
    if both(list, tuple):
        return len(one) == len(other) and _each_same(one, other, filled)
    return type(one) is type(other) and (not isinstance(one, (str, bytes, int, type(None))) or one == other)


def _each_same(some: Iterable[Any], others: Iterable[Any], filled: bool) -> bool:
    return all(same(one, other, filled=filled) for one, other in zip(some, others, strict=True))


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=_ROUNDING, atol=_ROUNDING * largest, equal_nan=True)


def _as_tensor(value: Any, numbers: bool) -> Any:
    """An array of numbers, or if wanted a list of them, as a tensor; anything else as it is."""
    if isinstance(value, Tensor):
        return filled(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.dtype.itemsize <= 8:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    alike = numbers and isinstance(value, (list, tuple)) and len({*map(type, value)}) == 1
    fits = alike and isinstance(value[0], (int, float)) and not any(abs(each) >= 2**63 for each in value)
    return torch.tensor(value, device="cpu") if fits else value
