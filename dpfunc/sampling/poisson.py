"""Poisson sampling, also with batches of a largest size: an independent trial for each record.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import scipy
import torch
from torch import Tensor

from dpfunc._utils.memory import frozen
from dpfunc._utils.validation import checked, count, expect, integer, named, probability, records, sampling_prob_of
from dpfunc.rng import Key, check_key, fold_in, stream
from dpfunc.types import ADJACENCIES, Adjacency, Capped, Event, Schedule, schedule_at, stretches

_CHUNK = 2**16  # gaps in memory at once; no influence on the result
_SLOWEST = 1e-300  # so that no gap overflows float64; whatever is slower has no success among 2**46 trials


def generator_of(key: Key, purpose: str, number: int) -> np.random.Generator:
    """The stream of random numbers for one draw of a sampler, from the root key of the run."""
    return stream(fold_in(check_key(key), purpose, number))


def check_span(start: int, stop: int) -> tuple[int, int]:
    """Check that 0 <= start <= stop, of the steps start..stop-1."""
    first = integer("start", start)
    return first, integer("stop", stop, minimum=first)


def begun(start: int, stop: int, length: int) -> int:
    """Number of rounds of this length that begin in the steps start .. stop - 1; the first one begins at step 0."""
    first, last = check_span(start, stop)
    return -(-last // length) - -(-first // length)


def _sampling_prob(name: str, value: object) -> float | Schedule:
    if isinstance(value, Schedule):
        return Schedule(tuple((number, probability(name, prob)) for number, prob in value.pieces))
    return probability(name, value)


@named
@dataclass(frozen=True)
@checked({"dataset_size": records, "sampling_prob": _sampling_prob})
class Poisson:
    """Each record is in the batch with probability q, independently of all others; a batch may be empty.

    A draw costs time and memory for the records in the batch, whatever n is: see `successes`.

    Args:
        dataset_size: number of records n, 1 <= n <= 2**46; or a public number that n cannot exceed.
        sampling_prob: q, 0 < q <= 1, or a `Schedule` of it over the steps.

    Under add/remove adjacency n is private, and q n, the expected batch size, is published: give a rounded number, or
    that of a public superset, and the true one to `dp_step.init(..., num_records=n)`. Abadi et al. 2016, Deep Learning
    with Differential Privacy.

    Guarantees:
        tests/sampling/test_poisson.py: inclusion at rate q (test_every_subset_at_its_probability,
        test_every_record_at_the_same_rate), independent between records (test_pairs_are_independent) and steps
        (tests/sampling/test_base.py::test_steps_are_independent); adding records at the end does not change the
        trials of the others (test_draws_do_not_depend_on_other_records); the same draws in every version
        (test_known_draws).

    >>> from dpfunc.rng import insecure_key
    >>> sampler = Poisson(dataset_size=1000, sampling_prob=0.01)
    >>> torch.equal(sampler.indices(insecure_key(0), 7), sampler.indices(insecure_key(0), 7))
    True
    >>> sampler.events(0, 500, noise_multiplier=1.1)
    (Event(sampling_prob=0.01, noise_multiplier=1.1, num_steps=500),)
    """

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ADJACENCIES
    """All, since each record is drawn independently."""

    dataset_size: int
    sampling_prob: float | Schedule

    @classmethod
    def of_batch_size(cls, dataset_size: int, expected_batch_size: float) -> Self:
        """The sampler with q = expected_batch_size / dataset_size.

        >>> Poisson.of_batch_size(64, 48).sampling_prob
        0.75
        """
        return cls(dataset_size, sampling_prob_of(dataset_size, expected_batch_size))

    def indices(self, key: Key, step: int) -> Tensor:
        """The sorted indices of the batch of a step."""
        number = integer("step", step)
        return torch.from_numpy(_drawn(key, number, self.dataset_size, schedule_at(self.sampling_prob, number)))

    def expected_batch_size(self, step: int) -> float:
        """Expected number of records, `q n` with the q of this step."""
        return schedule_at(self.sampling_prob, integer("step", step)) * self.dataset_size

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """One event for each stretch of equal q."""
        spans = stretches(*check_span(start, stop), self.sampling_prob)
        return tuple(Event(schedule_at(self.sampling_prob, a), noise_multiplier, b - a) for a, b in spans)


@dataclass(frozen=True)
@checked({"cycle": count, "sampling_prob": probability, "dataset_size": records})
class CyclicPoisson:
    """Poisson samples of groups that take turns: step t draws each record of group `t mod cycle` with probability p.

    The key puts each record into one of the groups, independently of all others. It takes part once a cycle at most;
    `p = cycle sampling_prob` keeps the expected batch of `Poisson`. Whatever the groups are, the cost is that of the
    first one: a Poisson sample with p each cycle, charged at its first step. For banded noise, see `noise.Correlated`;
    independent noise costs less with `Poisson`. Choquette-Choo et al. 2023, arXiv 2306.08153.

    Args:
        dataset_size: number of records n, 1 <= n <= 2**46; or a public number that n cannot exceed.
        sampling_prob: q of a record in a step, on average over steps, 0 < q <= 1 / cycle.
        cycle: number of groups b, >= 1.

    Guarantees:
        tests/sampling/test_poisson.py::test_groups_take_turns.

    >>> CyclicPoisson(1000, 0.01, cycle=8).events(0, 20, noise_multiplier=2.0)
    (Event(sampling_prob=0.08, noise_multiplier=2.0, num_steps=3),)
    """

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ADJACENCIES
    """All, since each record is drawn independently."""

    dataset_size: int
    sampling_prob: float
    cycle: int

    def __post_init__(self) -> None:
        expect(
            self.cycle * self.sampling_prob <= 1, f"sampling_prob <= 1 / cycle = {1 / self.cycle:g}",
            "sampling_prob", self.sampling_prob, "Or fewer groups.",
        )  # fmt: skip

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in which each group has its turn."""
        return self.cycle

    def indices(self, key: Key, step: int) -> Tensor:
        """The sorted indices of the batch of a step."""
        number = integer("step", step)
        members = np.flatnonzero(_groups(check_key(key), self.dataset_size, self.cycle) == number % self.cycle)
        return torch.from_numpy(members[_drawn(key, number, len(members), self.cycle * self.sampling_prob)])

    def expected_batch_size(self, step: int) -> float:
        """Mean of the number of records, also over the groups: `q n`."""
        integer("step", step)
        return self.sampling_prob * self.dataset_size

    def participation(self, num_steps: int) -> tuple[int, int]:
        """Separation and number of the steps of a record, see `Sampler`."""
        return self.cycle, -(-integer("num_steps", num_steps, minimum=1) // self.cycle)

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """A Poisson sample of the first group for each of its turns."""
        turns = begun(start, stop, self.cycle)
        return (Event(self.cycle * self.sampling_prob, noise_multiplier, turns),) if turns else ()


@dataclass(frozen=True)
@checked({"dataset_size": records, "sampling_prob": probability, "cap": count})
class CappedPoisson:
    """A Poisson sample of at most `cap` records: a larger one is cut to a random subset, whatever the records hold.

    For batches that must fit a fixed memory. A batch depends on how many were drawn: n must be public, and a cap near
    `q n` costs much. With `cap >= q n + 7 sqrt(q n)` the cost is that of `Poisson`.

    Args:
        dataset_size: number of records n, 1 <= n <= 2**46. sampling_prob: q, 0 < q <= 1. cap: >= 1.

    Guarantees:
        tests/sampling/test_poisson.py: all subsets at their probability (test_every_cut_subset_at_its_probability);
        tests of its cost are in tests/accounting/test_events.py.

    >>> CappedPoisson(1000, 0.1, cap=170).events(0, 5, noise_multiplier=2.0)
    (Capped(sampling_prob=0.1, noise_multiplier=2.0, num_steps=5, dataset_size=1000, cap=170),)
    """

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("zero_out", "replace_one")
    """All but add/remove: the number of records decides which ones are cut."""

    dataset_size: int
    sampling_prob: float
    cap: int

    def indices(self, key: Key, step: int) -> Tensor:
        """The sorted indices of the batch of a step, at most `cap`."""
        number = integer("step", step)
        drawn = _drawn(key, number, self.dataset_size, self.sampling_prob)
        if len(drawn) > self.cap:
            chosen = generator_of(key, "cap", number).choice(len(drawn), self.cap, replace=False, shuffle=False)
            drawn = drawn[np.sort(chosen)]
        return torch.from_numpy(drawn)

    def expected_batch_size(self, step: int) -> float:
        """Mean of the number of records that are kept: `n q P[Bin(n - 1, q) < cap] + cap P[Bin(n, q) > cap]`."""
        integer("step", step)
        n, q, cap = self.dataset_size, self.sampling_prob, self.cap
        return float(n * q * scipy.stats.binom.cdf(cap - 1, n - 1, q) + cap * scipy.stats.binom.sf(cap, n, q))

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """One event for all steps."""
        steps = begun(start, stop, 1)
        return (Capped(self.sampling_prob, noise_multiplier, steps, self.dataset_size, self.cap),) if steps else ()


@functools.lru_cache(maxsize=1)  # all steps share it
def _groups(key: Key, size: int, cycle: int) -> npt.NDArray[np.int64]:
    """The group of each record; those of more records begin with the same ones."""
    return frozen(generator_of(key, "group", 0).integers(cycle, size=size))


def _drawn(key: Key, step: int, size: int, prob: float) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *successes(generator_of(key, "sample", step), size, prob)])


def successes(generator: np.random.Generator, trials: int, prob: float) -> Iterator[npt.NDArray[np.int64]]:
    """Sorted positions of the successes among independent trials of probability `prob`, in pieces.

    Trials whose successes are a geometric number apart are independent with probability `prob`, exactly. With E
    exponential, ceil(E / -log(1 - prob)) is geometric, as P[E > -k log(1 - prob)] = (1 - prob)^k; in float64 the
    probability of a trial is off by 2e-16 at most. The k-th gap is made of the k-th exponential number, so `trials` and
    the chunks change nothing but the end.
    """
    rate = max(-math.log1p(-prob), _SLOWEST) if prob < 1 else math.inf
    start = 0
    while start < trials:
        expected = (trials - start) * prob
        size = math.ceil(min(_CHUNK, expected + 4 * math.sqrt(expected) + 16))
        gaps = np.ceil(generator.standard_exponential(size) / rate)
        # An exponential number that is 0 in float64 is a gap of 1; what leads beyond the end need not be exact.
        positions = start - 1 + np.cumsum(np.clip(gaps, 1, trials + 1).astype(np.int64))
        yield positions[: np.searchsorted(positions, trials)]
        start = int(positions[-1]) + 1
