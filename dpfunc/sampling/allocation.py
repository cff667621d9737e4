"""Epochs in which each record draws its batch: random allocation, or balls in bins."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpfunc._utils.validation import integer, records
from dpfunc.rng import Key, check_key
from dpfunc.sampling.base import check_span, generator_of
from dpfunc.types import Adjacency, Allocated, Event


@dataclass(frozen=True)
class RandomAllocation:
    """In each epoch each record is in one of `num_batches` batches, drawn independently of all other records.

    All records are used once an epoch, as with `Shuffled`; batches differ in size, and the cost is that of `Allocated`:
    an epoch costs about as much as one of `Poisson`, and is charged at its first step.

    Args:
        dataset_size: number of records n, >= 1; or a public number that n cannot exceed.
        num_batches: of an epoch, >= 1.

    Guarantees:
        tests/sampling/test_allocation.py: every record once an epoch (test_an_epoch), each batch equally likely, and
        independent between records (test_batches_are_drawn_independently).

    >>> RandomAllocation(1000, num_batches=20).events(0, 40, noise_multiplier=2.0)
    (Allocated(sampling_prob=1.0, noise_multiplier=2.0, num_steps=2, num_batches=20),)
    """

    dataset_size: int
    num_batches: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_size", records(self.dataset_size))
        object.__setattr__(self, "num_batches", integer("num_batches", self.num_batches, minimum=1))

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """Adjacencies in which a record is there or not; nothing better than `Shuffled` is known of one replaced."""
        return ("add_remove", "zero_out")

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

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """An epoch for each one that starts in start..stop-1."""
        first, last = check_span(start, stop)
        epochs = -(-last // self.num_batches) - -(-first // self.num_batches)
        return (Allocated(noise_multiplier, epochs, self.num_batches),) if epochs else ()


@functools.lru_cache(maxsize=1)  # all steps of an epoch share it
def _batch_of(key: Key, epoch: int, sampler: RandomAllocation) -> npt.NDArray[np.int64]:
    """The batch of each record; those of more records begin with the same ones."""
    batch_N = generator_of(key, "allocate", epoch).integers(sampler.num_batches, size=sampler.dataset_size)
    batch_N.setflags(write=False)
    return batch_N
