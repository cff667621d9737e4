"""Parameters of the tilted accountant: the tilt, cells, spacing. Any are safe, good ones tight; no bound is here.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpfunc.accounting._losses import MEANS, Array, Direction, Fixed, Kind, gaussian_part, log_ratios, tilt
from dpfunc.accounting._search import least

TINY = 1e-8  # of delta: what each of the truncated ends and dropped frequencies may add
_CELL_ERROR = 2e-6  # relative to epsilon
_MANY_KINDS, _MANY_CELL_ERROR = 8, 4e-5  # for speed
_MAX_CELLS = 6_000


@dataclass(frozen=True)
class LossTable:
    """Losses of each kind with sampling (K) at equal distances in x (M), and their log masses under P.

    Of the other steps: mu^2 of those without sampling, and the laws of those that have a law of losses.
    """

    q: Array
    sigma: Array
    steps: Array
    x: Array
    loss: Array
    log_mass: Array
    gaussian: float
    direction: Direction
    fixed: Sequence[Fixed] = ()

    def log_moment(self, t: float) -> float:
        """`K(t)`, the logarithm of the moment generating function of the total loss of all steps."""
        sampled = 0.0
        if len(self.steps):
            exponents = self.log_mass + t * self.loss
            top = exponents.max(axis=1)
            sampled = float(self.steps @ (np.log(np.exp(exponents - top[:, None]).sum(axis=1)) + top))
        for steps, law in self.fixed:
            sampled += steps * tilt(law, steps, t).log_moment
        return sampled + self.gaussian * t * (1 + t) / 2


def loss_table(
    kinds: Sequence[Kind], direction: Direction, delta: float, rows: int = 0, fixed: Sequence[Fixed] = ()
) -> LossTable:
    """The table of some kinds; with `rows` a coarse one, in which about that many kinds stand for all."""
    from scipy.special import ndtri

    sampled = sorted(kind for kind in kinds if kind[0] < 1)
    stride = max(1, -(-len(sampled) // rows)) if rows else 1
    alike = [sampled[start : start + stride] for start in range(0, len(sampled), stride)]
    chosen = [(*max(some, key=lambda kind: kind[2])[:2], sum(count for _, _, count in some)) for some in alike]
    q, sigma, steps = np.array(chosen, dtype=np.float64).reshape(-1, 3).T.copy()
    if not chosen:
        empty = np.empty((0, 0))
        return LossTable(q, sigma, steps, empty, empty, empty, gaussian_part(kinds), direction, fixed)
    # beyond so many standard deviations a step has mass below its share of what is negligible
    reach = np.maximum(9.5, -ndtri(TINY * delta / steps / len(chosen) / 2))
    low, high = -9.5 * sigma, reach * sigma + MEANS[direction][0]
    points = int(np.clip(np.max((high - low) / np.minimum(sigma / 12, sigma * sigma / 1.5)), 200, 3000))
    x = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, points)
    log_p, log_q = log_ratios(q[:, None], sigma[:, None], x, direction)
    log_normal = -((x / sigma[:, None]) ** 2) / 2 - np.log(sigma[:, None] * math.sqrt(2 * math.pi))
    log_mass = log_normal + log_p + np.log(x[:, 1:2] - x[:, :1])
    return LossTable(q, sigma, steps, x, log_p - log_q, log_mass, gaussian_part(kinds), direction, fixed)


def best_tilt(table: LossTable, log_delta: float) -> float:
    """The t at which `K(t) - t epsilon - log t - log(1 + t) = log delta` has the least epsilon."""
    t, bound = _least(lambda t, log_t: (table.log_moment(t) - log_delta - log_t - math.log1p(t)) / t)
    return t if bound > 0 else saddle(table, 0.0)


def saddle(table: LossTable, epsilon: float) -> float:
    """The t at which the absolute value of the integrand is the least."""
    return _least(lambda t, log_t: table.log_moment(t) - t * epsilon - log_t - math.log1p(t))[0]


def _least(function: Callable[[float, float], float]) -> tuple[float, float]:
    def at(log_t: float) -> float:
        return function(math.exp(log_t), log_t)

    grid = [float(power) for power in range(-14, 19, 3)]
    best = int(np.argmin([at(point) for point in grid]))
    log_t, value = least(at, grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)], 0.02)
    return math.exp(log_t), value


def renyi_estimate(table: LossTable, near: float, log_delta: float) -> float:
    """Epsilon by the Renyi curve, at the best order near 1 + `near`: Canonne, Kamath and Steinke 2020."""
    orders = near * np.array([0.7, 0.85, 1.0, 1.2, 1.5])
    values = [(table.log_moment(t) - log_delta + t * math.log(t) - (1 + t) * math.log1p(t)) / t for t in orders]
    return float(min(values))


def laplace(coarse: LossTable, t: float, log_delta: float) -> tuple[float, float]:
    """Epsilon by Laplace's method at its own saddle, and the saddle; t: a first value of it."""
    about = 0.0
    for _ in range(3):
        about = max((log_integral(coarse, t) - log_delta) / t, 0.1 * _spread(coarse, t))
        t = saddle(coarse, about)
    return about, t


def log_integral(table: LossTable, t: float) -> float:
    """`log delta + t epsilon` at the epsilon whose saddle is t: the integrand at its saddle, times its width."""
    width = math.log(2 * math.pi * (_spread(table, t) ** 2 + 1 / t**2 + 1 / (1 + t) ** 2)) / 2
    return table.log_moment(t) - math.log(t) - math.log1p(t) - width


def _spread(table: LossTable, t: float) -> float:
    step = 0.02 * t
    second = table.log_moment(t + step) + table.log_moment(t - step) - 2 * table.log_moment(t)
    return math.sqrt(max(second, 1e-300)) / step


@dataclass(frozen=True)
class Aim:
    """The epsilon that parameters are chosen for, about -d log(delta) / d epsilon there, and the tilt t.

    `tilts` and `moments` are a table (N,) of t' and K(t'); `log_scale` is log of delta, in units of the Chernoff bounds
    below; the period is 2 pi / D.
    """

    epsilon: float
    slope: float
    tilt: float
    tilts: Array
    moments: Array
    log_scale: float
    period: float
    fine: float = 1.0

    @property
    def scale(self) -> float:
        """The epsilon that errors are relative to: one that is next to 0 counts as a hundredth of log delta."""
        return max(self.epsilon, 0.01 / self.slope)

    def importance(self, loss: Array) -> tuple[Array, Array]:
        """Relative error of delta if one step's loss is put on the ends of a cell of width h, over h^2 / 12: log; t'.

        The other steps make up for epsilon - loss with probability `e^(K(t') - t' (epsilon - loss))` at most; the
        relative error of keeping both masses is `t' (1 + t') h^2 / 12`, and 0 far above epsilon.
        """
        where = self.epsilon - loss
        some = np.sort(where.ravel()[:: 1 + where.size // 20_000])
        need = some[np.linspace(0, len(some) - 1, 512).astype(np.intp)]
        exponents = self.moments - np.outer(need, self.tilts)
        best = np.argmin(exponents, axis=1)
        tilts = self.tilts[best]
        log_weight = exponents[np.arange(len(need)), best] + np.log(tilts * (1 + tilts)) - self.log_scale
        return np.interp(where, need, log_weight), np.interp(where, need, tilts)


def make_aim(coarse: LossTable, epsilon: float, slope: float, t: float, log_delta: float, fine: float = 1.0) -> Aim:
    """The parameters for an epsilon; `coarse` is a table of few kinds that represent all, and t is the saddle.

    A t below the saddle is taken where that allows a shorter period, and makes the integrand larger by e^5 at most.
    With a period 2 pi / D the other terms of the sum are below 1e-8 of the wanted one, by Chernoff bounds.
    """
    factors = np.concatenate(
        [np.geomspace(1e-3, 0.1, 8)[:-1], np.linspace(0.1, 1.5, 15), np.geomspace(1.5, 300.0, 20)[1:]]
    )
    tilts = t * factors
    moments = np.array([coarse.log_moment(float(tilt)) for tilt in tilts])
    exponents = moments - tilts * epsilon
    width = math.log(max(1.0, 2.5 * _spread(coarse, t) * t))
    size = exponents - np.log(tilts) - np.log1p(tilts)
    saddle_at = int(np.argmin(np.abs(factors - 1)))
    choices = [i for i in range(saddle_at + 1) if factors[i] > 0.4 and size[i] <= size[saddle_at] + 5]
    periods = []
    for one in tilts[choices]:
        rooms = (exponents - log_delta + 18.4) / (np.maximum(np.abs(tilts / one - 1), 0.03) * one)
        periods.append(float(max(rooms[tilts < 0.97 * one].min(), rooms[tilts > 1.03 * one].min(), 4.0 / one)))
    best = int(np.argmin(periods))
    log_scale = min(float(exponents.min()), log_delta + width)
    return Aim(epsilon, slope, float(tilts[choices[best]]), tilts, moments, log_scale, periods[best], fine)


def choose_ends(table: LossTable, aim: Aim) -> list[Array]:
    """The ends of the cells of each kind, such that epsilon rises by about `_CELL_ERROR` of itself.

    Cells of loss width h and mass p raise log delta by `sum T p importance h^2 / 12`: the best density of cells is
    proportional to `(p importance h^2)^(1/3)`, but importance and tilt may not change much in a cell.
    """
    spacing = (table.x[:, 1] - table.x[:, 0])[:, None]
    log_importance, tilts = aim.importance(table.loss)
    log_weight = table.log_mass + log_importance - np.log(spacing)
    slope = np.abs(np.gradient(table.loss, axis=1)) / spacing
    bulk = np.exp(np.minimum(log_weight, 300.0) / 3) * slope ** (2 / 3)
    integral = bulk.sum(axis=1) * spacing[:, 0]
    share = np.cbrt(table.steps)
    error = _CELL_ERROR if len(share) < _MANY_KINDS else _MANY_CELL_ERROR
    counts = share * math.sqrt(float(share @ integral) / (12 * error * aim.fine * aim.scale * aim.slope))
    counts = np.minimum(counts, _MAX_CELLS / np.maximum(integral, 1e-300))
    live = np.exp(np.minimum(0.0, (log_weight - log_weight.max(axis=1, keepdims=True)) / 12))
    change = np.where(table.loss > aim.epsilon, aim.tilt, tilts * np.maximum(live, 0.05))
    change = np.minimum((8.0 if len(share) < _MANY_KINDS else 2.0) * change * slope, 1 / spacing)
    density = bulk * counts[:, None] + change + 16.0 / (table.x[:, -1:] - table.x[:, :1])
    total = np.zeros_like(density)
    np.cumsum((density[:, 1:] + density[:, :-1]) / 2 * spacing, axis=1, out=total[:, 1:])
    ends = []
    for x, cells in zip(table.x, total, strict=True):
        number = math.ceil(1.1 ** math.ceil(math.log(cells[-1], 1.1)))  # few different numbers
        edges = np.interp(np.linspace(0.0, cells[-1], number + 1), cells, x)
        apart = np.diff(edges) > 1e-12 * np.abs(edges[1:])
        ends.append(edges if apart.all() else edges[np.append(True, apart)])
    return ends
