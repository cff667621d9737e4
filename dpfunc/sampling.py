"""Who is in the batch of a step: samplers that can draw any step again and that carry what they may claim."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpfunc.checks import fail, probability, real, whole
from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, fold_in, stream
from dpfunc.tree import tree_map
from dpfunc.types import ADJACENCIES, Adjacency, Batch, Event, Schedule, schedule_at


class Sampler(Protocol):
    """What a plan needs of a sampler. The probability comes from it, never from the length of a loader."""

    @property
    def dataset_size(self) -> int: ...

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """The neighbours for which `events` holds."""
        ...

    def indices(self, key: Key, step: int) -> Tensor:
        """The records in the batch of a step: int64, a function of the run's key and the step. Unreleased."""
        ...

    def expected_batch_size(self, step: int) -> float:
        """The expected number of records, a public fact."""
        ...

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """What the steps start..stop-1 cost with this noise."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Each record is in the batch with probability q, independently of all others; a batch may be empty.

    Args:
        dataset_size: number of records n, >= 1.
        sampling_prob: q, 0 < q <= 1, or a `Schedule` of it over the steps.

    Under add/remove adjacency n is private: treat q and the expected batch size as chosen numbers.

    Guarantees:
        inclusion at rate q, independent between records and steps (tests/test_sampling.py::test_poisson_rate,
        test_poisson_records_are_independent, test_poisson_steps_are_independent).

    >>> from dpfunc.rng import insecure_key
    >>> sampler = Poisson(dataset_size=1000, sampling_prob=0.01)
    >>> torch.equal(sampler.indices(insecure_key(0), 7), sampler.indices(insecure_key(0), 7))
    True
    >>> sampler.events(0, 500, noise_multiplier=1.1)
    (Event(sampling_prob=0.01, noise_multiplier=1.1, num_steps=500),)
    """

    dataset_size: int
    sampling_prob: float | Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_size", whole("dataset_size", self.dataset_size, minimum=1))
        if isinstance(self.sampling_prob, Schedule):
            for _, value in self.sampling_prob.pieces:
                probability("sampling_prob", value)
        else:
            object.__setattr__(self, "sampling_prob", probability("sampling_prob", self.sampling_prob))

    @classmethod
    def of_batch_size(cls, dataset_size: int, expected_batch_size: float) -> Poisson:
        """The sampler with q = expected_batch_size / dataset_size.

        >>> Poisson.of_batch_size(64, 48).sampling_prob
        0.75
        """
        n = whole("dataset_size", dataset_size, minimum=1)
        domain = "0 < expected_batch_size <= dataset_size"
        size = real("expected_batch_size", expected_batch_size, domain)
        if not 0 < size <= n:
            raise fail(domain, "expected_batch_size", expected_batch_size, f"The data set has {n} records.")
        return cls(n, size / n)

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """All: records are drawn independently."""
        return ADJACENCIES

    def indices(self, key: Key, step: int) -> Tensor:
        """The sorted indices of the batch of a step."""
        uniform_N = stream(fold_in(key, "sample", whole("step", step))).random(self.dataset_size)
        return torch.from_numpy(np.flatnonzero(uniform_N < schedule_at(self.sampling_prob, step)))

    def expected_batch_size(self, step: int) -> float:
        """`q n`."""
        return schedule_at(self.sampling_prob, step) * self.dataset_size

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """One event for each stretch of equal q."""
        changes = self.sampling_prob.starts() if isinstance(self.sampling_prob, Schedule) else ()
        edges = sorted({start, stop, *(edge for edge in changes if start < edge < stop)})
        return tuple(
            Event(schedule_at(self.sampling_prob, a), noise_multiplier, b - a) for a, b in itertools.pairwise(edges)
        )


FIXED_ADJACENCIES: tuple[Adjacency, ...] = ("zero_out", "replace_one")


def _check_batch_size(dataset_size: int, batch_size: int) -> tuple[int, int]:
    n = whole("dataset_size", dataset_size, minimum=1)
    size = whole("batch_size", batch_size, minimum=1)
    if size > n:
        raise fail("batch_size <= dataset_size", "batch_size", batch_size, f"The data set has {n} records.")
    return n, size


@dataclass(frozen=True)
class FixedSize:
    """`batch_size` different records, each step anew. Claims no amplification: every step costs as much as on all data.

    Args:
        dataset_size: number of records n, >= 1.
        batch_size: 1 <= batch_size <= n.

    >>> FixedSize(100, 10).events(0, 5, noise_multiplier=2.0)
    (Event(sampling_prob=1.0, noise_multiplier=2.0, num_steps=5),)
    """

    dataset_size: int
    batch_size: int

    def __post_init__(self) -> None:
        n, size = _check_batch_size(self.dataset_size, self.batch_size)
        object.__setattr__(self, "dataset_size", n)
        object.__setattr__(self, "batch_size", size)

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """Not add/remove: one record more changes who else is drawn."""
        return FIXED_ADJACENCIES

    def indices(self, key: Key, step: int) -> Tensor:
        """The sorted indices of the batch of a step."""
        order_N = stream(fold_in(key, "sample", whole("step", step))).permutation(self.dataset_size)
        return torch.from_numpy(np.sort(order_N[: self.batch_size]))

    def expected_batch_size(self, step: int) -> float:
        """The batch size."""
        return float(self.batch_size)

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """The Gaussian mechanism, once a step."""
        return (Event(1.0, noise_multiplier, stop - start),) if stop > start else ()


@dataclass(frozen=True)
class Shuffled:
    """A new permutation each epoch, cut into batches; the last one of an epoch is smaller, and kept.

    Claims no amplification: a record is in one batch an epoch, so an epoch costs one Gaussian release, charged at its
    first step. Accounting such batches as Poisson under-reports epsilon by up to five times (Chua et al. 2024, How
    Private are DP-SGD Implementations?).

    Args:
        dataset_size: number of records n, >= 1.
        batch_size: 1 <= batch_size <= n.

    Guarantees:
        every record exactly once an epoch (tests/test_sampling.py::test_shuffled_epoch).

    >>> sampler = Shuffled(100, 40)
    >>> sampler.steps_per_epoch
    3
    >>> sampler.events(0, 6, noise_multiplier=2.0)
    (Event(sampling_prob=1.0, noise_multiplier=2.0, num_steps=2),)
    """

    dataset_size: int
    batch_size: int

    def __post_init__(self) -> None:
        n, size = _check_batch_size(self.dataset_size, self.batch_size)
        object.__setattr__(self, "dataset_size", n)
        object.__setattr__(self, "batch_size", size)

    @property
    def steps_per_epoch(self) -> int:
        """`ceil(n / batch_size)`."""
        return -(-self.dataset_size // self.batch_size)

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """Not add/remove: one record more moves others into other batches."""
        return FIXED_ADJACENCIES

    def indices(self, key: Key, step: int) -> Tensor:
        """The indices of the batch of a step, in the order of the permutation."""
        epoch, position = divmod(whole("step", step), self.steps_per_epoch)
        order_N = stream(fold_in(key, "sample", epoch)).permutation(self.dataset_size)
        return torch.from_numpy(order_N[position * self.batch_size : (position + 1) * self.batch_size].copy())

    def expected_batch_size(self, step: int) -> float:
        """The batch size; also for the smaller last batch, so that all records weigh the same."""
        return float(self.batch_size)

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """The Gaussian mechanism, once for each epoch that starts in start..stop-1."""
        epochs = -(-stop // self.steps_per_epoch) - -(-start // self.steps_per_epoch)
        return (Event(1.0, noise_multiplier, epochs),) if epochs else ()


@dataclass(frozen=True)
class BatchSampler:
    """The draws of steps start..stop-1 as lists, for `torch.utils.data.DataLoader(batch_sampler=...)`."""

    sampler: Sampler
    key: Key
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.stop):
            yield self.sampler.indices(self.key, step).tolist()


def batch_sampler(sampler: Sampler, key: Key, start: int, stop: int) -> BatchSampler:
    """The draws of a run as lists of indices; iterate as often as you like, the draws are the same.

    Args:
        sampler: who is in each batch. key: of the run. start, stop: steps.

    >>> from dpfunc.rng import insecure_key
    >>> len(batch_sampler(Poisson(10, 0.5), insecure_key(0), 3, 8))
    5
    """
    first, last = whole("start", start), whole("stop", stop)
    return BatchSampler(sampler, key, first, max(first, last))


@dataclass(frozen=True)
class CollateOrEmpty:
    """A collate function that also takes the empty list; see `collate_or_empty`."""

    collate: Callable[[list[Any]], Batch]
    example: Batch

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """The batch of the samples, or one with no rows."""
        return self.collate(list(samples)) if samples else self.example


def collate_or_empty(collate: Callable[[list[Any]], Batch], public_example: Any) -> CollateOrEmpty:  # noqa: ANN401
    """A collate function that gives a batch with no rows for an empty Poisson draw, instead of an error.

    Args:
        collate: list of samples -> pytree of tensors, e.g. `torch.utils.data.default_collate`.
        public_example: one sample of the right form; only shapes and dtypes of its batch are kept.

    >>> from torch.utils.data import default_collate
    >>> collate = collate_or_empty(default_collate, (torch.zeros(3), 1))
    >>> [leaf.shape for leaf in collate([])]
    [torch.Size([0, 3]), torch.Size([0])]
    """
    if not callable(collate):
        raise InvalidArgument(f"Expected collate to be a function of a list of samples, got collate={collate!r}.")
    return CollateOrEmpty(collate, tree_map(lambda leaf: leaf[:0].clone(), collate([public_example])))
