"""Tight upper bound on epsilon: discrete losses that dominate, composed by Fourier sums whose errors only add.

For neighbours in one order, with L the privacy loss of all steps together and z = t + i s on a line with t > 0,

    delta(epsilon) = E_P[(1 - e^(epsilon - L))_+] = 1/(2 pi) int e^(K(z) - z epsilon) / (z (1 + z)) ds,
    K(z) = sum_i T_i log E_P e^(z L_i).

Every approximation is on the safe side, whatever the parameters (t, cells, spacing) are:

1. *Cells.* The outputs are divided into cells, and each cell's mass under P and Q is put on its two ends so that both
   masses are kept. That interpolates delta linearly in e^epsilon ("connect the dots": Doroshenko et al. 2022), so the
   discrete pair dominates. Everything beyond the last cell counts as an infinite loss, T_i times;
   in direction add that is the end where the losses are near their limit, -log(1 - q).
2. *One Gaussian more.* A release with a tiny mu is added. It cannot lower delta, and its factor e^(-mu^2 s^2 / 2) makes
   the integral end. Events without sampling are Gaussians, too, and are added exactly.
3. *A sum for the integral.* With spacing D it equals `sum_k e^(2 pi k t / D) delta(epsilon + 2 pi k / D)` over all
   integers k (Poisson summation): the wanted term and others that are not negative.
4. *Dropped frequencies* count by the bound on their absolute value, as |E e^(i s L)| <= 1 for every further kind.
5. *Rounding* counts as `_rounding_bound`, an estimate of its size times a large factor.

The tilt e^(t L) keeps the sum near its largest term, so that rounding is relative to delta, and not to 1. The grid of
each kind of step depends on the spread of its loss, not on the number of steps, so 10^7 steps cost what ten cost.
This file imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfunc.accounting.losses import Array, Direction, log_ratio, normal_masses
from dpfunc.accounting.search import falling_root, least
from dpfunc.errors import InvalidArgument

Kind = tuple[float, float, int]
"""sampling_prob, noise_multiplier, num_steps."""

_MIN_DELTA, _MIN_SIGMA, _MAX_SIGMA, _MIN_PROB = 1e-200, 0.05, 1e4, 1e-12
_MAX_STEPS = 10**11
_CELL_ERROR, _SMOOTH_ERROR = 2e-6, 1e-5  # relative to epsilon
_MANY_KINDS, _MANY_CELL_ERROR = 8, 4e-5  # for speed
_MAX_CELLS, _MAX_FREQUENCIES, _MAX_ROUNDS = 6_000, 2**18, 8
_KINKED, _GAIN = 4.0, 4e-4  # where t epsilon is less, errors are divided by 8 until epsilon falls by less than that
_TINY = 1e-8  # of delta: what each of the truncated ends and dropped frequencies may add
_LARGEST_EPSILON = 700.0
_ULP = float(np.finfo(np.float64).eps)


class TiltedUnavailable(InvalidArgument):
    """The events are outside the domain of this accountant."""


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
    return _near(few, _best_tilt(few, log_delta), log_delta)[0]


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
    mu2 = _gaussian_part(kinds)
    if not mu2 < 1e12:
        raise TiltedUnavailable(
            f"Expected sum(T / sigma^2) < 1e12 of the steps without sampling for method 'tilted', got {mu2:g}. "
            "Use method 'rdp'."
        )
    return sorted((max(q, _MIN_PROB), min(sigma, _MAX_SIGMA) if q < 1 else sigma, count) for q, sigma, count in kinds)


def _gaussian_part(kinds: Sequence[Kind]) -> float:
    """`mu^2 = sum T / sigma^2` of the events without sampling, rounded up."""
    terms = [count / sigma / sigma if sigma > 1e-150 else math.inf for q, sigma, count in kinds if q == 1]
    return math.fsum(terms) * (1 + 4 * _ULP) if all(map(math.isfinite, terms)) else math.inf


# ---------------------------------------------------------------------------------------------------------- one step


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


# ---------------------------------------------------------------------------------------- losses on a fine grid of x


@dataclass(frozen=True)
class _Sampled:
    """Losses of each kind (axis K) at equal distances in x (axis M). Only used to choose parameters.

    Args:
        q, sigma, steps: (K,). x, loss, log_mass: (K, M), with log masses under P. gaussian: mu^2 of other releases.
        infinite: (K,) the mass under P beyond the last x, if the loss is not bounded there.
    """

    q: Array
    sigma: Array
    steps: Array
    x: Array
    loss: Array
    log_mass: Array
    gaussian: float
    direction: Direction

    def each(self, t: float) -> Array:
        """log E_P e^(t L_i) for each kind: (K,)."""
        exponents = self.log_mass + t * self.loss
        top = exponents.max(axis=1)
        return np.asarray(np.log(np.exp(exponents - top[:, None]).sum(axis=1)) + top)

    def log_moment(self, t: float) -> float:
        """`K(t)`, the logarithm of the moment generating function of the total loss of all steps."""
        sampled = float(self.steps @ self.each(t)) if len(self.steps) else 0.0
        return sampled + self.gaussian * t * (1 + t) / 2


def _tail_reach(kinds: Sequence[Kind], delta: float) -> Array:
    """Standard deviations beyond which a step of each kind has mass below its share of `_TINY` delta: (K,)."""
    from scipy.special import ndtri

    steps = np.array([count for _, _, count in kinds], dtype=np.float64)
    return np.asarray(np.maximum(9.5, -ndtri(_TINY * delta / steps / len(kinds) / 2)))


def sampled_losses(kinds: Sequence[Kind], direction: Direction, delta: float, share: int = 0) -> _Sampled:
    """The losses of the kinds with sampling; with `share` only of about that many, which stand for all."""
    sampled = sorted(kind for kind in kinds if kind[0] < 1)
    stride = max(1, -(-len(sampled) // share)) if share else 1
    alike = [sampled[start : start + stride] for start in range(0, len(sampled), stride)]
    chosen = [(*max(some, key=lambda kind: kind[2])[:2], sum(count for _, _, count in some)) for some in alike]
    q, sigma, steps = (np.array(column, dtype=np.float64) for column in zip(*chosen, strict=True)) if chosen else (
        np.empty(0), np.empty(0), np.empty(0)
    )  # fmt: skip
    empty = np.empty((0, 0))
    if not chosen:
        return _Sampled(q, sigma, steps, empty, empty, empty, _gaussian_part(kinds), direction)
    reach = _tail_reach(chosen, delta)
    low, high = -9.5 * sigma, reach * sigma + {"remove": 1.0, "add": 0.0, "replace": 0.5}[direction]
    if direction == "add":  # in the coordinate y = -x, where the loss falls
        low, high = -reach * sigma, 9.5 * sigma
    step = np.minimum(sigma / 12, sigma * sigma / 1.5)
    points = int(np.clip(np.max((high - low) / step), 200, 3000))
    x = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, points)
    loss, log_density = _loss_and_density(q[:, None], sigma[:, None], x, direction)
    return _Sampled(
        q, sigma, steps, x, loss, log_density + np.log(x[:, 1:2] - x[:, :1]), _gaussian_part(kinds), direction
    )


def _loss_and_density(q: Array, s: Array, x: Array, direction: Direction) -> tuple[Array, Array]:
    """The privacy loss at x and the log density of P. In direction add, x is minus the output."""
    normal = -((x / s) ** 2) / 2 - np.log(s * math.sqrt(2 * math.pi))
    if direction == "replace":
        up = log_ratio(q, (x - 0.25) / 2 / s**2)
        return up - log_ratio(q, (-x - 0.25) / 2 / s**2), normal + up
    up = log_ratio(q, (x - 0.5) / s**2)
    return (up, normal + up) if direction == "remove" else (-up, normal)


# ------------------------------------------------------------------------------------------------------------ tilt


def _best_tilt(base: _Sampled, log_delta: float) -> float:
    """The t at which `K(t) - t epsilon - log t - log(1 + t) = log delta` has the least epsilon."""

    def epsilon(log_t: float) -> float:
        t = math.exp(log_t)
        return (base.log_moment(t) - log_delta - log_t - math.log1p(t)) / t

    log_t, bound = _minimum(epsilon)
    return math.exp(log_t) if bound > 0 else saddle(base, 0.0)


def saddle(base: _Sampled, epsilon: float) -> float:
    """The t at which the absolute value of the integrand is the least."""

    def size(log_t: float) -> float:
        t = math.exp(log_t)
        return base.log_moment(t) - t * epsilon - log_t - math.log1p(t)

    return math.exp(_minimum(size)[0])


def _minimum(function: Callable[[float], float]) -> tuple[float, float]:
    """Minimum of a function of log t: its place, and its value."""
    grid = np.arange(-14.0, 19.0, 3.0)
    best = int(np.argmin([function(point) for point in grid]))
    return least(function, float(grid[max(0, best - 1)]), float(grid[min(len(grid) - 1, best + 1)]), 0.02)


def _renyi_estimate(base: _Sampled, near: float, log_delta: float) -> float:
    """Epsilon by the Renyi curve, at the best order near 1 + `near`: Canonne, Kamath and Steinke 2020."""
    orders = near * np.array([0.7, 0.85, 1.0, 1.2, 1.5])
    values = [(base.log_moment(t) - log_delta + t * math.log(t) - (1 + t) * math.log1p(t)) / t for t in orders]
    return float(min(values))


# ----------------------------------------------------------------------------------------------------------- atoms


@dataclass(frozen=True)
class _Atoms:
    """Discrete losses that dominate those of one step: masses under P (.., n), the mass of an infinite loss (..)."""

    mass: Array
    loss: Array
    infinite: Array


def _mills(v: Array) -> Array:
    """`Phi(-v) / phi(v)` of the standard normal, without underflow."""
    from scipy.special import erfcx

    return np.asarray(math.sqrt(math.pi / 2) * erfcx(v / math.sqrt(2)))


def _normal_density(z: Array) -> Array:
    """Density `phi(x)` of the standard normal."""
    return np.asarray(np.exp(-z * z / 2) / math.sqrt(2 * math.pi))


def pair_masses(y: Array, s: Array | float) -> tuple[Array, Array]:
    """Masses (.., n + 1) of N(0, s^2) and N(1, s^2), put on the ends of the cells -inf, y[0], .., y[n-1].

    Args:
        y: (.., n). s: a number, or (.., 1).

    With r = N(1)/N(0) at the ends, a cell's masses (B, A) go to its ends so that `b_0 + b_1 = B` and
    `r_0 b_0 + r_1 b_1 = A`. The first end has r = 0. Beyond y[-1] nothing is put. In the formulas r cancels: below 1/2
    they are relative to N(0), and above it, mirrored, to N(1).
    """
    from scipy.special import ndtr

    z, w = y / s, (y - 1) / s
    exponent = (y - 0.5) / s**2
    drop = np.diff(y) / s**2
    rho, gap = np.exp(-drop), -np.expm1(-drop)
    below = (y[..., 1:] + y[..., :-1]) / 2 < 0.5
    # below: A / r at the upper end, as N(1) = r N(0); above: r B at the lower end
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = _normal_density(z) * _mills(np.maximum(-w, -20.0))
        a_over_r = scaled[..., 1:] - rho * scaled[..., :-1]
        scaled = _normal_density(w) * _mills(np.maximum(z, -20.0))
        r_times_b = scaled[..., :-1] - rho * scaled[..., 1:]
        first, second = normal_masses(z), normal_masses(w)
        upper_first = np.clip((a_over_r - rho * first) / gap, 0.0, first)
        upper_second = np.clip((second - r_times_b) / gap, 0.0, second)
        down, up = np.exp(np.minimum(-exponent, 600.0)), np.exp(np.minimum(exponent, 600.0))
    b, a = np.zeros((2, *y.shape[:-1], y.shape[-1] + 1))
    low, high = np.where(below, first - upper_first, 0.0), np.where(below, 0.0, second - upper_second)
    b[..., 1:-1] += low + high * down[..., :-1]
    a[..., 1:-1] += low * up[..., :-1] + high
    low, high = np.where(below, upper_first, 0.0), np.where(below, 0.0, upper_second)
    b[..., 2:] += low + high * down[..., 1:]
    a[..., 2:] += low * up[..., 1:] + high
    tail = ndtr(z[..., 0])
    up_first = np.minimum(tail, _normal_density(z[..., 0]) * _mills(-w[..., 0]))
    b[..., 0] = tail - up_first
    b[..., 1] += up_first
    a[..., 1] += up_first * up[..., 0]
    conserved(b.sum(axis=-1) + ndtr(-z[..., -1]), a.sum(axis=-1) + ndtr(-w[..., -1]))
    return b, a


def conserved(*totals: Array | float) -> None:
    """Raise `TiltedUnavailable` unless each total mass is 1: a mass that is lost would be a bound that is too low."""
    if not all(np.all(np.abs(total - 1) <= 1e-11) for total in totals):
        raise TiltedUnavailable(f"Expected masses that sum to 1, got {totals}. Use method 'rdp'.")


def atoms_add_remove(q: Array | float, s: Array | float, y: Array, direction: Direction) -> _Atoms:
    """The atoms for cells with the ends y; the subsampled pair of a pair that dominates dominates."""
    from scipy.special import ndtr

    b, a = pair_masses(y, s)
    loss = log_ratio(q, (y - 0.5) / s**2)
    if direction == "remove":
        loss = np.concatenate([np.zeros_like(y[..., :1]) + np.log1p(-q), loss], axis=-1)
        beyond = (1 - q) * ndtr(-y[..., -1:] / s) + q * ndtr((1 - y[..., -1:]) / s)
        return _Atoms((1 - q) * b + q * a, loss, beyond[..., 0])
    b[..., -1:] += ndtr(-y[..., -1:] / s)  # the least losses, rounded up
    # b[0] is below 1e-8 delta, so that it may count in full; with its own loss, e^(t loss) b[0] can be huge
    return _Atoms(b[..., 1:], -loss, b[..., 0])


def atoms_replace(q: Array | float, s: Array | float, x: Array) -> _Atoms:
    """The atoms of P, Q = (1-q) N(0, s^2) + q N(+-1/2, s^2) for cells with the ends x; below x[0] rounded up."""
    from scipy.special import ndtr

    middle, ahead, behind = normal_masses(x / s), normal_masses((x - 0.5) / s), normal_masses((x + 0.5) / s)
    half = x[..., :-1] / (2 * s**2)
    c = 1 / (8 * s**2)
    up, down = np.exp(half - c), np.exp(-half - c)  # N(1/2) / N(0) and N(-1/2) / N(0) at the lower ends
    loss = log_ratio(q, (x - 0.25) / (2 * s**2)) - log_ratio(q, (-x - 0.25) / (2 * s**2))
    # P - e^loss Q of each cell, as a sum of terms that are not negative
    terms = (1 - q) * (ahead - up * middle + down * middle - behind)
    terms = terms + q * (down * ahead - up * behind)
    total = (1 - q) * middle + q * ahead
    moved = np.clip(q / ((1 - q) + q * down) * terms / -np.expm1(-np.diff(loss)), 0.0, total)
    mass = np.zeros_like(x)
    mass[..., :-1] += total - moved
    mass[..., 1:] += moved
    mass[..., :1] += (1 - q) * ndtr(x[..., :1] / s) + q * ndtr((x[..., :1] - 0.5) / s)
    infinite = ((1 - q) * ndtr(-x[..., -1:] / s) + q * ndtr((0.5 - x[..., -1:]) / s))[..., 0]
    conserved(mass.sum(axis=-1) + infinite, (mass * np.exp(-loss)).sum(axis=-1))
    return _Atoms(mass, loss, infinite)


@dataclass(frozen=True)
class _Aim:
    """The epsilon that parameters are chosen for. Any value is safe; one near the answer is tight.

    Args:
        epsilon, slope: epsilon, and about -d log(delta) / d epsilon there. tilt: t.
        tilts, moments: (N,) a table of t' and K(t').
        log_scale: log of delta, in units of the Chernoff bounds below. period: 2 pi / D.
    """

    epsilon: float
    slope: float
    tilt: float
    tilts: Array
    moments: Array
    log_scale: float
    period: float
    fine: float = 1.0

    def importance(self, loss: Array) -> tuple[Array, Array]:
        """Relative error of delta if one step's loss is put on the ends of a cell of width h, over h^2 / 12: log; t'.

        The other steps must make up for epsilon - loss, which has probability `e^(K(t') - t' (epsilon - loss))` at
        most, and the relative error of keeping both masses is `t' (1 + t') h^2 / 12`. Losses far above epsilon have
        t' = 0: there it is exact.
        """
        where = self.epsilon - loss
        some = np.sort(where.ravel()[:: 1 + where.size // 20_000])
        need = some[np.linspace(0, len(some) - 1, 512).astype(np.intp)]
        exponents = self.moments - np.outer(need, self.tilts)
        best = np.argmin(exponents, axis=1)
        tilts = self.tilts[best]
        log_weight = exponents[np.arange(len(need)), best] + np.log(tilts * (1 + tilts)) - self.log_scale
        return np.interp(where, need, log_weight), np.interp(where, need, tilts)


def make_aim(few: _Sampled, epsilon: float, slope: float, t: float, log_delta: float, fine: float = 1.0) -> _Aim:
    """The parameters for an epsilon; `few` stands for all kinds, and t is the saddle.

    A t below the saddle is taken where that allows a shorter period, and makes the integrand larger by e^5 at most.
    """
    factors = np.concatenate(
        [np.geomspace(1e-3, 0.1, 8)[:-1], np.linspace(0.1, 1.5, 15), np.geomspace(1.5, 300.0, 20)[1:]]
    )
    tilts = t * factors
    moments = np.array([few.log_moment(float(tilt)) for tilt in tilts])
    exponents = moments - tilts * epsilon
    width = math.log(max(1.0, 2.5 * _spread_of(few, t) * t))
    size = exponents - np.log(tilts) - np.log1p(tilts)
    saddle_at = int(np.argmin(np.abs(factors - 1)))
    choices = [i for i in range(saddle_at + 1) if factors[i] > 0.4 and size[i] <= size[saddle_at] + 5]
    periods = [_period(tilts, exponents - log_delta, float(tilts[i])) for i in choices]
    best = int(np.argmin(periods))
    log_scale = min(float(exponents.min()), log_delta + width)
    return _Aim(epsilon, slope, float(tilts[choices[best]]), tilts, moments, log_scale, periods[best], fine)


def _period(tilts: Array, exponents: Array, t: float) -> float:
    """A period 2 pi / D at which the other terms of the sum are below 1e-8 of the wanted one, by Chernoff bounds.

    Args:
        exponents: `K(t') - t' epsilon - log delta` for each of the tilts t'.
    """
    distance = np.abs(tilts / t - 1)
    rooms = (exponents + 18.4) / (np.maximum(distance, 0.03) * t)
    below, above = rooms[tilts < 0.97 * t], rooms[tilts > 1.03 * t]
    return max(float(below.min()), float(above.min()), 4.0 / t)


def _choose_ends(base: _Sampled, aim: _Aim) -> list[Array]:
    """The ends of the cells of each kind, such that epsilon rises by about `_CELL_ERROR` of itself.

    Cells of loss width h and mass p raise log delta by `sum T p importance h^2 / 12`, so the best density of cells is
    proportional to `(p importance h^2)^(1/3)`. Besides, neither the importance nor the tilt may change much in a cell.
    """
    spacing = (base.x[:, 1] - base.x[:, 0])[:, None]
    log_importance, tilts = aim.importance(base.loss)
    log_weight = base.log_mass + log_importance - np.log(spacing)
    slope = np.abs(np.gradient(base.loss, axis=1)) / spacing
    bulk = np.exp(np.minimum(log_weight, 300.0) / 3) * slope ** (2 / 3)
    integral = bulk.sum(axis=1) * spacing[:, 0]
    share = np.cbrt(base.steps)
    error = _CELL_ERROR if len(share) < _MANY_KINDS else _MANY_CELL_ERROR
    counts = share * math.sqrt(float(share @ integral) / (12 * error * aim.fine * aim.epsilon * aim.slope))
    counts = np.minimum(counts, _MAX_CELLS / np.maximum(integral, 1e-300))
    live = np.exp(np.minimum(0.0, (log_weight - log_weight.max(axis=1, keepdims=True)) / 12))
    change = np.where(base.loss > aim.epsilon, aim.tilt, tilts * np.maximum(live, 0.05))
    change = np.minimum((8.0 if len(share) < _MANY_KINDS else 2.0) * change * slope, 1 / spacing)
    density = bulk * counts[:, None] + change + 16.0 / (base.x[:, -1:] - base.x[:, :1])
    total = np.zeros_like(density)
    np.cumsum((density[:, 1:] + density[:, :-1]) / 2 * spacing, axis=1, out=total[:, 1:])
    ends = []
    for x, cells in zip(base.x, total, strict=True):
        number = math.ceil(1.1 ** math.ceil(math.log(cells[-1], 1.1)))  # few different numbers
        places = np.linspace(0.0, cells[-1], number + 1)
        found = np.interp(places, cells, x)
        apart = np.diff(found) > 1e-12 * np.abs(found[1:])
        ends.append(found if apart.all() else found[np.append(True, apart)])
    return ends


# ----------------------------------------------------------------------------------------------------- composition


@dataclass(frozen=True)
class _Tilted:
    """The law of one kind's loss, tilted: weights that sum to 1 at losses about their mean.

    `log_moment` is log sum p e^(t loss); `error` bounds the relative rounding of one step's transform.
    """

    steps: float
    weight: Array
    loss: Array
    mean: float
    log_moment: float
    infinite: float
    error: float

    @property
    def variance(self) -> float:
        """Variance of the tilted loss of all steps together."""
        return float(self.steps * (self.weight @ (self.loss * self.loss)))


def _tilt(atoms: _Atoms, steps: float, t: float) -> _Tilted:
    """The tilted law of some atoms."""
    keep = atoms.mass > 0
    loss = atoms.loss[keep]
    exponents = np.log(atoms.mass[keep]) + t * loss
    top = float(exponents.max())
    weight = np.exp(exponents - top)
    total = float(weight.sum())
    weight /= total
    mean = float(weight @ loss)
    scale = float(weight @ np.abs(loss))
    error = _ULP * (64 + 512 * (1 + t) * scale + abs(top))
    return _Tilted(steps, weight, loss - mean, mean, math.log(total) + top, float(atoms.infinite), error)


def one_direction(kinds: Sequence[Kind], direction: Direction, delta: float, floor: float = 0.0) -> _Bound:
    """The bound for neighbours in one order; not below `floor`, which the other order has already cost.

    Each round chooses parameters for an epsilon, and bounds it. Any parameters are safe; the next round starts from a
    better epsilon, until the parameters were made for about the epsilon that was found.
    """
    log_delta = math.log(delta)
    few = sampled_losses(kinds, direction, delta, share=32)
    t = _best_tilt(few, log_delta)
    base = few if len(few.steps) == sum(q < 1 for q, _, _ in kinds) else sampled_losses(kinds, direction, delta)
    renyi = 0.0 if floor else max(0.0, _renyi_estimate(base, t, log_delta))
    about, t = _near(few, t, log_delta)
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


def _near(few: _Sampled, t: float, log_delta: float) -> tuple[float, float]:
    """Epsilon by Laplace's method at its own saddle, and the saddle; t: a first value of it."""
    about = 0.0
    for _ in range(3):
        about = _first_guess(few, t, log_delta)
        t = saddle(few, about)
    return about, t


def _first_guess(base: _Sampled, t: float, log_delta: float) -> float:
    """Epsilon by Laplace's method: the value of the integrand at its saddle, times its width."""
    spread = _spread_of(base, t)
    width = math.log(2 * math.pi * (spread**2 + 1 / t**2 + 1 / (1 + t) ** 2)) / 2
    found = (base.log_moment(t) - log_delta - math.log(t) - math.log1p(t) - width) / t
    return max(found, 0.1 * spread)


def _spread_of(base: _Sampled, t: float) -> float:
    """Standard deviation of the loss of all steps under the tilted law."""
    step = 0.02 * t
    second = base.log_moment(t + step) + base.log_moment(t - step) - 2 * base.log_moment(t)
    return math.sqrt(max(second, 1e-300)) / step


def discrete_laws(base: _Sampled, aim: _Aim) -> list[_Tilted]:
    """The tilted law of each kind on its cells."""
    if not len(base.steps):
        return []
    laws: list[_Tilted] = []
    ends = _choose_ends(base, aim)
    lengths = np.array([len(some) for some in ends])
    for length in np.unique(lengths):  # as arrays, for speed
        alike = np.flatnonzero(lengths == length)
        q, s, x = base.q[alike, None], base.sigma[alike, None], np.stack([ends[i] for i in alike])
        atoms = atoms_replace(q, s, x) if base.direction == "replace" else atoms_add_remove(q, s, x, base.direction)
        for mass, loss, infinite, steps in zip(atoms.mass, atoms.loss, atoms.infinite, base.steps[alike], strict=True):
            laws.append(_tilt(_Atoms(mass, loss, infinite), float(steps), aim.tilt))
    return sorted(laws, key=lambda law: -law.variance)


def compose(laws: list[_Tilted], base: _Sampled, aim: _Aim, delta: float, floor: float) -> tuple[float, float]:
    """The least epsilon, up to 1e-9, at which the bound on delta is at most `delta`, or `floor`: (epsilon, slope)."""
    infinite = sum(law.steps * law.infinite for law in laws) * (1 + 1e-9)
    if not infinite < delta / 2:
        raise TiltedUnavailable(f"The tails hold {infinite:g}, which matters at delta={delta:g}. Use method 'rdp'.")
    t, target = aim.tilt, math.log(delta - infinite) - 2 * _ULP
    spacing = 2 * math.pi / aim.period
    gaussian = base.gaussian + _smoothing(base.gaussian, aim, spacing)
    moment = sum(law.steps * law.log_moment for law in laws) + gaussian * t * (1 + t) / 2
    drift = sum(law.steps * law.mean for law in laws) + gaussian * (t + 0.5)
    # what may be dropped, relative to e^(K(t) - t epsilon)
    log_drop = math.log(math.pi / spacing) + math.log(_TINY) + target - (moment - t * aim.epsilon)
    waves = _wave_sum(laws, t, gaussian, spacing, log_drop)
    rounding = _rounding_bound(laws)
    constant = moment + math.log(spacing / math.pi) + rounding

    def log_bound(epsilon: float) -> float:
        total = waves.at(drift - epsilon) + waves.dropped + rounding * waves.absolute
        return constant - t * epsilon + math.log(total) if total > 0 else math.inf

    found = _least_epsilon(log_bound, target, aim.epsilon, t, floor)
    step = 1e-3 * found
    return found, (log_bound(found - step) - log_bound(found + step)) / (2 * step) if found > 0 else t


def _smoothing(gaussian: float, aim: _Aim, spacing: float) -> float:
    """The mu^2 of the Gaussian that is added, at a cost of about `mu^2 (1 + slope) / 2`; 0 where there is one."""
    wanted = max(2 * _SMOOTH_ERROR * aim.fine * aim.epsilon / (1 + aim.slope), 80.0 / (_MAX_FREQUENCIES * spacing) ** 2)
    return 0.0 if gaussian >= wanted else wanted


def _rounding_bound(laws: Sequence[_Tilted]) -> float:
    """Relative error of e^K(z) by rounding: the error of each step's transform, times the steps; and of a sum."""
    return 64 * _ULP + sum(law.steps * law.error for law in laws)


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


def _wave_sum(laws: Sequence[_Tilted], t: float, gaussian: float, spacing: float, log_drop: float) -> _Waves:
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


def _characteristic(law: _Tilted, spacing: float, number: int) -> NDArray[np.complex128]:
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
