"""Kinds of events beside Poisson-sampled Gaussian steps, each with the laws of its privacy loss.

Accountants read the law of the loss of one step, for neighbours in one order: values that dominate it. Those that
samplers claim are in types.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpfunc._utils.validation import fail, non_negative, positive
from dpfunc.accounting._allocation import allocated
from dpfunc.accounting._losses import Array, Direction
from dpfunc.accounting._pairs import capped, laplace, renyi_curve, stated
from dpfunc.accounting._tilted_law import Atoms, TiltedUnavailable
from dpfunc.errors import InvalidArgument
from dpfunc.types import Allocated, Capped, Event

_LARGEST = 700.0  # e^700 fits into float64


@dataclass(frozen=True, order=True)
class Laplace(Event):
    """Releases of one number with Laplace noise of scale `noise_multiplier` times the sensitivity; Poisson samples.

    Args:
        sampling_prob: chance of a record to take part. noise_multiplier: scale / how far one record moves the number.
        num_steps: how many.

    Guarantees:
        tests/accounting/test_kinds.py::test_laplace_against_integration.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((Laplace(1.0, 2.0, 1),)).epsilon(1e-6).epsilon:.4f}")
    0.5000
    """

    def law(self) -> tuple[Event, ...]:
        """Itself: accountants read `law_of`."""
        return (self,)


@dataclass(frozen=True, order=True)
class Opaque(Event):
    """Releases of which only this is known: each is (epsilon, delta)-private, for the neighbours of the ledger.

    Args:
        num_steps: how many. epsilon: of each, 0 <= epsilon <= 700. delta: of each, 0 <= delta < 1.

    Guarantees:
        tests/accounting/test_kinds.py::test_opaque_releases_compose_as_randomized_response.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((Opaque(1, epsilon=1.0, delta=1e-6),)).epsilon(2e-6).epsilon:.3f}")
    1.000
    """

    sampling_prob: float = field(default=1.0, init=False)
    noise_multiplier: float = field(default=0.0, init=False)  # as a Gaussian it would protect nothing
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "epsilon", non_negative("epsilon", self.epsilon))
        object.__setattr__(self, "delta", non_negative("delta", self.delta))
        if self.epsilon > _LARGEST:
            raise fail(f"epsilon <= {_LARGEST:g}", "epsilon", self.epsilon)
        if self.delta >= 1:
            raise fail("0 <= delta < 1", "delta", self.delta)

    def law(self) -> tuple[Event, ...]:
        """Itself: accountants read `law_of`."""
        return (self,)


@dataclass(frozen=True, order=True)
class ZCDP(Event):
    """Releases that are rho-zero-concentrated private, for the neighbours of the ledger; Bun and Steinke 2016.

    Args:
        num_steps: how many. rho: of each, > 0: the Renyi divergence of each order a is at most rho a.

    Only `rdp` and `auto` can account for a ledger with one: nothing is known of its law but Renyi divergences.

    Guarantees:
        tests/accounting/test_kinds.py::test_zcdp_is_the_renyi_bound_of_a_gaussian.

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((ZCDP(1, rho=0.1),)).epsilon(1e-6).epsilon:.2f}")
    2.14
    """

    sampling_prob: float = field(default=1.0, init=False)
    noise_multiplier: float = field(default=0.0, init=False)
    rho: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rho", positive("rho", self.rho))

    def law(self) -> tuple[Event, ...]:
        """Itself: accountants read `law_of`."""
        return (self,)


_LAWS: Mapping[type, Callable[[Any, Direction], Atoms]] = {
    Allocated: lambda e, d: allocated(e.num_batches, e.noise_multiplier, d),
    Capped: lambda e, d: capped(e.sampling_prob, e.noise_multiplier, e.dataset_size, e.cap, d),
    Laplace: lambda e, d: laplace(e.sampling_prob, e.noise_multiplier, d),
    Opaque: lambda e, d: stated(e.epsilon, e.delta),
}
"""Class of an event -> law of the loss of one step, for neighbours in one order."""


def divided(events: Iterable[Event]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Plain Poisson-sampled Gaussian steps of a law, and those of the kinds of this file."""
    found: tuple[list[Event], list[Event]] = [], []
    for event in events:
        if type(event) not in (Event, ZCDP, *_LAWS):
            raise fail("a law of events that accountants know", "event", event)
        found[type(event) is not Event].append(event)
    return tuple(found[0]), tuple(found[1])


def as_wholes(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The same steps, with each allocated epoch as one release of all records, which costs at least as much."""
    return tuple(Event(1.0, e.noise_multiplier, e.num_steps) if isinstance(e, Allocated) else e for e in events)


def law_of(event: Event, direction: Direction) -> Atoms:
    """Losses that dominate those of one step.

    Raises:
        TiltedUnavailable: of zCDP, of which only Renyi divergences are known.
    """
    if isinstance(event, ZCDP):
        raise TiltedUnavailable("zCDP bounds Renyi divergences, and no law of losses. Use method 'rdp'.")
    return _LAWS[type(event)](event, direction)


def lost(special: Iterable[Event], directions: Iterable[Direction]) -> float:
    """Bound on the delta of infinite losses of all steps: no epsilon makes it smaller."""
    known = [event for event in special if not isinstance(event, ZCDP)]
    return max(math.fsum(event.num_steps * float(law_of(event, d).infinite) for event in known) for d in directions)


def curve_of(event: Event, directions: Iterable[Direction], orders: Array) -> Array:
    """The Renyi curve of one step, apart from infinite losses."""
    if isinstance(event, ZCDP):
        return event.rho * orders
    return np.asarray(np.maximum.reduce([renyi_curve(law_of(event, d), orders) for d in directions]))


def only_plain(events: Iterable[Event], method: str) -> None:
    """Refuse kinds of events for which a method is not made."""
    _, special = divided(events)
    if special:
        raise InvalidArgument(
            f"Expected Poisson-sampled Gaussian steps for method {method!r}, got {special[0]!r}. Use method 'auto'."
        )
