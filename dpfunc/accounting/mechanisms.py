"""Kinds of events of releases that are no sums of gradients: discrete noise, choices, and sums over a tree.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from dpfunc._utils.validation import checked, count, each, expect, non_negative, positive, unit_interval
from dpfunc.types import Adjacency, Event

_MOST_NOISE = 1e5  # all outputs of discrete Gaussian noise are listed
_MOST_SENSITIVITY = 10**7  # and those between two neighbours


def _sensitivity(name: str, value: object) -> int:
    number = count(name, value)
    expect(number <= _MOST_SENSITIVITY, f"{name} <= {_MOST_SENSITIVITY}", name, value, "Count in larger units.")
    return number


@dataclass(frozen=True, order=True)
class WithoutNoise(Event):
    """Releases to which no noise is added: their law follows from other fields."""

    sampling_prob: float = field(default=1.0, init=False)
    noise_multiplier: float = field(default=0.0, init=False)


@dataclass(frozen=True, order=True)
@checked({"sensitivity": _sensitivity})
class DiscreteGaussian(Event):
    """Releases of an integer with discrete Gaussian noise, `P[x] ~ e^(-x^2 / (2 s^2))`; Poisson samples.

    Args:
        sampling_prob, num_steps: as of `Event`; replaced records have no amplification. noise_multiplier: s / k, where
            s <= 1e5.
        sensitivity: the most that one record moves the integer, k >= 1.

    Canonne, Kamath and Steinke 2020, The Discrete Gaussian for Differential Privacy.

    Guarantees:
        tests/accounting/test_mechanisms.py::test_discrete_noise_against_sums.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((DiscreteGaussian(1.0, 2.0, 1, sensitivity=3),)).epsilon(1e-6).epsilon:.4f}")
    2.2569
    """

    sensitivity: int = 1

    def __post_init__(self) -> None:
        deviation = self.noise_multiplier * self.sensitivity
        expect(deviation <= _MOST_NOISE, f"noise_multiplier * sensitivity <= {_MOST_NOISE:g}", "the product", deviation)


@dataclass(frozen=True, order=True)
@checked({"sensitivity": _sensitivity})
class DiscreteLaplace(Event):
    """Releases of an integer with discrete Laplace noise, `P[x] ~ e^(-|x| / b)`; Poisson samples.

    Args:
        sampling_prob, num_steps: as of `Event`; replaced records have no amplification. noise_multiplier: b / k.
        sensitivity: the most that one record moves the integer, k >= 1.

    Ghosh, Roughgarden and Sundararajan 2009, Universally Utility-Maximizing Privacy Mechanisms.

    Guarantees:
        tests/accounting/test_mechanisms.py::test_discrete_noise_against_sums, ::test_figures_of_a_peer.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((DiscreteLaplace(1.0, 1.0, 3),)).epsilon(0.0).epsilon:.4f}")
    3.0000
    """

    sensitivity: int = 1


@dataclass(frozen=True, order=True)
@checked({"noise": unit_interval, "num_answers": count})
class RandomizedResponse(WithoutNoise):
    """Releases of one of `num_answers` answers: the true one, or with probability `noise` a uniform one.

    Args:
        num_steps: how many. noise: 0 <= noise <= 1; 0 protects nothing. num_answers: >= 1.

    Only for zero-out and replace-one neighbours: an answer is there in both data sets. Warner 1965.

    Guarantees:
        tests/accounting/test_mechanisms.py::test_figures_of_a_peer.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((RandomizedResponse(1, noise=0.5, num_answers=4),), 'replace_one').epsilon(0.0).epsilon:.4f}")
    1.6094
    """

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("zero_out", "replace_one")  # of a ledger that may have it
    noise: float
    num_answers: int

    def law(self) -> tuple[Event, ...]:
        """Itself; nothing where the answer is known before, or is noise alone."""
        return (self,) if self.num_answers > 1 and self.noise < 1 else ()


@dataclass(frozen=True, order=True)
@checked({"epsilon": positive})
class Exponential(WithoutNoise):
    """Releases of a choice by the exponential mechanism, `P[y] ~ e^(epsilon score(y) / (2 sensitivity))`.

    Args:
        num_steps: how many. epsilon: of each, > 0.

    Each is epsilon-private, and its Renyi divergence of order a is at most `epsilon^2 a / 8`: Rogers and Steinke 2021,
    A Better Privacy Analysis of the Exponential Mechanism. So `auto` answers with the smaller of both bounds.

    Guarantees:
        tests/accounting/test_mechanisms.py::test_choices_are_bounded_both_ways.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((Exponential(100, epsilon=0.1),)).epsilon(1e-6).epsilon:.2f}")
    2.42
    """

    epsilon: float


_tuple_of = partial(each, domain="a tuple of numbers", kinds=(tuple, list), least=0)


@dataclass(frozen=True, order=True)
@checked({"distances": _tuple_of(non_negative), "probs": _tuple_of(unit_interval)})
class MixtureOfGaussians(Event):
    """Releases that a record moves by a random distance: `sum_i p_i N(c_i, s^2)` against `N(0, s^2)`.

    Args:
        noise_multiplier: s, in the unit of the distances. num_steps: how many.
        distances: c_i >= 0. probs: p_i >= 0, which sum to 1.

    Choquette-Choo et al. 2024, Privacy Amplification for Matrix Mechanisms, arXiv 2310.15526.

    Guarantees:
        tests/accounting/test_mechanisms.py::test_mixtures_of_gaussians, ::test_figures_of_a_peer.

    >>> from dpfunc.accounting import Ledger
    >>> event = MixtureOfGaussians(2.0, 5, distances=(0.0, 1.0, 2.0), probs=(0.9, 0.05, 0.05))
    >>> print(f"{Ledger((event,)).epsilon(1e-6).epsilon:.3f}")
    2.049
    """

    sampling_prob: float = field(default=1.0, init=False)
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove", "zero_out")  # of a ledger that may have it
    distances: tuple[float, ...]
    probs: tuple[float, ...]

    def __post_init__(self) -> None:
        number, probs = len(self.distances), self.probs
        fitting = number == len(probs) and abs(math.fsum(probs) - 1) <= 1e-12
        expect(fitting, f"{number} probabilities that sum to 1, one for each distance", "probs", probs)


@dataclass(frozen=True, order=True)
@checked({"num_leaves": count})
class Tree(Event):
    """Releases of all prefix sums of `num_leaves` steps by a binary tree, each record in one step: one epoch.

    Args:
        noise_multiplier: of each node / sensitivity of one step. num_steps: number of trees. num_leaves: >= 1.

    A record is in `ceil(log2(num_leaves + 1))` nodes: Kairouz et al. 2021, Practical and Private (Deep) Learning
    without Sampling or Shuffling, Theorem 1.

    Guarantees:
        tests/accounting/test_mechanisms.py::test_figures_of_a_peer.

    >>> Tree(4.0, 1, num_leaves=7).law()
    (Event(sampling_prob=1.0, noise_multiplier=4.0, num_steps=3),)
    """

    sampling_prob: float = field(default=1.0, init=False)
    num_leaves: int

    def law(self) -> tuple[Event, ...]:
        """One Gaussian step for each node that a record is in."""
        return (Event(1.0, self.noise_multiplier, self.num_steps * self.num_leaves.bit_length()),)
