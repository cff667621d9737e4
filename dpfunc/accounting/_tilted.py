"""Tight upper bound on epsilon: discrete losses that dominate, composed by Fourier sums whose errors only add.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

For neighbours in one order, with L the privacy loss of all steps together,

    delta(epsilon) = E_P[(1 - e^(epsilon - L))_+].

Each step's loss gets a law of few values that dominates its own (_losses.py). The least epsilon whose delta is small
enough is found in rounds that choose better parameters (_tilted_aim.py): whatever these are, every approximation is on
the safe side. For K(z) = sum_i T_i log E e^(z L_i) of the discrete losses, and z = t + i s on a line with t > 0,

    delta(epsilon) = 1/(2 pi) int e^(K(z) - z epsilon) / (z (1 + z)) ds.

1. A Gaussian release with a tiny mu is added. It cannot lower delta, and its factor e^(-mu^2 s^2 / 2) makes the
   integral end. Events without sampling are Gaussians, too.
2. A sum with spacing D is `sum_k e^(2 pi k t / D) delta(epsilon + 2 pi k / D)` over all integers k (Poisson summation):
   the wanted term and others that are not negative.
3. Dropped frequencies count by a bound on their absolute value, as |E e^(i s L)| <= 1 for every further kind.
4. Rounding, which the tilt makes relative to delta, counts as an estimate of its size, times a large factor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpfunc.accounting import _losses as losses
from dpfunc.accounting import _tilted_aim as aims
from dpfunc.accounting._gaussian import as_float
from dpfunc.accounting._lattice import lattice_epsilon, lattice_law
from dpfunc.accounting._losses import (
    ULP,
    Array,
    Atoms,
    Direction,
    Fixed,
    Kind,
    Law,
    TiltedUnavailable,
    delta_curve,
)
from dpfunc.accounting._search import falling_root

LEAST_DELTA = 1e-200
_MIN_SIGMA, _MAX_SIGMA, _MIN_PROB = 0.05, 1e4, 1e-12
_MAX_STEPS = 10**11
_MAX_ROUNDS = 8
_KINKED, _GAIN = 4.0, 4e-4  # where t epsilon is less, errors are divided by 8 until epsilon falls by less than that
_FINE = 1.0, 0.1  # of the usual errors in the first round, without and with given laws, which are often of few steps
_LARGEST_EPSILON = 700.0
_SMOOTH_ERROR = 1e-5  # relative to epsilon
_MAX_FREQUENCIES = 2**18
_CURVE_ERROR, _CURVE_POINTS = 2e-6, 2**19  # of a lattice; the error is relative to epsilon
_CURVE_FINE = 0.1  # of a line of integration, as in _FINE
_TINY = 1e-12  # smaller deltas are those of a line


class _Bound(NamedTuple):
    """`epsilon` with delta(epsilon) <= delta, and `renyi`, about what a Renyi accountant would say (not a bound)."""

    epsilon: float
    renyi: float


def tilted_epsilon(
    kinds: Sequence[Kind],
    directions: Sequence[Direction],
    delta: float,
    fixed: Mapping[Direction, Sequence[Fixed]] | None = None,
    finer: Mapping[Direction, Sequence[Fixed]] | None = None,
) -> _Bound:
    """The larger bound of the directions; `fixed` are laws of other steps, whose infinite losses are not counted.

    With `finer`, laws of the same steps with smaller errors, the bound is computed once more on a lattice.
    """
    kinds = _within_domain(kinds, delta)
    if not fixed and len(kinds) == 1 and kinds[0][2] == 1 and kinds[0][0] < 1:
        q, sigma, _ = kinds[0]
        return _Bound(max(_one_step_epsilon(q, sigma, direction, delta) for direction in directions), math.inf)
    bound = _Bound(0.0, 0.0)
    for direction in directions:
        last = None if finer is None else finer.get(direction, ())
        more = one_direction(kinds, direction, delta, bound.epsilon, (fixed or {}).get(direction, ()), last)
        bound = _Bound(max(bound.epsilon, more.epsilon), max(bound.renyi, more.renyi))
    return bound


def estimated_epsilon(kinds: Sequence[Kind], direction: Direction, delta: float, fixed: Sequence[Fixed] = ()) -> float:
    """Fast estimate of epsilon by Laplace's method, within some percent for many steps; not a bound."""
    kinds = _within_domain(kinds, delta)
    coarse, log_delta = aims.loss_table(kinds, direction, delta, 32, fixed), math.log(delta)
    return aims.laplace(coarse, aims.best_tilt(coarse, log_delta), log_delta)[0]


def estimated_delta(kinds: Sequence[Kind], direction: Direction, epsilon: float, fixed: Sequence[Fixed]) -> float:
    """Fast estimate of delta by Laplace's method, in the domain of this accountant; not a bound."""
    coarse = aims.loss_table(_within_domain(kinds, LEAST_DELTA), direction, LEAST_DELTA, 32, fixed)
    t = aims.saddle(coarse, epsilon)
    return min(max(math.exp(min(aims.log_integral(coarse, t) - t * epsilon, 0.0)), LEAST_DELTA), 0.5)


def _within_domain(kinds: Sequence[Kind], delta: float) -> list[Kind]:
    """The kinds, with more noise or less sampling than float64 can serve rounded to the costlier side; sorted."""
    steps = as_float(sum(count for _, _, count in kinds))
    smallest = min((sigma for q, sigma, _ in kinds if q < 1), default=1.0)
    mu2 = losses.gaussian_part(kinds)
    for served, domain, given in (
        (LEAST_DELTA <= delta < 1, f"delta >= {LEAST_DELTA:g}", f"delta={delta:g}"),
        (steps <= _MAX_STEPS, f"at most {_MAX_STEPS:g} steps", f"{steps:.4g}"),
        (smallest >= _MIN_SIGMA, f"noise multipliers >= {_MIN_SIGMA:g}", f"{smallest:g}"),
        (mu2 < 1e12, "sum(T / sigma^2) < 1e12 of the steps without sampling", f"{mu2:g}"),
    ):
        if not served:
            raise TiltedUnavailable(f"Expected {domain} for method 'tilted', got {given}. Use method 'rdp'.")
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
    x = losses.point(q, s, np.array([epsilon]), direction)
    if not np.isfinite(x[0]):
        return 0.0
    return float(losses.above(q, s, x, losses.part_masses(s, np.append(x, np.inf), direction), direction)[0])


def one_direction(
    kinds: Sequence[Kind], direction: Direction, delta: float, floor: float = 0.0, fixed: Sequence[Fixed] = (),
    finer: Sequence[Fixed] | None = None,
) -> _Bound:  # fmt: skip
    """The bound for neighbours in one order; not below `floor`, which the other order has already cost."""
    log_delta = math.log(delta)
    coarse = aims.loss_table(kinds, direction, delta, 32, fixed)
    t = aims.best_tilt(coarse, log_delta)
    table = aims.loss_table(kinds, direction, delta, 0, fixed)
    renyi = 0.0 if floor else max(0.0, aims.renyi_estimate(table, t, log_delta))
    about, t = aims.laplace(coarse, t, log_delta)
    slope = t
    best, fine = math.inf, _FINE[bool(fixed)]
    for _ in range(_MAX_ROUNDS):  # until parameters were chosen for about the epsilon that was found
        aim = aims.make_aim(coarse, about, slope, t, log_delta, fine)
        epsilon, steepness = compose(discrete_laws(table, aim), table, aim, delta, floor)
        gain, best = best - epsilon, min(best, epsilon)
        settled = abs(about - best) <= 0.05 * best and abs(math.log(steepness / slope)) < 0.4
        if best <= floor or (
            settled
            and ((not fixed and t * best > _KINKED) or (fine < 1 and gain < _GAIN * max(best, 0.01 / steepness)))
        ):
            break
        fine /= 8 if settled else 1
        about, slope = best, steepness
        t = aims.saddle(coarse, about)
    if finer is not None and best > floor:
        aim = aims.make_aim(coarse, best, steepness, aims.saddle(coarse, best), log_delta)
        best = min(best, lattice_epsilon(replace(table, fixed=finer), aim, delta))
    return _Bound(best, renyi)


def curve_near(
    kinds: Sequence[Kind], direction: Direction, delta: float, fixed: Sequence[Fixed], at: float | None = None
) -> Callable[[float], float]:
    """Delta of all steps as a function of epsilon >= 0: a bound, hardly above it for deltas from the given one on.

    Infinite losses of given laws are not counted. It is that of a law on a lattice; or, where a lattice would be too
    large or deltas are tiny, of one line of integration, which is chosen for the epsilon `at` if that is known.
    """
    kinds, log_delta = _within_domain(kinds, delta), math.log(delta)
    coarse = aims.loss_table(kinds, direction, delta, 32, fixed)
    about, t = aims.laplace(coarse, aims.best_tilt(coarse, log_delta), log_delta)
    table = aims.loss_table(kinds, direction, delta, 0, fixed)
    if delta >= _TINY:
        gentle = min(t, (1 - 2 * log_delta) / about)  # a steeper one makes the rounding of smaller losses large
        aim = aims.make_aim(coarse, about, gentle, gentle, log_delta)
        law = lattice_law(table, aim, delta, _CURVE_ERROR, _CURVE_POINTS)
        if len(law.mass):
            return delta_curve(law)
    if at is not None:
        about = at
        t = aims.saddle(coarse, at)
    aim = aims.make_aim(coarse, about, t, t, log_delta, _CURVE_FINE)
    aim = replace(aim, period=2 * aim.period)  # for smaller epsilons, too
    log_bound, infinite = log_delta_of(discrete_laws(table, aim), table, aim, delta)
    return lambda epsilon: infinite + math.exp(min(log_bound(epsilon), 0.0))


def discrete_laws(table: aims.LossTable, aim: aims.Aim) -> list[Law]:
    laws = [losses.tilt(Atoms(law.mass, law.loss, np.zeros(())), float(steps), aim.tilt) for steps, law in table.fixed]
    ends = aims.choose_ends(table, aim) if len(table.steps) else []
    lengths = np.array([len(some) for some in ends])
    for length in np.unique(lengths):  # as arrays, for speed
        alike = np.flatnonzero(lengths == length)
        q, s, x = table.q[alike, None], table.sigma[alike, None], np.stack([ends[i] for i in alike])
        atoms = losses.atoms(q, s, x, table.direction)
        for mass, loss, infinite, steps in zip(atoms.mass, atoms.loss, atoms.infinite, table.steps[alike], strict=True):
            laws.append(losses.tilt(Atoms(mass, loss, infinite), float(steps), aim.tilt))
    return sorted(laws, key=lambda law: -law.variance)


def compose(laws: list[Law], table: aims.LossTable, aim: aims.Aim, delta: float, floor: float) -> tuple[float, float]:
    """The least epsilon, up to 1e-9, at which the bound on delta is at most `delta`, or `floor`: (epsilon, slope)."""
    log_bound, infinite = log_delta_of(laws, table, aim, delta)
    target = math.log(delta - infinite) - 2 * ULP
    epsilon = _least_epsilon(log_bound, target, aim.epsilon, aim.tilt, floor)
    step = 1e-3 * epsilon
    slope = (log_bound(epsilon - step) - log_bound(epsilon + step)) / (2 * step) if epsilon > 0 else 0.0
    return epsilon, slope if 0 < slope < math.inf else aim.tilt


def log_delta_of(
    laws: list[Law], table: aims.LossTable, aim: aims.Aim, delta: float
) -> tuple[Callable[[float], float], float]:
    """The logarithm of a bound on delta of the finite losses, as a function of epsilon; and the mass of infinite ones.

    `delta` is about that at the epsilon of the aim: what is far below it is dropped.
    """
    infinite = sum(law.steps * law.infinite for law in laws) * (1 + 1e-9)
    if not infinite < delta / 2:
        raise TiltedUnavailable(f"The tails hold {infinite:g}, which matters at delta={delta:g}. Use method 'rdp'.")
    t, spacing = aim.tilt, 2 * math.pi / aim.period
    # the mu^2 of a Gaussian costs about mu^2 (1 + slope) / 2: none is added where there is enough
    added = max(2 * _SMOOTH_ERROR * aim.fine * aim.scale / (1 + aim.slope), 80.0 / (_MAX_FREQUENCIES * spacing) ** 2)
    gaussian = table.gaussian + (added if table.gaussian < added else 0.0)
    moment = sum(law.steps * law.log_moment for law in laws) + gaussian * t * (1 + t) / 2
    drift = sum(law.steps * law.mean for law in laws) + gaussian * (t + 0.5)
    # what may be dropped, relative to e^(K(t) - t epsilon)
    log_drop = math.log(math.pi / spacing) + math.log(aims.TINY * delta) - (moment - t * aim.epsilon)
    waves = _wave_sum(laws, t, gaussian, spacing, log_drop)
    rounding = 64 * ULP + sum(law.steps * law.error for law in laws)  # of e^K(z), relative; and of a sum
    constant = moment + math.log(spacing / math.pi) + rounding

    def log_bound(epsilon: float) -> float:
        total = waves.at(drift - epsilon) + waves.dropped + rounding * waves.absolute
        return constant - t * epsilon + math.log(total) if total > 0 else math.inf

    return log_bound, infinite


@dataclass(frozen=True)
class _Waves:
    """Terms `f(0) / 2, f(D), ..` without the phase of epsilon; bounds on the absolute values of others, and of all."""

    s: Array
    real: Array
    imag: Array
    dropped: float
    absolute: float

    def at(self, offset: float) -> float:
        phase = self.s * offset
        return float(self.real @ np.cos(phase) - self.imag @ np.sin(phase))


def _wave_sum(laws: Sequence[Law], t: float, gaussian: float, spacing: float, log_drop: float) -> _Waves:
    """The terms that are not negligible: all others together have the absolute value `e^log_drop` at most."""
    allowed = math.exp(min(max(log_drop, -600.0), 0.0)) / (len(laws) + 1)
    highest = math.sqrt(2 * max(1.0, -math.log(allowed) + math.log1p(1 / (spacing * t)))) / math.sqrt(gaussian)
    number = min(_MAX_FREQUENCIES, math.ceil(highest / spacing) + 2)
    # the terms that follow: at most int e^(-mu^2 s^2 / 2) / s^2 ds / D, and int 1/s^2 = 1/s
    dropped = math.exp(-gaussian * ((number - 1) * spacing) ** 2 / 2) / ((number - 1) * spacing) / spacing
    s: Array = np.arange(number, dtype=np.float64) * spacing
    size = 1 / np.hypot(t, s) / np.hypot(1 + t, s)
    log_size = np.log(size) - gaussian * s * s / 2
    log_size[0] += math.log(0.5)
    angle = -np.arctan2(s, t) - np.arctan2(s, 1 + t)
    for law in laws:
        transform = _characteristic(law, spacing, len(s))
        log_size = log_size + law.steps * np.log(np.maximum(np.abs(transform), 1e-300))
        angle = angle + law.steps * np.angle(transform)
        tail = np.append(np.cumsum(np.exp(log_size)[::-1])[::-1], 0.0)
        keep = max(1, int(np.argmax(tail <= allowed)))
        dropped += float(tail[keep])
        s, log_size, angle = s[:keep], log_size[:keep], angle[:keep]
    final: Array = np.exp(log_size).astype(np.float64)
    return _Waves(s, final * np.cos(angle), final * np.sin(angle), dropped, float(final.sum()) + dropped)


def _characteristic(law: Law, spacing: float, number: int) -> NDArray[np.complex128]:
    """`sum w e^(i s loss)` at s = 0, D, 2 D, .. as a matrix product: s = (a m + b) D."""
    inner = max(1, math.isqrt(number))
    outer = -(-number // inner)
    fine = _waves_of(law.loss, spacing, inner)
    coarse = _waves_of(law.loss, spacing * inner, outer) * law.weight
    return np.asarray((coarse @ fine.T).ravel()[:number])


def _waves_of(loss: Array, spacing: float, number: int) -> NDArray[np.complex128]:
    """`e^(i k D loss)` for k = 0..number-1, (number, losses), by doubling: few exponentials and few roundings."""
    table = np.empty((number, len(loss)), dtype=np.complex128)
    table[0] = 1
    done = 1
    while done < number:
        more = min(done, number - done)
        np.multiply(table[:more], np.exp(1j * (spacing * done) * loss), out=table[done : done + more])
        done += more
    return table


def _least_epsilon(log_bound: Callable[[float], float], target: float, start: float, t: float, floor: float) -> float:
    """The least epsilon >= floor with `log_bound(epsilon) <= target`, up to 1e-10 of it, from above."""
    if log_bound(floor) <= target:
        return floor
    low, high = floor, max(start, floor * (1 + 1e-9), 1e-300)
    for _ in range(1000):
        gap = log_bound(high) - target
        if gap <= 0:
            break
        low, high = high, high + max(1.1 * min(gap, 1e3) / t, 1e-2 * high)
    else:
        raise TiltedUnavailable(f"Expected an epsilon below {high:g}, got none. Use method 'rdp'.")
    root = falling_root(lambda epsilon: min(max(log_bound(epsilon) - target, -1e6), 1e6), low, high, rtol=1e-11)
    step = 1e-11
    while log_bound(root) > target:  # to the safe side of the rounding
        root, step = root * (1 + step), 10 * step
    return root
