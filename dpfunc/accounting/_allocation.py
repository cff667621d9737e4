"""The law of an epoch in which each record is in one of t batches, drawn independently of others.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

P, the epoch, is the mixture of `N(e_i, s^2)`, i = 1..t, and Q is `N(0, s^2)`. Under Q their ratio is the mean R of t
independent ratios `Y = e^-L` with L ~ N(1 / (2 s^2), 1 / s^2): Feldman and Shenfeld 2026, arXiv 2602.17284. For both
orders of the neighbours and each epsilon

    delta(epsilon) = E_Q (R - e^epsilon)_+        delta(epsilon) = E_Q (1 - e^epsilon R)_+

are means of convex functions of the Y. So whatever spreads a Y, or a sum of some, and keeps its mean can only make
delta larger (Jensen): the rounded R with its mean of 1 is a pair that dominates. Sums have values on a geometric grid.
Each sum of two is put on the two ends of its cell such that its mean is kept, which has an error of second order in
the width of a cell; what is below the grid on 0 and its first value, what is above on its last value and infinity. The
ratio of two values decides where their sum lies, so all pairs at one distance are added as arrays.
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from dpfunc.accounting import _losses as losses
from dpfunc.accounting._losses import Array, Atoms

_POINTS = 6000  # of a grid
_REACH = 9.3  # standard deviations of one ratio on the grid: 7e-21 of the mass is beyond
_TAIL = 1e-20  # of the mass, or of the mean: what is cut off a grid
_MOST_NOISE = 1e4  # more is accounted as this much


@dataclass(frozen=True)
class _Sum:
    """A sum of ratios: masses (n) of the values `e^((start + i) width)` and of 0; the mean that is at infinity."""

    number: int
    width: float
    start: int
    mass: Array
    zero: float
    far: float

    @property
    def values(self) -> Array:
        return np.asarray(np.exp((self.start + np.arange(len(self.mass))) * self.width))


@functools.lru_cache(maxsize=64)
def allocated(t: int, s: float) -> dict[str, Atoms]:
    """Laws of an epoch of t >= 2 batches with noise s >= 0.08, for a record removed and added."""
    total = _sums(t, t, min(s, _MOST_NOISE))[0]
    ratio = total.values / t
    removed = total.mass * ratio
    losses.conserved(float(total.mass.sum()) + total.zero, float(removed.sum()) + total.far / t)
    return {
        "remove": Atoms(removed, np.log(ratio), np.asarray(total.far / t)),
        "add": Atoms(total.mass[::-1], -np.log(ratio[::-1]), np.asarray(total.zero)),
    }


def _sums(fewer: int, more: int, s: float) -> tuple[_Sum, _Sum]:
    """The sums of two numbers of ratios, which are equal or differ by 1, of one width: from those of their halves."""
    if fewer <= 1:
        one = _ratio(s)
        return one, one if more == 1 else _added(one, one, 1)
    small, large = _sums(fewer // 2, (more + 1) // 2, s)
    halves = {small.number: small, large.number: large}
    finer = max(1, round(1.5 * _POINTS / len(small.mass)))
    low = _added(halves[fewer // 2], halves[fewer - fewer // 2], finer)
    return low, low if more == fewer else _added(halves[more // 2], halves[more - more // 2], finer)


def _ratio(s: float) -> _Sum:
    """One ratio, a log-normal number of mean 1."""
    mean, end = -0.5 / s**2, _REACH / s
    width = 2 * (end - mean) / _POINTS
    grid = np.arange(math.floor((mean - end) / width), math.ceil((end - mean) / width) + 1)
    infinity = np.array([np.inf])
    ends = np.concatenate([-infinity, grid * width, infinity])
    q = losses.normal_masses((ends - mean) * s)
    p = losses.normal_masses((ends + mean) * s)  # the mean of Y in each cell
    values = np.exp(grid * width)
    raised = np.clip((p[1:-1] / values[:-1] - q[1:-1]) / math.expm1(width), 0.0, q[1:-1])
    mass = np.zeros(len(grid))
    mass[:-1] += q[1:-1] - raised
    mass[1:] += raised
    lowest = min(float(p[0] / values[0]), float(q[0]))
    mass[0] += lowest
    mass[-1] += q[-1]
    return _Sum(1, width, int(grid[0]), mass, float(q[0]) - lowest, max(0.0, float(p[-1] - q[-1] * values[-1])))


def _added(x: _Sum, y: _Sum, finer: int) -> _Sum:
    """The sum of two independent sums of one width, on a grid that is so many times finer."""
    width = x.width / finer
    after = np.arange(0 if x is y else 1 - len(y.mass), len(x.mass))  # places of a value of x after one of y
    above = np.logaddexp(0.0, -(after + x.start - y.start) * x.width) / width  # of their sum above that of x
    cells = np.floor(above).astype(np.intp)
    raised = np.clip(np.expm1((above - cells) * width) / math.expm1(width), 0.0, 1.0)  # share that keeps the mean
    lowest = finer * x.start + int(cells[-after[0]])  # of both first values
    highest = finer * (x.start + len(x.mass) - 1) + int(
        cells[len(x.mass) - len(y.mass) - after[0]]
    )  # of both last ones
    mass = np.zeros(highest - lowest + 2)
    zero = x.zero * y.zero
    for share_of_zero, other in ((x.zero, y), (y.zero, x)):
        places = finer * (other.start + np.arange(len(other.mass))) - lowest
        share = np.exp(np.minimum(places, 0) * width)  # what is below the lowest value goes there, and to 0
        np.add.at(mass, np.maximum(places, 0), share_of_zero * other.mass * share)
        zero += share_of_zero * float(other.mass @ (1 - share))
    for distance, cell, up in zip(after.tolist(), cells.tolist(), raised.tolist(), strict=True):
        begin, end = max(0, distance), min(len(x.mass), len(y.mass) + distance)
        both = x.mass[begin:end] * y.mass[begin - distance : end - distance]
        if x is y and distance:
            both *= 2
        first = finer * (x.start + begin) + cell - lowest
        last = first + finer * len(both)
        mass[first:last:finer] += (1 - up) * both
        mass[first + 1 : last + 1 : finer] += up * both
    return _trimmed(_Sum(x.number + y.number, width, lowest, mass, zero, x.far + y.far))


def _trimmed(x: _Sum) -> _Sum:
    """The same sum, of the same mean, without the ends of the grid that hold a negligible mass or mean."""
    values = x.values
    mean = np.cumsum((x.mass * values)[::-1]) / x.number
    low = int(np.searchsorted(np.cumsum(x.mass), _TAIL))
    high = len(values) - max(0, int(np.searchsorted(mean, _TAIL)) - 1)
    kept = x.mass[low:high].copy()
    share = values[:low] / values[low]
    kept[0] += float(x.mass[:low] @ share)
    kept[-1] += float(x.mass[high:].sum())
    zero = x.zero + float(x.mass[:low] @ (1 - share))
    far = x.far + float(x.mass[high:] @ (values[high:] - values[high - 1]))
    return replace(x, start=x.start + low, mass=kept, zero=zero, far=far)
