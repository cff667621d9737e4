"""Renyi differential privacy of a ledger: its curve at orders far enough out, and the conversion.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import functools
import math
from collections.abc import Iterable

import numpy as np

from dpfunc.accounting._gaussian import as_float
from dpfunc.accounting._losses import DIRECTIONS, Array, log_ratio, log_ratios
from dpfunc.accounting.events import curve_of, divided
from dpfunc.types import Adjacency, Event

# alpha - 1 grows by a tenth at most: the bound is flat around the best order, and loses < 0.2 % between two of them.
_FRACTIONS = tuple(1 + 0.005 * 1.1**k for k in range(80))
_INTEGERS = tuple(float(round(11 * 1.1**k)) for k in range(48))
ORDERS: tuple[float, ...] = tuple(sorted({*_FRACTIONS, *_INTEGERS, 1024.0}))
FEW_ORDERS: tuple[float, ...] = (1.05, 1.2, 1.5, *map(float, (2, 3, 4, 5, 6, 8, 11, 15, 20, 28, 40, 60, 90, 200, 500)))

SIGMA_MAX = 1e5  # more noise is accounted as this much: beyond it the curve drowns in rounding
_SIGMA_MIN = 0.02  # below it the closed bound is as good
_MAX_POINTS = 200_000  # of a quadrature
_REACH = 14.0  # standard deviations; the mass beyond is below 1e-43


def rdp_epsilon(
    events: Iterable[Event], adjacency: Adjacency, delta: float, orders: tuple[float, ...] = ORDERS
) -> float:
    """An upper bound on epsilon from the Renyi curve, >= 0.

    `min_a R(a) + log(1 - 1/a) - (log(delta) + log(a)) / (a - 1)`: Canonne, Kamath and Steinke 2020, The Discrete
    Gaussian for Differential Privacy, Proposition 12. Fewer orders: looser, and faster.
    """
    return converted(composed_curve(tuple(events), adjacency, orders), orders, delta)


def converted(curve: Array, orders: tuple[float, ...], delta: float) -> float:
    a = np.array(orders)
    return max(0.0, float(np.min(curve + np.log1p(-1 / a) - (np.log(delta) + np.log(a)) / (a - 1))))


def loss_tail(events: Iterable[Event], adjacency: Adjacency, prob: float, orders: tuple[float, ...] = ORDERS) -> float:
    """A level that the privacy loss exceeds with probability at most `prob`: `min_a R(a) + log(1/prob) / (a - 1)`."""
    return float(np.min(composed_curve(tuple(events), adjacency, orders) - math.log(prob) / (np.array(orders) - 1)))


def composed_curve(events: tuple[Event, ...], adjacency: Adjacency, orders: tuple[float, ...]) -> Array:
    """The Renyi divergences R(a) of all events together, inf where not finite."""
    total = np.zeros(len(orders))
    plain, special = divided(events)
    for event in plain:
        curve = np.array(step_curve(event.sampling_prob, event.noise_multiplier, adjacency == "replace_one", orders))
        total += as_float(event.num_steps) * curve
    for other in special:
        total += as_float(other.num_steps) * curve_of(other, DIRECTIONS[adjacency], np.array(orders))
    return np.where(np.isnan(total), np.inf, total)


@functools.lru_cache(maxsize=4096)
def step_curve(q: float, sigma: float, replace_one: bool, orders: tuple[float, ...]) -> tuple[float, ...]:
    """An upper bound on the Renyi divergence of one step at each order; rounded up by more than its rounding error."""
    a, sigma = np.array(orders), min(sigma, SIGMA_MAX)
    if q == 1.0 and sigma > 1e-150:
        return tuple((a / (2 * sigma * sigma)).tolist())
    if q == 1.0 or sigma == 0:
        return (math.inf,) * len(orders)
    curve = convexity_bound(q, sigma, a)
    if sigma >= _SIGMA_MIN:
        # how far the rounding of the logarithms in the sum can put it below the true one
        scale = a * (abs(math.log(q)) + abs(math.log1p(-q)) + 2 + a / (2 * sigma * sigma)) / (a - 1)
        exact = quadrature_curve(q, sigma, a, replace_one) + 8 * np.finfo(np.float64).eps * scale
        curve = np.where(exact < curve, exact, curve)  # where it is a number
    return tuple(curve.tolist())


def quadrature_curve(q: float, sigma: float, orders: Array, replace_one: bool) -> Array:
    """`log E_Q[(P/Q)^a] / (a - 1)` at each order a > 1, rounded up; NaN where it would take too many points.

    Remove one record: P = (1-q) N(0, s^2) + q N(1, s^2) against Q = N(0, s^2); to add one costs no more (Mironov,
    Talwar and Zhang 2019, Theorem 5). Replace one: P, Q = (1-q) N(0, s^2) + q N(+-1/2, s^2), which is symmetric.
    The integrand is analytic in a strip around the real line, so the trapezoidal rule converges geometrically:
    Trefethen and Weideman 2014, The Exponentially Convergent Trapezoidal Rule, Theorem 5.1.
    """
    from scipy.special import logsumexp

    step = min(sigma / 10, sigma * sigma / 2)  # the nearest singularity is at least pi s^2 off the line
    curve = np.full(len(orders), np.nan)
    for i, a in enumerate(orders):
        low, high = -0.5 - _REACH * sigma, a + _REACH * sigma  # P^a Q^(1-a) is a sum of bumps between -1/2 and a
        if (high - low) / step > _MAX_POINTS:
            continue
        x = np.arange(low, high, step)
        log_normal = -((x / sigma) ** 2) / 2 - np.log(sigma * np.sqrt(2 * np.pi) / step)
        ahead, behind = log_ratios(q, sigma, x, "replace" if replace_one else "remove")
        log_terms = log_normal + a * ahead - (a - 1) * behind
        curve[i] = np.maximum(0.0, logsumexp(log_terms)) / (a - 1) * (1 + 1e-12)
    return curve


def convexity_bound(q: float, sigma: float, a: Array) -> Array:
    """`log(1 - q + q e^((a - 1) a / (2 sigma^2))) / (a - 1)`, which holds under every adjacency.

    Both outputs are mixtures with the same weights, whose parts are at most one sensitivity apart, and
    `e^((a - 1) D_a)` is jointly convex: van Erven and Harremoes 2014, Theorem 11 and 13.
    """
    with np.errstate(over="ignore"):
        exponent = (a - 1) * a / sigma / sigma / 2
    return np.asarray(log_ratio(q, exponent) / (a - 1) * (1 + 1e-12))
