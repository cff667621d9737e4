"""Tight upper bound on epsilon: discrete losses that dominate, composed by Fourier sums whose errors only add.

For neighbours in one order, with L the privacy loss of all steps together,

    delta(epsilon) = E_P[(1 - e^(epsilon - L))_+].

Law (_tilted_law.py): each step's loss gets a law of few values that dominates its own. Composition (_tilted_sum.py):
the delta of the sum of all losses, from above. Bound (here): the least epsilon whose delta is small enough, in rounds
that choose better parameters (_tilted_aim.py). Whatever these are, every approximation is on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dpfunc.accounting import _tilted_aim as aims
from dpfunc.accounting._gaussian import as_float
from dpfunc.accounting._losses import Direction, above, part_masses, point
from dpfunc.accounting._search import falling_root
from dpfunc.accounting._tilted_law import Atoms, Fixed, Kind, Law, TiltedUnavailable, atoms, gaussian_part, tilt
from dpfunc.accounting._tilted_sum import compose

_MIN_DELTA, _MIN_SIGMA, _MAX_SIGMA, _MIN_PROB = 1e-200, 0.05, 1e4, 1e-12
_MAX_STEPS = 10**11
_MAX_ROUNDS = 8
_KINKED, _GAIN = 4.0, 4e-4  # where t epsilon is less, errors are divided by 8 until epsilon falls by less than that
_FINE = 1.0, 0.1  # of the usual errors in the first round, without and with given laws, which are often of few steps
_LARGEST_EPSILON = 700.0
_NONE: Mapping[Direction, Sequence[Fixed]] = {}


class _Bound(NamedTuple):
    """`epsilon` with delta(epsilon) <= delta, and `renyi`, about what a Renyi accountant would say (not a bound)."""

    epsilon: float
    renyi: float


def tilted_epsilon(
    kinds: Sequence[Kind],
    directions: Sequence[Direction],
    delta: float,
    fixed: Mapping[Direction, Sequence[Fixed]] = _NONE,
) -> _Bound:
    """Upper bound on epsilon of composed Poisson-sampled Gaussians, the larger of the directions.

    `fixed` are laws of other steps, for each direction; their infinite losses are not counted.
    """
    kinds = _within_domain(kinds, delta)
    if not fixed and len(kinds) == 1 and kinds[0][2] == 1 and kinds[0][0] < 1:
        q, sigma, _ = kinds[0]
        return _Bound(max(_one_step_epsilon(q, sigma, direction, delta) for direction in directions), math.inf)
    found = one_direction(kinds, directions[0], delta, fixed=fixed.get(directions[0], ()))
    for direction in directions[1:]:
        more = one_direction(kinds, direction, delta, found.epsilon, fixed.get(direction, ()))
        found = _Bound(max(found.epsilon, more.epsilon), found.renyi)
    return found


def rough_epsilon(kinds: Sequence[Kind], direction: Direction, delta: float, fixed: Sequence[Fixed] = ()) -> float:
    """Fast estimate of epsilon by Laplace's method, within some percent for many steps; not a bound."""
    kinds = _within_domain(kinds, delta)
    few, log_delta = aims.sampled_losses(kinds, direction, delta, 32, fixed), math.log(delta)
    return aims.laplace(few, aims.best_tilt(few, log_delta), log_delta)[0]


def _within_domain(kinds: Sequence[Kind], delta: float) -> list[Kind]:
    """The kinds, with more noise or less sampling than float64 can serve rounded to the costlier side; sorted."""
    steps = as_float(sum(count for _, _, count in kinds))
    smallest = min((sigma for q, sigma, _ in kinds if q < 1), default=1.0)
    mu2 = gaussian_part(kinds)
    for served, domain, found in (
        (_MIN_DELTA <= delta < 1, f"delta >= {_MIN_DELTA:g}", f"delta={delta:g}"),
        (steps <= _MAX_STEPS, f"at most {_MAX_STEPS:g} steps", f"{steps:.4g}"),
        (smallest >= _MIN_SIGMA, f"noise multipliers >= {_MIN_SIGMA:g}", f"{smallest:g}"),
        (mu2 < 1e12, "sum(T / sigma^2) < 1e12 of the steps without sampling", f"{mu2:g}"),
    ):
        if not served:
            raise TiltedUnavailable(f"Expected {domain} for method 'tilted', got {found}. Use method 'rdp'.")
    return sorted((max(q, _MIN_PROB), min(sigma, _MAX_SIGMA) if q < 1 else sigma, count) for q, sigma, count in kinds)


def _one_step_epsilon(q: float, s: float, direction: Direction, delta: float) -> float:
    """Epsilon of a single step, by its closed form, rounded up."""

    def excess(epsilon: float) -> float:
        return one_step_delta(q, s, direction, epsilon) / delta - 1

    if excess(0.0) <= 0:
        return 0.0
    high = -math.log1p(-q) if direction == "add" else 1.0
    while excess(high) > 0:
        high *= 2
        if high > _LARGEST_EPSILON:
            raise TiltedUnavailable(f"epsilon is above {_LARGEST_EPSILON:g}, where e^epsilon cannot be computed")
    return falling_root(excess, 0.0, high, rtol=1e-12) * (1 + 1e-8)


def one_step_delta(q: float, s: float, direction: Direction, epsilon: float) -> float:
    """`P(L > epsilon) - e^epsilon Q(L > epsilon)` of a single step."""
    x = point(q, s, np.array([epsilon]), direction)
    if not np.isfinite(x[0]):
        return 0.0
    return float(above(q, s, x, part_masses(s, np.append(x, np.inf), direction), direction)[0])


def one_direction(
    kinds: Sequence[Kind], direction: Direction, delta: float, floor: float = 0.0, fixed: Sequence[Fixed] = ()
) -> _Bound:
    """The bound for neighbours in one order; not below `floor`, which the other order has already cost.

    Each round chooses parameters for an epsilon, and bounds it, until they were made for about the one that was found.
    """
    log_delta = math.log(delta)
    few = aims.sampled_losses(kinds, direction, delta, 32, fixed)
    t = aims.best_tilt(few, log_delta)
    base = aims.sampled_losses(kinds, direction, delta, 0, fixed)
    renyi = 0.0 if floor else max(0.0, aims.renyi_estimate(base, t, log_delta))
    about, t = aims.laplace(few, t, log_delta)
    slope = t
    best, fine = math.inf, _FINE[bool(fixed)]
    for _ in range(_MAX_ROUNDS):
        aim = aims.make_aim(few, about, slope, t, log_delta, fine)
        found, steepness = compose(discrete_laws(base, aim), base, aim, delta, floor)
        gain, best = best - found, min(best, found)
        settled = abs(about - best) <= 0.05 * best and abs(math.log(steepness / slope)) < 0.4
        if best <= floor or (settled and (t * best > _KINKED or (fine < 1 and gain < _GAIN * best))):
            break
        fine /= 8 if settled else 1
        about, slope = best, steepness
        t = aims.saddle(few, about)
    return _Bound(best, renyi)


def discrete_laws(base: aims.Sampled, aim: aims.Aim) -> list[Law]:
    """The tilted law of each kind on its cells."""
    laws = [tilt(Atoms(law.mass, law.loss, np.zeros(())), float(steps), aim.tilt) for steps, law in base.fixed]
    ends = aims.choose_ends(base, aim) if len(base.steps) else []
    lengths = np.array([len(some) for some in ends])
    for length in np.unique(lengths):  # as arrays, for speed
        alike = np.flatnonzero(lengths == length)
        q, s, x = base.q[alike, None], base.sigma[alike, None], np.stack([ends[i] for i in alike])
        found = atoms(q, s, x, base.direction)
        for mass, loss, infinite, steps in zip(found.mass, found.loss, found.infinite, base.steps[alike], strict=True):
            laws.append(tilt(Atoms(mass, loss, infinite), float(steps), aim.tilt))
    return sorted(laws, key=lambda law: -law.variance)
