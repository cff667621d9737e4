"""Check of a batch: the row of a record is made of this record alone, whatever the others are.

A trace follows a step from the batch on. What a collate function or a data set that reads several records at once has
done before, it cannot see: mixed images, values standardised over the batch, labels whose type follows from the first
record. One record that changes the rows of others has no bounded influence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, torch_seed
from dpfunc.types import Batch

_ROUNDING = 1e-4  # of the largest number of a row


def check_rows(collate: Callable[[list[Any]], Batch], records: Sequence[Any], key: Key, row: int) -> None:
    """Check that a row stays when all other records are replaced by its own.

    All are replaced at once, so that whoever had an influence is found. A row may be filled up to another length. A
    collate function that takes other random numbers for other records tells nothing, and is let through.

    Args:
        collate: list of records -> batch. records: of one batch. key: seeds torch's CPU generator for each call, as for
            the batch itself. row: which row.

    Raises:
        InvalidArgument: the row differs, and a repeated call gives the first one again.

    Guarantees:
        tests/sampling/test_own_rows.py: what mixes rows is refused (test_what_mixes_rows_is_refused), what does not
        passes (test_what_keeps_rows_apart_passes).
    """
    batch, after = _seeded(collate, records, key)
    others, after_others = _seeded(collate, [records[row]] * len(records), key)
    name = _other_leaf(batch, others, row)
    if name is None or not torch.equal(after, after_others):
        return
    again, _ = _seeded(collate, records, key)
    if _other_leaf(batch, again, row) is None:
        raise InvalidArgument(
            f"Expected collate_fn to make the row of a record of this record alone, got another one in {name} when the "
            "other records of the batch were replaced. One record would change the gradients of others, and epsilon "
            "would not hold. Do in the data set what is done to each record, with numbers that are public; leave out "
            "what mixes records (mixup, statistics of the batch, a type or length that follows from the first record)."
        )


def check_reading(dataset: Any, index: int, record: Any, key: Key) -> None:
    """Check that a record that was read with others is the same when it is read alone.

    Args:
        dataset: with `__getitems__`. index: of the record. record: as it was read. key: seeds torch's CPU generator.

    Raises:
        InvalidArgument: it differs, and reading it draws no random numbers.
    """
    with torch_seed(key, accelerators=False):
        before = torch.get_rng_state()
        (alone,) = dataset.__getitems__([index])
        drawn = not torch.equal(before, torch.get_rng_state())
        (again,) = dataset.__getitems__([index])
    if not drawn and same(alone, again) and not same(alone, record):
        raise InvalidArgument(
            "Expected __getitems__ of the data set to read a record in the same way alone and with others, got another "
            "one. One record would change the gradients of others, and epsilon would not hold. Let transforms work on "
            "each record by itself, without statistics of those that are read with it."
        )


def collated(collate: Callable[[list[Any]], Batch], records: Sequence[Any]) -> Batch:
    """A batch of copies: collate functions may take columns out of their records, which are collated once more."""
    batch = collate([dict(record) if type(record) is dict else record for record in records])
    return dict(batch) if isinstance(batch, Mapping) else batch


def _seeded(collate: Callable[[list[Any]], Batch], records: Sequence[Any], key: Key) -> tuple[Batch, Tensor]:
    """A batch, and the state of the generator after it."""
    with torch_seed(key, accelerators=False):
        return collated(collate, records), torch.get_rng_state()


def _other_leaf(batch: Batch, others: Batch, row: int) -> str | None:
    """The name of a leaf in which a row differs by more than its filling."""
    leaves, twins = (pytree.tree_leaves_with_path(one) for one in (batch, others))
    if [path for path, _ in leaves] != [path for path, _ in twins]:
        return "its structure"
    for (path, leaf), (_, twin) in zip(leaves, twins, strict=True):
        tensors = all(isinstance(each, Tensor) and each.ndim and len(each) > row for each in (leaf, twin))
        if tensors and not (leaf.dtype == twin.dtype and _fits(leaf[row], twin[row])):
            return f"batch{pytree.keystr(path)}"
    return None


def _fits(one: Tensor, other: Tensor) -> bool:
    """True for rows that are equal where both have numbers: one may be longer, at its begin or at its end."""
    if one.ndim != other.ndim:
        return False
    sizes = [min(pair) for pair in zip(one.shape, other.shape, strict=True)]
    for side in (slice, _last):
        parts = [each[tuple(side(size) for size in sizes)] if sizes else each for each in (one, other)]
        if same(*parts):
            return True
    return False


def _last(size: int) -> slice:
    return slice(-size, None) if size else slice(0, 0)


def same(one: Any, other: Any) -> bool:
    """True for records of equal contents, up to rounding; of objects of other classes only the class counts."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.dtype.kind in "fiub":
        one, other = torch.from_numpy(np.ascontiguousarray(one)), torch.from_numpy(np.ascontiguousarray(other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not (one.is_floating_point() or one.is_complex()):
            return torch.equal(one, other)
        largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
        return torch.allclose(one, other, rtol=_ROUNDING, atol=_ROUNDING * largest, equal_nan=True)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return same(torch.tensor(one), torch.tensor(other))
    if isinstance(one, (str, bytes, int, type(None))) or isinstance(other, (str, bytes, int, type(None))):
        return type(one) is type(other) and one == other
    return type(one) is type(other)
