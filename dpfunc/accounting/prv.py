"""Numerical composition of privacy loss random variables, by opacus, where its grid fits and its float64 suffices."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable

from dpfunc.accounting.rdp import rdp_epsilon
from dpfunc.types import Event

SMALLEST_DELTA = 1e-9  # below, FFT rounding puts the "upper bound" under the truth
LARGEST_GRID = 2**22
LARGEST_NUM_GROUPS = 32
ROUNDING = 1.002  # ratio of the grid to which long schedules are rounded, towards more epsilon


class NotApplicable(Exception):
    """PRV cannot answer, and why; callers turn it into a note or an error."""


def eps_error(rdp: float) -> float:
    """The error that is asked for: 2 % of a first bound, within 1e-4..0.01."""
    return min(max(0.02 * rdp, 1e-4), 0.01)


def merge(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """At most a few dozen groups: sigma rounded down and q up on a geometric grid when there are more."""
    if len(events) <= LARGEST_NUM_GROUPS:
        return events
    step = math.log(ROUNDING)
    counts: Counter[tuple[float, float]] = Counter()
    for event in events:
        sigma = math.exp(math.floor(math.log(event.noise_multiplier) / step) * step)
        q = min(1.0, math.exp(math.ceil(math.log(event.sampling_prob) / step) * step))
        counts[q, min(sigma, event.noise_multiplier)] += event.num_steps
    return tuple(Event(q, sigma, steps) for (q, sigma), steps in counts.items())


def prv_epsilon(events: Iterable[Event], delta: float) -> float:
    """Upper bound on epsilon, above the truth by at most `eps_error` (0.01 or less).

    Gopi, Lee, Wutschitz 2021, Numerical Composition of Differential Privacy, Algorithm 1.

    Raises:
        NotApplicable: delta too small, grid too large, or opacus gave up.
    """
    if delta < SMALLEST_DELTA:
        raise NotApplicable(f"PRV needs delta >= {SMALLEST_DELTA:g}, below which float64 FFTs under-report")
    events = merge(tuple(events))
    error = eps_error(rdp_epsilon(events, delta))
    steps = sum(event.num_steps for event in events)
    # opacus's own recipe for the window and the mesh, evaluated beforehand with our orders (never above its own).
    window = max(rdp_epsilon(events, delta / 4000), error) + 3
    points = 2 * window * math.sqrt(steps * math.log(12000 / delta) / 2) / error
    if not points <= LARGEST_GRID:
        raise NotApplicable(f"PRV would need a grid of {points:.2g} points")
    try:
        value = _opacus(events, delta, error)
    except (ValueError, RuntimeError, OverflowError, ZeroDivisionError, MemoryError) as failure:
        raise NotApplicable(f"opacus's PRV failed ({failure})") from failure
    if not (math.isfinite(value) and value >= 0):
        raise NotApplicable(f"opacus's PRV returned {value}")
    return value


def _opacus(events: tuple[Event, ...], delta: float, error: float) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of third parties: overflow in tails that have no mass, optimal order at an end
        from opacus.accountants import PRVAccountant

        accountant = PRVAccountant()
        accountant.history = [(e.noise_multiplier, e.sampling_prob, e.num_steps) for e in events]
        return float(accountant.get_epsilon(delta, eps_error=error))
