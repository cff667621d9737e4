"""Tight upper bound on epsilon: discrete losses that dominate, composed by Fourier sums whose errors only add.

For neighbours in one order, with L the privacy loss of all steps together and z = t + i s on a line with t > 0,

    delta(epsilon) = E_P[(1 - e^(epsilon - L))_+] = 1/(2 pi) int e^(K(z) - z epsilon) / (z (1 + z)) ds,
    K(z) = sum_i T_i log E_P e^(z L_i).

Every approximation is on the safe side, whatever the parameters (t, cells, spacing) are:

1. *Cells.* Each step's loss gets a law of few values that dominates its own (tilted_law.py). What lies beyond the last
   cell counts as an infinite loss, T_i times.
2. *One Gaussian more.* A release with a tiny mu is added. It cannot lower delta, and its factor e^(-mu^2 s^2 / 2) makes
   the integral end. Events without sampling are Gaussians, too, and are added exactly.
3. *A sum for the integral.* With spacing D it equals `sum_k e^(2 pi k t / D) delta(epsilon + 2 pi k / D)` over all
   integers k (Poisson summation): the wanted term and others that are not negative.
4. *Dropped frequencies* count by the bound on their absolute value, as |E e^(i s L)| <= 1 for every further kind.
5. *Rounding* counts as an estimate of its size, times a large factor.

The tilt e^(t L) keeps the sum near its largest term, so that rounding is relative to delta, and not to 1. The grid of
each kind of step depends on the spread of its loss, not on the number of steps, so 10^7 steps cost what ten cost.
Parameters are chosen in tilted_aim.py. This file imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfunc.accounting.losses import Array, Direction
from dpfunc.accounting.search import falling_root
from dpfunc.accounting.tilted_aim import (
    TINY,
    Aim,
    Sampled,
    best_tilt,
    choose_ends,
    laplace,
    make_aim,
    renyi_estimate,
    saddle,
    sampled_losses,
)
from dpfunc.accounting.tilted_law import (
    ULP,
    Atoms,
    Kind,
    Law,
    TiltedUnavailable,
    atoms_add_remove,
    atoms_replace,
    gaussian_part,
    tilt,
)

_MIN_DELTA, _MIN_SIGMA, _MAX_SIGMA, _MIN_PROB = 1e-200, 0.05, 1e4, 1e-12
_MAX_STEPS = 10**11
_SMOOTH_ERROR = 1e-5  # relative to epsilon
_MAX_FREQUENCIES, _MAX_ROUNDS = 2**18, 8
_KINKED, _GAIN = 4.0, 4e-4  # where t epsilon is less, errors are divided by 8 until epsilon falls by less than that
_LARGEST_EPSILON = 700.0


@dataclass(frozen=True)
class _Bound:
    """`epsilon` with delta(epsilon) <= delta, and `renyi`, about what a Renyi accountant would say (not a bound)."""

    epsilon: float
    renyi: float


def tilted_epsilon(kinds: Sequence[Kind], directions: Sequence[Direction], delta: float) -> _Bound:
    """Upper bound on epsilon of composed Poisson-sampled Gaussians, the larger of the directions.

    Args:
        kinds: (sampling_prob, noise_multiplier, num_steps), at least one, in any order.
        directions: ("remove", "add"), or ("replace",) with noise multipliers relative to twice the clip norm.
        delta: 0 < delta < 1.

    Raises:
        TiltedUnavailable: values outside the domain that float64 can serve.

    >>> print(f"{tilted_epsilon([(0.01, 1.0, 1000)], ['remove', 'add'], 1e-5).epsilon:.4f}")
    1.8283
    """
    kinds = _within_domain(kinds, delta)
    if len(kinds) == 1 and kinds[0][2] == 1 and kinds[0][0] < 1:
        q, sigma, _ = kinds[0]
        return _Bound(max(_one_step_epsilon(q, sigma, direction, delta) for direction in directions), math.inf)
    first = one_direction(kinds, directions[0], delta)
    epsilon = first.epsilon
    for direction in directions[1:]:
        epsilon = max(epsilon, one_direction(kinds, direction, delta, epsilon).epsilon)
    return _Bound(epsilon, first.renyi)


def rough_epsilon(kinds: Sequence[Kind], direction: Direction, delta: float) -> float:
    """Fast estimate of epsilon by Laplace's method, within some percent for many steps; not a bound."""
    kinds = _within_domain(kinds, delta)
    few, log_delta = sampled_losses(kinds, direction, delta, share=32), math.log(delta)
    return laplace(few, best_tilt(few, log_delta), log_delta)[0]


def _within_domain(kinds: Sequence[Kind], delta: float) -> list[Kind]:
    """The kinds, with more noise or less sampling than float64 can serve rounded to the costlier side; sorted.

    Raises:
        TiltedUnavailable: values at which float64 over- or underflows.
    """
    steps = sum(count for _, _, count in kinds)
    if not _MIN_DELTA <= delta < 1:
        raise TiltedUnavailable(
            f"Expected delta >= {_MIN_DELTA:g} for method 'tilted', got delta={delta:g}. Use method 'rdp'."
        )
    if steps > _MAX_STEPS:
        raise TiltedUnavailable(
            f"Expected at most {_MAX_STEPS:g} steps for method 'tilted', got {steps:.4g}. Use method 'rdp'."
            if steps < 2**1000
            else "Expected fewer steps for method 'tilted'. Use method 'rdp'."
        )
    smallest = min((sigma for q, sigma, _ in kinds if q < 1), default=1.0)
    if smallest < _MIN_SIGMA:
        raise TiltedUnavailable(
            f"Expected noise multipliers >= {_MIN_SIGMA:g} for method 'tilted', got {smallest:g}. Use method 'rdp'."
        )
    mu2 = gaussian_part(kinds)
    if not mu2 < 1e12:
        raise TiltedUnavailable(
            f"Expected sum(T / sigma^2) < 1e12 of the steps without sampling for method 'tilted', got {mu2:g}. "
            "Use method 'rdp'."
        )
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
    from scipy.special import ndtr

    if direction == "replace":
        x = s * s * epsilon + 2 * s * s * math.asinh((1 - q) / q * math.exp(1 / (8 * s * s)) * math.sinh(epsilon / 2))
        ahead, behind = ndtr((0.5 - x) / s), ndtr((-0.5 - x) / s)
        return float(q * (ahead - math.exp(epsilon) * behind) - (1 - q) * math.expm1(epsilon) * ndtr(-x / s))
    ratio = (q + math.expm1(epsilon if direction == "remove" else -epsilon)) / q  # N(1) / N(0) where L = epsilon
    if ratio <= 0:
        return 0.0
    x = s * s * math.log(ratio) + 0.5
    if direction == "remove":
        return float(q * (ndtr((1 - x) / s) - ratio * ndtr(-x / s)))
    return float(math.exp(epsilon) * q * (ratio * ndtr(x / s) - ndtr((x - 1) / s)))


def one_direction(kinds: Sequence[Kind], direction: Direction, delta: float, floor: float = 0.0) -> _Bound:
    """The bound for neighbours in one order; not below `floor`, which the other order has already cost.

    Each round chooses parameters for an epsilon, and bounds it. Any parameters are safe; the next round starts from a
    better epsilon, until the parameters were made for about the epsilon that was found.
    """
    log_delta = math.log(delta)
    few = sampled_losses(kinds, direction, delta, share=32)
    t = best_tilt(few, log_delta)
    base = few if len(few.steps) == sum(q < 1 for q, _, _ in kinds) else sampled_losses(kinds, direction, delta)
    renyi = 0.0 if floor else max(0.0, renyi_estimate(base, t, log_delta))
    about, t = laplace(few, t, log_delta)
    slope = t
    best, fine = math.inf, 1.0
    for _ in range(_MAX_ROUNDS):
        aim = make_aim(few, about, slope, t, log_delta, fine)
        found, steepness = compose(discrete_laws(base, aim), base, aim, delta, floor)
        gain, best = best - found, min(best, found)
        settled = abs(about - best) <= 0.05 * best and abs(math.log(steepness / slope)) < 0.4
        if best <= floor or (settled and (t * best > _KINKED or (fine < 1 and gain < _GAIN * best))):
            break
        fine /= 8 if settled else 1
        about, slope = best, steepness
        t = saddle(few, about)
    return _Bound(best, renyi)


def discrete_laws(base: Sampled, aim: Aim) -> list[Law]:
    """The tilted law of each kind on its cells."""
    if not len(base.steps):
        return []
    laws: list[Law] = []
    ends = choose_ends(base, aim)
    lengths = np.array([len(some) for some in ends])
    for length in np.unique(lengths):  # as arrays, for speed
        alike = np.flatnonzero(lengths == length)
        q, s, x = base.q[alike, None], base.sigma[alike, None], np.stack([ends[i] for i in alike])
        atoms = atoms_replace(q, s, x) if base.direction == "replace" else atoms_add_remove(q, s, x, base.direction)
        for mass, loss, infinite, steps in zip(atoms.mass, atoms.loss, atoms.infinite, base.steps[alike], strict=True):
            laws.append(tilt(Atoms(mass, loss, infinite), float(steps), aim.tilt))
    return sorted(laws, key=lambda law: -law.variance)


def compose(laws: list[Law], base: Sampled, aim: Aim, delta: float, floor: float) -> tuple[float, float]:
    """The least epsilon, up to 1e-9, at which the bound on delta is at most `delta`, or `floor`: (epsilon, slope)."""
    infinite = sum(law.steps * law.infinite for law in laws) * (1 + 1e-9)
    if not infinite < delta / 2:
        raise TiltedUnavailable(f"The tails hold {infinite:g}, which matters at delta={delta:g}. Use method 'rdp'.")
    t, target = aim.tilt, math.log(delta - infinite) - 2 * ULP
    spacing = 2 * math.pi / aim.period
    gaussian = base.gaussian + _smoothing(base.gaussian, aim, spacing)
    moment = sum(law.steps * law.log_moment for law in laws) + gaussian * t * (1 + t) / 2
    drift = sum(law.steps * law.mean for law in laws) + gaussian * (t + 0.5)
    # what may be dropped, relative to e^(K(t) - t epsilon)
    log_drop = math.log(math.pi / spacing) + math.log(TINY) + target - (moment - t * aim.epsilon)
    waves = _wave_sum(laws, t, gaussian, spacing, log_drop)
    rounding = 64 * ULP + sum(law.steps * law.error for law in laws)  # of e^K(z), relative; and of a sum
    constant = moment + math.log(spacing / math.pi) + rounding

    def log_bound(epsilon: float) -> float:
        total = waves.at(drift - epsilon) + waves.dropped + rounding * waves.absolute
        return constant - t * epsilon + math.log(total) if total > 0 else math.inf

    found = _least_epsilon(log_bound, target, aim.epsilon, t, floor)
    step = 1e-3 * found
    return found, (log_bound(found - step) - log_bound(found + step)) / (2 * step) if found > 0 else t


def _smoothing(gaussian: float, aim: Aim, spacing: float) -> float:
    """The mu^2 of the Gaussian that is added, at a cost of about `mu^2 (1 + slope) / 2`; 0 where there is one."""
    wanted = max(2 * _SMOOTH_ERROR * aim.fine * aim.epsilon / (1 + aim.slope), 80.0 / (_MAX_FREQUENCIES * spacing) ** 2)
    return 0.0 if gaussian >= wanted else wanted


@dataclass(frozen=True)
class _Waves:
    """Terms `(1/2) f(0), f(D), f(2 D), ..` of the sum without the phase of epsilon.

    Args:
        s, real, imag: frequencies and terms. dropped: bound on the absolute values of all others.
        absolute: sum of the absolute values of the terms.
    """

    s: Array
    real: Array
    imag: Array
    dropped: float
    absolute: float

    def at(self, offset: float) -> float:
        """`sum Re f(s) e^(i s offset)`."""
        phase = self.s * offset
        return float(self.real @ np.cos(phase) - self.imag @ np.sin(phase))


def _wave_sum(laws: Sequence[Law], t: float, gaussian: float, spacing: float, log_drop: float) -> _Waves:
    """The terms whose absolute values are not negligible.

    Args:
        log_drop: log of the absolute value that all dropped terms together may have.
    """
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
        keep, lost = _prune(np.exp(log_size), allowed)
        dropped += lost
        s, log_size, angle = s[:keep], log_size[:keep], angle[:keep]
    final: Array = np.exp(log_size).astype(np.float64)
    real: Array = (final * np.cos(angle)).astype(np.float64)
    imag: Array = (final * np.sin(angle)).astype(np.float64)
    return _Waves(s, real, imag, dropped, float(final.sum()) + dropped)


def _prune(size: Array, allowed: float) -> tuple[int, float]:
    """The number of terms to keep, and the sum of those that follow, which is at most `allowed`."""
    tail = np.append(np.cumsum(size[::-1])[::-1], 0.0)
    keep = max(1, int(np.argmax(tail <= allowed)))
    return keep, float(tail[keep])


def _characteristic(law: Law, spacing: float, number: int) -> NDArray[np.complex128]:
    """`sum w e^(i s loss)` at s = 0, D, 2 D, ..: as a matrix product, because s = (a m + b) D."""
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
    found = falling_root(lambda epsilon: min(max(log_bound(epsilon) - target, -1e6), 1e6), low, high, rtol=1e-11)
    step = 1e-11
    while log_bound(found) > target:  # to the safe side of the rounding
        found, step = found * (1 + step), 10 * step
    return found
