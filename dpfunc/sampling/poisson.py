"""Poisson sampling: each record on its own coin."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfunc.checks import fail, probability, real, whole
from dpfunc.rng import Key
from dpfunc.sampling.base import check_span, draw
from dpfunc.types import ADJACENCIES, Adjacency, Event, Schedule, schedule_at

CHUNK = 2**16  # uniforms in memory at once; no influence on the result


@dataclass(frozen=True)
class Poisson:
    """Each record is in the batch with probability q, independently of all others; a batch may be empty.

    Args:
        dataset_size: number of records n, >= 1.
        sampling_prob: q, 0 < q <= 1, or a `Schedule` of it over the steps.

    Under add/remove adjacency n is private: treat q and the expected batch size as chosen numbers.
    Abadi et al. 2016, Deep Learning with Differential Privacy; Mironov et al. 2019, Renyi Differential Privacy of the
    Sampled Gaussian Mechanism.

    Raises:
        InvalidArgument: a value outside its domain.

    Guarantees:
        inclusion at rate q, independent between records and steps (tests/test_sampling.py::test_poisson_rate,
        test_poisson_records_are_independent, test_poisson_steps_are_independent); a record's coin does not depend on
        the other records (test_poisson_draws_do_not_depend_on_other_records).

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
        generator = draw(key, "sample", whole("step", step))
        prob = schedule_at(self.sampling_prob, step)
        drawn = [
            start + np.flatnonzero(generator.random(min(CHUNK, self.dataset_size - start)) < prob)
            for start in range(0, self.dataset_size, CHUNK)
        ]
        return torch.from_numpy(np.concatenate(drawn))

    def expected_batch_size(self, step: int) -> float:
        """`q n`."""
        return schedule_at(self.sampling_prob, whole("step", step)) * self.dataset_size

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """One event for each stretch of equal q."""
        first, last = check_span(start, stop)
        changes = self.sampling_prob.starts() if isinstance(self.sampling_prob, Schedule) else ()
        edges = sorted({first, last, *(edge for edge in changes if first < edge < last)})
        return tuple(
            Event(schedule_at(self.sampling_prob, a), noise_multiplier, b - a) for a, b in itertools.pairwise(edges)
        )
