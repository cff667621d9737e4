"""Protocol of samplers, and the checks that they share."""

from typing import Protocol

import numpy as np
from torch import Tensor

from dpfunc._utils.validation import integer
from dpfunc.rng import Key, check_key, fold_in, stream
from dpfunc.types import Adjacency, Event


class Sampler(Protocol):
    """Sampler of the records of each batch. The probability comes from it, never from the length of a loader.

    A sampler holds public facts only; the key is an argument. Implement these methods to bring your own, and claim in
    `events` no more than its proof gives.
    """

    @property
    def dataset_size(self) -> int:
        """Number of records n in the data set, or a public bound on it."""

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """The neighbours for which `events` holds."""

    def indices(self, key: Key, step: int) -> Tensor:
        """The records in the batch of a step: int64, a function of the run's key and the step. Unreleased."""

    def expected_batch_size(self, step: int) -> float:
        """The expected number of records, a public fact."""

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """Events of the steps start..stop-1 with this noise: the privacy that they cost."""


def generator_of(key: Key, purpose: str, number: int) -> np.random.Generator:
    """The random numbers of one draw of a sampler, from the root key of the run."""
    return stream(fold_in(check_key(key), purpose, number))


def check_span(start: int, stop: int) -> tuple[int, int]:
    """Check that 0 <= start <= stop, of the steps start..stop-1."""
    first = integer("start", start)
    return first, integer("stop", stop, minimum=first)


def own_records(sampler: Sampler, key: Key, step: int, num_records: int | None, rank: int = 0, size: int = 1) -> Tensor:
    """The records of a step that are there (below num_records, or all), and of these those of a process, see `deal`."""
    drawn = sampler.indices(key, step)
    return deal(drawn if num_records is None else drawn[drawn < num_records], rank, size)


def deal(indices: Tensor, rank: int, size: int) -> Tensor:
    """The records of one of several processes: every `size`-th of the drawn ones, from the `rank`-th on.

    Whatever the number of processes, together they have the draw of one process.

    >>> import torch
    >>> deal(torch.tensor([3, 5, 8, 9, 11]), rank=1, size=2)
    tensor([5, 9])
    """
    return indices[rank::size]
