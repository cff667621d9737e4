"""Kinds of events, the table of their names in files, and their laws, which accountants read.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

A kind is a frozen dataclass: `Event`, or a subclass of it with more fields. Its `law` are events that accountants know;
one that inherits the law of `Event`, which is the event itself, has a line in `_LOSSES` or `_CURVES`, or is refused. In
a ledger, events that differ in `num_steps` only are one, so n steps must cost what n times one step costs: what is
released as a whole, over many steps of a run, is one step of a kind whose fields describe all of it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dpfunc._utils.validation import below_one, checked, expect, non_negative, positive, real
from dpfunc.accounting._discrete import answers, discrete_gaussian, discrete_laplace, mixture
from dpfunc.accounting._gaussian import as_float
from dpfunc.accounting._losses import DIRECTIONS, UNBOUNDED, Array, Atoms, Direction, TiltedUnavailable, log_ratio, tilt
from dpfunc.accounting._pairs import CELLS, FINE_CELLS, LARGEST_LOSS, capped, epoch, laplace, stated
from dpfunc.accounting.mechanisms import (
    DiscreteGaussian,
    DiscreteLaplace,
    Exponential,
    MixtureOfGaussians,
    RandomizedResponse,
    Tree,
    WithoutNoise,
)
from dpfunc.types import Adjacency, Allocated, Capped, Event

_LEAST_NOISE = 1e-7  # less counts as none: its losses, up to 1 / (2 s^2), are beyond the grids


def _largest(name: str, value: object) -> float:
    """An epsilon whose exponential float64 holds."""
    return real(name, value, f"0 <= {name} <= {LARGEST_LOSS:g}", inside=lambda x: 0 <= x <= LARGEST_LOSS)


@dataclass(frozen=True, order=True)
class Laplace(Event):
    """Releases of one number with Laplace noise of scale `noise_multiplier` times the sensitivity; Poisson samples.

    Args:
        sampling_prob: chance of a record to take part. noise_multiplier: scale / how far one record moves the number
            that is added, removed or replaced, e.g. 1 of a count. num_steps: how many.

    Guarantees:
        tests/accounting/test_events.py::test_laplace_against_integration.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((Laplace(1.0, 2.0, 1),)).epsilon(1e-6).epsilon:.4f}")
    0.5000
    """


@dataclass(frozen=True, order=True)
@checked({"epsilon": _largest, "delta": below_one})
class Opaque(WithoutNoise):
    """Releases of which only this is known: each is (epsilon, delta)-private, for the neighbours of the ledger.

    Args:
        num_steps: how many. epsilon: of each, 0 <= epsilon <= 700. delta: of each, 0 <= delta < 1.

    Guarantees:
        tests/accounting/test_events.py::test_opaque_releases_compose_as_randomized_response.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((Opaque(1, epsilon=1.0, delta=1e-6),)).epsilon(2e-6).epsilon:.3f}")
    1.000
    """

    epsilon: float
    delta: float


@dataclass(frozen=True, order=True)
@checked({"rho": positive, "xi": non_negative})
class ZCDP(Event):
    """Releases that are (xi, rho)-zero-concentrated private, for the neighbours of the ledger; Bun and Steinke 2016.

    Args:
        num_steps: how many. rho: of each, > 0: the Renyi divergence of each order a is at most xi + rho a. xi: >= 0.
        sampling_prob: chance of a record to take part, on Poisson samples.

    Only `rdp` and `auto` can account for a ledger with one: nothing is known of its law but Renyi divergences.

    Guarantees:
        tests/accounting/test_events.py::test_zcdp_is_the_renyi_bound_of_a_gaussian;
        tests/accounting/test_mechanisms.py::test_sampled_zcdp_is_above_sampled_gaussians.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((ZCDP(1, rho=0.1),)).epsilon(1e-6).epsilon:.2f}")
    2.14
    """

    sampling_prob: float = field(default=1.0, kw_only=True)
    noise_multiplier: float = field(default=0.0, init=False)
    rho: float
    xi: float = 0.0


KINDS: dict[str, type[Event]] = {
    "": Event,
    "allocated": Allocated,
    "capped": Capped,
    "discrete_gaussian": DiscreteGaussian,
    "discrete_laplace": DiscreteLaplace,
    "exponential": Exponential,
    "laplace": Laplace,
    "mixture_of_gaussians": MixtureOfGaussians,
    "opaque": Opaque,
    "randomized_response": RandomizedResponse,
    "tree": Tree,
    "zcdp": ZCDP,
}
"""Name in files -> class. A new kind of event is a class, and a line here."""


class Losses(NamedTuple):
    """A law of losses: of one step, for neighbours in one order, by cells of which so many are a standard deviation.

    The finite ones of a pure release are bounded. Noise below `least` counts as none.
    """

    of: Callable[[Any, Direction, int], Atoms]
    pure: bool = False
    least: float = _LEAST_NOISE


_LOSSES: Mapping[type, Losses] = {
    Allocated: Losses(lambda e, d, _: epoch(e.num_batches, e.noise_multiplier, d)),
    Capped: Losses(
        lambda e, d, cells: capped(e.sampling_prob, e.noise_multiplier, e.dataset_size, e.cap, d, cells),
        least=0.08,  # of less noise float64 cannot hold the exponentials of losses
    ),
    Laplace: Losses(lambda e, d, cells: laplace(e.sampling_prob, e.noise_multiplier, d, cells), pure=True),
    DiscreteGaussian: Losses(
        lambda e, d, _: discrete_gaussian(e.sampling_prob, e.noise_multiplier * e.sensitivity, e.sensitivity, d),
        least=0.04,
    ),
    DiscreteLaplace: Losses(
        lambda e, d, _: discrete_laplace(e.sampling_prob, e.noise_multiplier * e.sensitivity, e.sensitivity, d),
        pure=True,
    ),
    Exponential: Losses(lambda e, d, _: stated(e.epsilon, 0.0), pure=True),
    MixtureOfGaussians: Losses(lambda e, d, cells: mixture(e.noise_multiplier, e.distances, e.probs, d, cells)),
    Opaque: Losses(lambda e, d, _: stated(e.epsilon, e.delta), pure=True),
    RandomizedResponse: Losses(lambda e, d, _: answers(e.noise, e.num_answers), pure=True),
}
# Class of an event -> its Renyi curve, of those without a law of losses, and where it is below that of the law.
_CURVES: Mapping[type, Callable[[Any, Array], Array]] = {
    ZCDP: lambda e, orders: sampled_curve(e.sampling_prob, e.xi + e.rho * orders, orders),
    Exponential: lambda e, orders: np.minimum(e.epsilon**2 / 8 * orders, e.epsilon),
}

GAUSSIAN, LOSSES, RENYI = "a Gaussian step", "a law of losses", "a Renyi curve"


def law_kind(event: Event) -> str:
    """Name the form in which the law of an event is known: `GAUSSIAN`, `LOSSES` or `RENYI`."""
    if type(event) is Event:
        return GAUSSIAN
    expect(type(event) in {*_LOSSES, *_CURVES}, "a law of events that accountants know", "event", event)
    return LOSSES if type(event) in _LOSSES else RENYI


def divided(events: Iterable[Event]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Plain Poisson-sampled Gaussian steps of a law, and those of the kinds of this file."""
    parts: tuple[list[Event], list[Event]] = [], []
    for event in events:
        parts[law_kind(event) != GAUSSIAN].append(event)
    return tuple(parts[0]), tuple(parts[1])


def law_of(event: Event, direction: Direction, fine: bool = False) -> Atoms:
    """Losses that dominate those of one step; `fine`: by many more cells."""
    if law_kind(event) == RENYI:
        raise TiltedUnavailable(f"Expected a law of losses, got a Renyi curve, {event!r}. Use method 'rdp'.")
    if event.noise_multiplier < _LOSSES[type(event)].least and not isinstance(event, WithoutNoise):
        return UNBOUNDED
    return _LOSSES[type(event)].of(event, direction, FINE_CELLS if fine else CELLS)


def largest_loss(events: tuple[Event, ...], adjacency: Adjacency) -> tuple[float, float]:
    """Probability of an infinite loss of all events together, and the largest finite one, of the costlier order.

    At a delta of this probability epsilon is this loss, which is infinite where a kind is not pure. Both are rounded.
    """
    given = [event for event in events if law_kind(event) == LOSSES]
    pure = len(given) == len(events) and all(_LOSSES[type(event)].pure for event in given)
    lost, worst = 0.0, 0.0
    for direction in DIRECTIONS[adjacency]:
        laws = [(as_float(event.num_steps), law_of(event, direction)) for event in given]
        with np.errstate(divide="ignore"):
            lost = max(lost, -math.expm1(math.fsum(steps * float(np.log1p(-law.infinite)) for steps, law in laws)))
        worst = max(worst, math.fsum(steps * float(np.max(law.loss, initial=0.0)) for steps, law in laws))
    return lost, worst if pure else math.inf


def has_both(event: Event) -> bool:
    """True if a Renyi curve is known that may give a tighter bound than the law of losses."""
    return type(event) in _LOSSES and type(event) in _CURVES


def sampled_curve(q: float, curve: Array, orders: Array) -> Array:
    """The Renyi curve of a release on a Poisson sample: `e^((a - 1) D_a)` is jointly convex, for all neighbours."""
    return np.asarray(log_ratio(q, (orders - 1) * curve) / (orders - 1) * (1 + 1e-12))


def curve_of(event: Event, directions: Iterable[Direction], orders: Array) -> Array:
    """The Renyi curve of one step, apart from infinite losses, at orders > 1; rounded up."""
    if type(event) in _CURVES:
        return _CURVES[type(event)](event, orders)
    laws = [law_of(event, direction) for direction in directions]
    if not all(law.mass.any() for law in laws):
        return np.full(len(orders), np.inf)
    logs = np.array([np.max([0.0, *(tilt(law, 1.0, a - 1).log_moment for law in laws)]) for a in orders])
    return np.asarray(logs / (orders - 1) * (1 + 1e-12) + 1e-13)
