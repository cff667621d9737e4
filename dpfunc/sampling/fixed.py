"""Batches of a fixed size: fresh, shuffled or in order; and epochs in which each record draws its batch.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpfunc._utils.memory import frozen
from dpfunc._utils.validation import checked, count, expect, integer, records
from dpfunc.rng import Key, check_key
from dpfunc.sampling.poisson import begun, generator_of
from dpfunc.types import Adjacency, Allocated, Capped, Event


def _participation(num_steps: int, epoch: int, separation: int) -> tuple[int, int]:
    """One step an epoch, and the separation between those of two epochs."""
    epochs = begun(0, integer("num_steps", num_steps, minimum=1), epoch)
    return (separation, epochs) if epochs > 1 else (num_steps, 1)


@dataclass(frozen=True)
@checked({"dataset_size": count, "batch_size": count})
class _FixedBatches:
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("zero_out", "replace_one")
    """All but add/remove: one more record changes the batches of the others."""

    dataset_size: int
    batch_size: int

    def __post_init__(self) -> None:
        n, size = self.dataset_size, self.batch_size
        expect(size <= n, "batch_size <= dataset_size", "batch_size", size, f"The data set has {n} records.")

    def expected_batch_size(self, step: int) -> float:
        """The batch size; also for a smaller last batch, so that all records weigh the same."""
        integer("step", step)
        return float(self.batch_size)


@dataclass(frozen=True)
class _Epochs(_FixedBatches):
    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in which each record is used once, `ceil(n / batch_size)`."""
        return -(-self.dataset_size // self.batch_size)

    def _places(self, step: int) -> tuple[int, slice]:
        epoch, number = divmod(integer("step", step), self.steps_per_epoch)
        start = number * self.batch_size
        return epoch, slice(start, min(start + self.batch_size, self.dataset_size))

    def participation(self, num_steps: int) -> tuple[int, int]:
        """Separation and number of the steps of a record, see `Sampler`: each epoch has another order."""
        return _participation(num_steps, self.steps_per_epoch, 1)

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """The Gaussian mechanism, once for each epoch that starts in start..stop-1."""
        epochs = begun(start, stop, self.steps_per_epoch)
        return (Event(1.0, noise_multiplier, epochs),) if epochs else ()


@dataclass(frozen=True)
class _SameOrder(_Epochs):
    """Epochs in which each record keeps its place."""

    def participation(self, num_steps: int) -> tuple[int, int]:
        """Separation and number of the steps of a record, see `Sampler`."""
        return _participation(num_steps, self.steps_per_epoch, self.steps_per_epoch)


@dataclass(frozen=True)
class FixedSize(_FixedBatches):
    """`batch_size` different records, each step anew: sampling without replacement, with its own amplification.

    The cost is that of `Capped` with `sampling_prob = 1`, which has no add/remove neighbours. Less noise is needed than
    with all data; with zero-out neighbours more than with `Poisson`, as one record takes the place of another.

    Args:
        dataset_size: number of records n, >= 1. batch_size: 1 <= batch_size <= n.

    Guarantees:
        all subsets are equally likely (tests/sampling/test_fixed.py::test_fixed_size_subsets_are_uniform).

    >>> FixedSize(100, 10).events(0, 5, noise_multiplier=2.0)
    (Capped(sampling_prob=1.0, noise_multiplier=2.0, num_steps=5, dataset_size=100, cap=10),)
    """

    def indices(self, key: Key, step: int) -> Tensor:
        """The sorted indices of the batch of a step."""
        generator = generator_of(key, "sample", integer("step", step))
        drawn_B = generator.choice(self.dataset_size, self.batch_size, replace=False, shuffle=False)
        return torch.from_numpy(np.sort(drawn_B))

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """One event for all steps."""
        steps = begun(start, stop, 1)
        return (Capped(1.0, noise_multiplier, steps, self.dataset_size, self.batch_size),) if steps else ()


@dataclass(frozen=True)
class Shuffled(_Epochs):
    """A new permutation each epoch, divided into batches; the last one of an epoch is smaller, and kept.

    Claims no amplification: a record is in one batch an epoch, so an epoch costs one Gaussian release (on average over
    the permutations too, by joint convexity), charged at its first step. Accounting such batches as Poisson
    under-reports epsilon by up to five times (Chua et al. 2024, How Private are DP-SGD Implementations?); the bounds of
    `RandomAllocation` do not hold either, as places are not independent.

    Args:
        dataset_size: number of records n, >= 1. batch_size: 1 <= batch_size <= n.

    Guarantees:
        tests/sampling/test_fixed.py: every record exactly once an epoch (test_an_epoch); all positions equally likely
        (test_shuffled_positions_are_uniform); an epoch is charged once, however the steps are divided into stretches
        (test_each_epoch_is_charged_once).

    >>> sampler = Shuffled(100, 40)
    >>> sampler.steps_per_epoch
    3
    >>> sampler.events(0, 6, noise_multiplier=2.0)
    (Event(sampling_prob=1.0, noise_multiplier=2.0, num_steps=2),)
    """

    def indices(self, key: Key, step: int) -> Tensor:
        """The indices of the batch of a step, in the order of the permutation."""
        epoch, places = self._places(step)
        return torch.from_numpy(_permutation(check_key(key), epoch, self.dataset_size)[places].copy())


@dataclass(frozen=True)
class ShuffledOnce(_SameOrder):
    """A permutation of the records, divided into batches that come again in each epoch; the last one is smaller.

    Between two steps of a record there is a whole epoch, which correlated noise needs (`noise.Correlated`). No
    amplification is claimed: an epoch costs one Gaussian release, charged at its first step.

    Args:
        dataset_size: number of records n, >= 1. batch_size: 1 <= batch_size <= n.

    Guarantees:
        tests/sampling/test_fixed.py: every record exactly once an epoch (test_an_epoch), at the same place of each
        (test_records_keep_their_place).

    >>> ShuffledOnce(100, 40).participation(num_steps=8)
    (3, 3)
    """

    def indices(self, key: Key, step: int) -> Tensor:
        """The indices of the batch of a step, in the order of the permutation."""
        _, places = self._places(step)
        return torch.from_numpy(_permutation(check_key(key), 0, self.dataset_size)[places].copy())


@dataclass(frozen=True)
class InOrder(_SameOrder):
    """Batches of consecutive records, in the order of the data set; the last one of an epoch is smaller, and kept.

    For streams, which cannot be read by index. An epoch costs one Gaussian release, as with `Shuffled`. Neighbours
    differ in one record at its place: the number of records, and the place of each, are public.

    Args:
        dataset_size: number of records n, >= 1. batch_size: 1 <= batch_size <= n.

    Guarantees:
        every record exactly once an epoch, in order (tests/sampling/test_fixed.py::test_an_epoch); an epoch is charged
        once (test_each_epoch_is_charged_once).

    >>> from dpfunc.rng import insecure_key
    >>> sampler = InOrder(100, 40)
    >>> sampler.indices(insecure_key(0), 2)[:3]
    tensor([80, 81, 82])
    >>> sampler.events(0, 6, noise_multiplier=2.0)
    (Event(sampling_prob=1.0, noise_multiplier=2.0, num_steps=2),)
    """

    def indices(self, key: Key, step: int) -> Tensor:
        """The indices of the batch of a step; no random numbers are drawn."""
        check_key(key)
        _, places = self._places(step)
        return torch.arange(places.start, places.stop, device="cpu")


@dataclass(frozen=True)
@checked({"num_batches": count, "dataset_size": records})
class RandomAllocation:
    """In each epoch each record is in one of `num_batches` batches, drawn independently of all other records.

    Batches differ in size. The cost is that of `Allocated`: an epoch costs about as much as one of `Poisson`, and is
    charged at its first step.

    Args:
        dataset_size: number of records n, >= 1; or a public number that n cannot exceed.
        num_batches: of an epoch, >= 1.

    Guarantees:
        tests/sampling/test_fixed.py: every record once an epoch (test_an_allocated_epoch), each batch equally likely,
        and independent between records (test_batches_are_drawn_independently).

    >>> RandomAllocation(1000, num_batches=20).events(0, 40, noise_multiplier=2.0)
    (Allocated(sampling_prob=1.0, noise_multiplier=2.0, num_steps=2, num_batches=20, participations=1, cycles=1),)
    """

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove", "zero_out")
    """Neighbours with a record added, removed or zeroed; for a replaced one no bound below `Shuffled` is known."""

    dataset_size: int
    num_batches: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in which each record is used once."""
        return self.num_batches

    def indices(self, key: Key, step: int) -> Tensor:
        """The sorted indices of the batch of a step."""
        epoch, number = divmod(integer("step", step), self.num_batches)
        return torch.from_numpy(np.flatnonzero(_batch_of(check_key(key), epoch, self) == number))

    def expected_batch_size(self, step: int) -> float:
        """Mean number of records of a batch, `n / num_batches`."""
        integer("step", step)
        return self.dataset_size / self.num_batches

    def participation(self, num_steps: int) -> tuple[int, int]:
        """Separation and number of the steps of a record, see `Sampler`."""
        return _participation(num_steps, self.num_batches, 1)

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """An epoch for each one that starts in start..stop-1."""
        epochs = begun(start, stop, self.num_batches)
        return (Allocated(noise_multiplier, epochs, self.num_batches),) if epochs else ()


@functools.lru_cache(maxsize=1)  # all steps of an epoch share it; with 1e7 records it takes a second to make
def _permutation(key: Key, epoch: int, size: int) -> npt.NDArray[np.int64]:
    return frozen(generator_of(key, "shuffle", epoch).permutation(size))


@functools.lru_cache(maxsize=1)  # all steps of an epoch share it
def _batch_of(key: Key, epoch: int, sampler: RandomAllocation) -> npt.NDArray[np.int64]:
    """The batch of each record; those of more records begin with the same ones."""
    return frozen(generator_of(key, "allocate", epoch).integers(sampler.num_batches, size=sampler.dataset_size))
