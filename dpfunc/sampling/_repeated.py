"""Records that are in a data set more than once: epsilon is that of one record, and each of its copies counts again.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from dpfunc._utils.validation import warn
from dpfunc.errors import InvalidArgument, RecordsWarning
from dpfunc.sampling.records import digest

_COMPARED = 256  # records of a batch
_ADVICE = (
    "Epsilon is that of one record: one that is there k times moves a sum k times as far, and ten copies under "
    "epsilon = 3 have had more than 30. Take each record once; give rare classes a larger weight in loss_fn, which the "
    "clip bounds. The different records of one person make one row: dpfunc.sampling.users."
)
_Places = npt.NDArray[np.int64]


def refuse_repeated(dataset: Any, name: str) -> None:
    """Refuse a data set that by its own indices and parts has a record more than once. No record is read.

    Guarantees:
        tests/sampling/test_repeated.py::test_what_repeats_records_is_refused.
    """
    has_parts = isinstance(dataset, (Subset, ConcatDataset, list)) or _is_table(dataset)
    places = defaultdict[Hashable, list[_Places]](list)
    for origin, own in _origins(dataset, np.arange(len(dataset))) if has_parts else ():
        places[origin].append(own)
    if any(len(np.unique(joined := np.concatenate(own))) < len(joined) for own in places.values()):
        raise InvalidArgument(
            f"Expected {name} with each record once, got repeated indices, or the same data set or object in it twice, "
            f"as oversampling makes them. {_ADVICE} Nothing was spent."
        )


def _is_table(dataset: Any) -> bool:
    """True for a data set of Hugging Face with columns."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(dataset, library.Dataset) and bool(dataset.column_names)


def _origins(dataset: Any, chosen: _Places) -> Iterator[tuple[Hashable, _Places]]:
    """Find the objects, by identity, that the chosen records of a data set come from, and their places in them."""
    match dataset:
        case Subset():
            inner: Any = dataset.dataset  # a class of torch that does not say that it has a length
            yield from _origins(inner, np.asarray(dataset.indices, dtype=np.int64)[chosen] % len(inner))
        case ConcatDataset():
            parts: list[Any] = dataset.datasets
            yield from _parts(parts, [len(part) for part in parts], chosen)
        case _ if _is_table(dataset):
            picked = dataset._indices  # of select(), if it has left others out; no public name
            chosen = chosen if picked is None else picked.column(0).to_numpy().astype(np.int64)[chosen]
            chunks = dataset.data.table.column(0).chunks
            yield from _parts(chunks, [len(chunk) for chunk in chunks], chosen)
        case object(buffers=_, offset=_):  # a piece of a column of Hugging Face, in memory
            memory = tuple(buffer.address for buffer in dataset.buffers() if buffer is not None)
            yield memory or id(dataset), dataset.offset + chosen
        case list() if all(isinstance(each, (dict, list, Tensor, np.ndarray)) for each in dataset):
            yield "objects", np.array([id(dataset[place]) for place in chosen], dtype=np.int64)
        case _:
            yield id(dataset), chosen


def _parts(parts: Sequence[Any], sizes: Sequence[int], chosen: _Places) -> Iterator[tuple[Hashable, _Places]]:
    """As `_origins`, of parts one after the other."""
    ends = np.cumsum(sizes)
    part_of = np.searchsorted(ends, chosen, "right")
    for number, part in enumerate(parts):
        yield from _origins(part, chosen[part_of == number] - (ends[number] - sizes[number]))


def warn_of_equal(records: Sequence[Any], number: int) -> None:
    """Warn if so many of some records are equal that, by estimate, half of all records have a copy.

    Few different records, such as the cells of a small table, say nothing. A copy that is read otherwise (random
    augmentation) is not seen.

    Guarantees:
        tests/sampling/test_repeated.py::test_equal_records_are_said.
    """
    some = records[:_COMPARED]
    _, counts = np.unique([digest(record) for record in some], return_counts=True)
    equal = int((counts * (counts - 1)).sum())  # ordered pairs
    copies = equal * (number - 1) / max(1, len(some) * (len(some) - 1))  # of a record, on average over the data set
    if len(counts) >= 16 and equal >= 6 and copies >= 0.5:
        warn(
            f"Of {len(some)} records that were drawn {len(some) - len(counts)} are equal to another one: about "
            f"{1 + copies:.2g} of each are in the data set. If they are copies, epsilon does not hold. {_ADVICE} If "
            "they are different people with equal answers, as in a table of few columns, filter this warning out. It "
            "was computed from private data: do not publish it.",
            RecordsWarning,
        )
