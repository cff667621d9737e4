"""Poisson sampling with batches of a largest size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfunc._utils.validation import integer, probability, records
from dpfunc.rng import Key
from dpfunc.sampling.base import check_span, generator_of
from dpfunc.sampling.poisson import successes
from dpfunc.types import Adjacency, Capped, Event


@dataclass(frozen=True)
class CappedPoisson:
    """A Poisson sample of which at most `cap` records are kept: a random subset if there are more, whatever they say.

    For batches that must fit a fixed memory. Records that are cut make room for others, so that a batch depends on how
    many were drawn: n must be public, and a cap near `q n` costs much. With `cap >= q n + 7 sqrt(q n)` the cost is that
    of `Poisson`.

    Args:
        dataset_size: number of records n, 1 <= n <= 2**46. sampling_prob: q, 0 < q <= 1. cap: >= 1.

    Raises:
        InvalidArgument: a value outside its domain.

    Guarantees:
        tests/sampling/test_capped.py: all subsets at their probability (test_every_subset_at_its_probability); tests
        of its cost are in tests/accounting/test_kinds.py.

    >>> CappedPoisson(1000, 0.1, cap=170).events(0, 5, noise_multiplier=2.0)
    (Capped(sampling_prob=0.1, noise_multiplier=2.0, num_steps=5, dataset_size=1000, cap=170),)
    """

    dataset_size: int
    sampling_prob: float
    cap: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_size", records(self.dataset_size))
        object.__setattr__(self, "sampling_prob", probability("sampling_prob", self.sampling_prob))
        object.__setattr__(self, "cap", integer("cap", self.cap, minimum=1))

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """Adjacencies without add/remove: the number of records decides who is cut."""
        return ("zero_out", "replace_one")

    def indices(self, key: Key, step: int) -> Tensor:
        """The sorted indices of the batch of a step, at most `cap`."""
        number = integer("step", step)
        drawn = np.concatenate(
            list(successes(generator_of(key, "sample", number), self.dataset_size, self.sampling_prob))
        )
        if len(drawn) > self.cap:
            chosen = generator_of(key, "cap", number).choice(len(drawn), self.cap, replace=False, shuffle=False)
            drawn = drawn[np.sort(chosen)]
        return torch.from_numpy(drawn)

    def expected_batch_size(self, step: int) -> float:
        """Mean of the number of records that are kept: `n q P[Bin(n - 1, q) < cap] + cap P[Bin(n, q) > cap]`."""
        from scipy.stats import binom

        integer("step", step)
        n, q, cap = self.dataset_size, self.sampling_prob, self.cap
        return float(n * q * binom.cdf(cap - 1, n - 1, q) + cap * binom.sf(cap, n, q))

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """One event for all steps."""
        first, last = check_span(start, stop)
        if last == first:
            return ()
        return (Capped(self.sampling_prob, noise_multiplier, last - first, self.dataset_size, self.cap),)
