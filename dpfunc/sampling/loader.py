"""The draws of a run as batches of a `torch.utils.data.DataLoader`, the empty ones included.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dpfunc._utils.validation import refuse
from dpfunc.batches import batch_size, deal, own_records, rows, take, tree_map
from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, fold_in, torch_seed
from dpfunc.sampling._own_rows import check_reading, check_rows
from dpfunc.sampling._repeated import refuse_repeated, warn_of_equal
from dpfunc.sampling.base import Sampler
from dpfunc.sampling.records import read
from dpfunc.types import Batch

# Of so many steps the batch of one is checked, the first included; more would take a fifth of a small batch's time.
CHECKED_IN = 100


class Drawn(NamedTuple):
    """A record that a step has drawn, as it is sent to the process that reads it."""

    key: Key  # of this step and this process, for random augmentation; that of the run is not sent to workers
    record: int
    real: bool = True  # not one that is read in place of those of an empty draw
    checked: bool = False  # at this step, whether rows are made of their own records alone


@dataclass(frozen=True)
class Draws:
    """Draws of successive steps, as lists of `Drawn`: a batch sampler of torch's DataLoader."""

    sampler: Sampler
    key: Key = field(repr=False)  # of the run
    steps: Callable[[], range] = field(repr=False)  # those of an iteration, asked for when it begins
    length: int  # of an iteration, as far as is known before
    rank: int = 0
    size: int = 1
    num_records: int | None = field(default=None, repr=False)  # that are there, where the sampler's is a bound on it
    views: int = 1  # of each record, one after the other

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[Drawn]]:
        for step in self.steps():  # asked for with the first batch: torch calls `iter` twice where there are workers
            # Processes with other records draw other randomness.
            key = fold_in(self.key, "records", step, *((self.rank,) if self.rank else ()))
            own = own_records(self.sampler.indices(self.key, step), self.num_records, self.rank, self.size).tolist()
            checked = len(own) > 1 and step % CHECKED_IN == 0
            # of an empty draw the first record, for the structure of its batch
            drawn = [Drawn(key, index, True, checked) for index in own] or [Drawn(key, 0, real=False)]
            yield [each for each in drawn for _ in range(self.views)]


@dataclass
class Once:
    """The steps start..stop-1, for one iteration: a second one would begin with the batch of the first step again."""

    start: int
    stop: int
    _began: bool = field(default=False, init=False, repr=False, compare=False)

    def __call__(self) -> range:
        if self._began:
            raise InvalidArgument(
                f"Expected one iteration over a loader, got a second one: it would begin again with the batch of step "
                f"{self.start}. Make a loader from the present state: plan.loader(dataset, state). One loader has the "
                "batches of all steps that are left; there are no epochs to repeat."
            )
        self._began = True
        return range(self.start, self.stop)


@dataclass(frozen=True)
class Records(Dataset[Any]):
    """A data set whose records are read with torch's randomness fixed by the step: a repeated step reads the same."""

    dataset: Any
    views: int = 1

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, drawn: Sequence[Drawn]) -> list[tuple[Drawn, Any]]:
        with torch_seed(drawn[0].key, accelerators=False):
            records = read(self.dataset, [each.record for each in drawn])
        if drawn[0].checked:
            warn_of_equal(records[:: self.views], len(self))
        if drawn[0].checked and hasattr(self.dataset, "__getitems__"):
            row = _checked_row(drawn[0].key, len(records))
            check_reading(self.dataset, drawn[row].record, records[row], drawn[0].key)
        return list(zip(drawn, records, strict=True))


@dataclass(frozen=True)
class Collate:
    """A collate function of records as `Records` gives them, with torch's CPU generator seeded by the step."""

    collate: Callable[[list[Any]], Batch]
    allow_empty: bool = True  # an empty draw becomes a batch with no rows; else one row, of a record that is not real
    rank: int = 0  # of processes that each collate, and pad, the whole draw: this one gets every size-th row, or some
    size: int = 1
    views: int = 1  # of each record: leaves are (B, views, ...)

    def __call__(self, records: Sequence[tuple[Drawn, Any]]) -> Batch:
        first = records[0][0]
        key, own = fold_in(first.key, "collate"), [record for _, record in records]
        if first.checked:
            check_rows(self.collate, own, key, _checked_row(first.key, len(own)))
        with torch_seed(key, accelerators=False):
            batch = self.collate(own)
        if isinstance(batch, Mapping) and not isinstance(batch, dict):  # BatchEncoding of tokenizers
            batch = dict(batch)
        if self.views > 1:
            shape = (-1, self.views)
            batch = tree_map(lambda leaf: leaf.unflatten(0, shape) if isinstance(leaf, Tensor) else leaf, batch)
        if self.size > 1:
            own_rows = deal(torch.arange(batch_size(batch), device="cpu"), self.rank, self.size)
            return take(batch, own_rows if len(own_rows) else torch.zeros(1, dtype=torch.int64, device="cpu"))
        return without_rows(batch) if self.allow_empty and not first.real else batch


def _checked_row(key: Key, count: int) -> int:
    return int.from_bytes(fold_in(key, "checked").secret[:8], "little") % count


def without_rows(batch: Batch) -> Batch:
    """A batch of the same structure, dtypes and trailing shapes, with no rows; nothing of the batch is kept."""
    if batch_size(batch) != 1:
        raise InvalidArgument(
            f"Expected collate_fn to make a batch of one row from one record, got {batch_size(batch)} rows. Axis 0 of "
            "each tensor is the records: one row, one record."
        )
    return tree_map(torch.clone, rows(batch, 0, 0))  # a copy: a view would keep the record in memory


def data_loader(
    dataset: Any, draws: Draws, collate: Collate, *, num_workers: int = 0, pin_memory: bool = False,
    persistent_workers: bool = False, prefetch_factor: int | None = None, multiprocessing_context: Any = None,
    timeout: float = 0, worker_init_fn: Callable[[int], None] | None = None,
) -> DataLoader[Any]:  # fmt: skip
    """The draws as batches; their order and random numbers do not depend on workers."""
    # Without one each iteration would draw from torch's global generator; workers seed Python's and numpy's from it.
    seed = int.from_bytes(fold_in(draws.key, "workers").secret[:8]) >> 1
    default = torch.get_default_device()  # torch draws the seed there, and wants a generator of that device
    generator = torch.Generator(default if default.type == "cuda" else "cpu").manual_seed(seed)
    return DataLoader(
        Records(dataset, draws.views), batch_sampler=draws, collate_fn=collate, num_workers=num_workers,
        pin_memory=pin_memory, persistent_workers=persistent_workers, prefetch_factor=prefetch_factor, timeout=timeout,
        worker_init_fn=worker_init_fn, multiprocessing_context=multiprocessing_context, generator=generator,
    )  # fmt: skip


def check_readable(dataset: Any, name: str = "dataset") -> int:
    """Check that records can be read by index, each once: no loader, stream or dictionary. Their number."""
    kind = type(dataset).__name__
    names = sorted(map(str, dataset))[:5] if isinstance(dataset, Mapping) else []
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    refuse(
        (dataset is None, f"Expected {name} to be given, got {name}=None."),
        (isinstance(dataset, DataLoader),
         f"Expected {name} to be a data set, got a DataLoader, which draws batches of its own. Pass what it was "
         "made of (loader.dataset), and its collate_fn."),
        (isinstance(dataset, Mapping),
         f"Expected a data set that {name}[i] gives record i of, got {name} of type {kind} with the names "
         f"{names}. Take one split of a dictionary of data sets. Of a dictionary of columns "
         "make a list of records; or, in your own loop, take rows: dpfunc.take(data, indices) for indices in "
         "plan.batches(state)."),
        (isinstance(dataset, IterableDataset) or not indexed,
         f"Expected a data set with a length and an index, got {name} of type {kind}, a stream: a plan draws the "
         "records of a batch by their index, from all of them. Load it without streaming, or read it into a list; "
         "or, in your own loop, read it in its order, which has another cost: sampling.InOrder, see "
         "docs/guides/loop.md."),
    )  # fmt: skip
    refuse_repeated(dataset, name)
    return len(dataset)


def check_dataset(dataset: object, dataset_size: int, num_records: int | None = None) -> None:
    """Check that a data set can be read by index, and has as many records as the plan, or as the run said."""
    length = check_readable(dataset)
    refuse(
        (num_records not in (None, length),
         "Expected len(dataset) to be the num_records with which the run began, got another length. Load the data set "
         "of the run. Nothing was spent."),
        (num_records is None and length != dataset_size,
         f"Expected len(dataset) to be the plan's dataset_size={dataset_size}, got "
         f"{'more' if length > dataset_size else 'fewer'} records. The sampling probability, and so epsilon, is that "
         f"of {dataset_size}: make the plan with dataset_size=len(dataset), or load the data set that it was made for. "
         "If dataset_size is a public bound on their number, say so when the run begins: "
         "dp_step.init(params, key, num_records=len(dataset)). Nothing was spent."),
    )  # fmt: skip
