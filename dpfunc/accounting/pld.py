"""Replace-one neighbours, for which opacus has no accountant: a pessimistic privacy loss distribution and FFTs.

In units of the sensitivity (2 C) a step compares P = (1-q) N(0, s^2) + q N(+1/2, s^2) with the same at -1/2; the pair
is its own mirror image. Loss values are moved to a grid so that both masses of each cell are kept, which interpolates
delta linearly in exp(epsilon) and therefore never under-reports (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022,
Connect the Dots, section 4).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dpfunc.accounting.prv import NotApplicable, merge
from dpfunc.types import Event

SMALLEST_DELTA = 1e-9  # FFTs round at about 1e-16 absolute
LARGEST_GRID = 2**23
RELATIVE_ERROR = 1e-3
Array = npt.NDArray[np.float64]


def loss_quantile(losses: Array, q: float, s: float) -> Array:
    """The x at which log P(x)/Q(x) takes each value: a quadratic in exp(x / 2 s^2), solved without cancellation."""
    k = math.exp(-1 / (8 * s * s))
    e = np.exp(losses)
    b = (1 - q) * (1 - e)
    root = np.sqrt(b * b + 4 * (q * k) ** 2 * e)
    with np.errstate(divide="ignore"):
        u = np.where(b > 0, 2 * e * q * k / (b + root), (root - b) / (2 * q * k))
        return np.asarray(2 * s * s * np.log(u))


def cell_masses(x: Array, centres: tuple[tuple[float, float], ...], s: float) -> Array:
    """Mass of a mixture of normals between neighbouring x, with -inf and inf at the ends."""
    from scipy.special import ndtr

    edges = np.concatenate([[-np.inf], x, [np.inf]])
    total = np.zeros(len(edges) - 1)
    for weight, centre in centres:
        z = (edges - centre) / s
        below, above = np.diff(ndtr(z)), -np.diff(ndtr(-z))
        total += weight * np.where(z[:-1] > 0, above, below)  # the difference of small numbers, not of numbers near 1
    return total


def discretize(event: Event, h: float, tail: float) -> tuple[Array, int, float]:
    """One step on the grid: masses, index of the first one (in units of h), and mass at infinite loss."""
    from scipy.special import ndtri

    q, s = event.sampling_prob, event.noise_multiplier
    reach = 0.5 - s * float(ndtri(tail))  # beyond it lies less than `tail`
    k = math.exp(-1 / (8 * s * s))
    u = reach / (2 * s * s)
    top = math.log((1 - q) + q * k * math.exp(u)) - math.log((1 - q) + q * k * math.exp(-u))
    count = max(2, math.ceil(top / h) + 1)
    if count > LARGEST_GRID // 4:
        raise NotApplicable(f"the loss of one step needs a grid of {2 * count} points")
    losses: Array = np.arange(-count, count + 1, dtype=np.float64) * h
    x = loss_quantile(losses, q, s)
    p = cell_masses(x, ((1 - q, 0.0), (q, 0.5)), s)
    r = cell_masses(x, ((1 - q, 0.0), (q, -0.5)), s)
    inner_p, inner_r = p[1:-1], r[1:-1]
    up = np.clip((inner_p - np.exp(losses[:-1]) * inner_r) / -math.expm1(-h), 0.0, inner_p)
    masses = np.zeros(len(losses))
    masses[1:] += up
    masses[:-1] += inner_p - up
    masses[0] += p[0]  # moved up to the lowest loss
    return masses, -count, float(p[-1])


def chernoff(parts: list[tuple[Array, int, float]], steps: list[int], h: float, sign: int, tail: float) -> float:
    """A loss that the composition exceeds (in the direction of sign) with probability below `tail`."""
    best = math.inf
    for t in np.geomspace(1e-2, 1e4, 60):
        total = 0.0
        for (masses, first, _), count in zip(parts, steps, strict=True):
            values = sign * (first + np.arange(len(masses))) * h * t
            top = values.max()
            total += count * (top + math.log(float(masses @ np.exp(values - top))))
        best = min(best, (total - math.log(tail)) / t)
    return best


def replace_one_epsilon(events: tuple[Event, ...], delta: float, rough: float) -> float:
    """Upper bound on epsilon for replace-one neighbours, above the truth by about 0.1 %.

    Args:
        events: noise multipliers relative to the sensitivity 2 C. delta: >= 1e-9. rough: a bound, for the grid.

    Raises:
        NotApplicable: delta too small, or the grid too large.
    """
    if delta < SMALLEST_DELTA:
        raise NotApplicable(f"the numerical accountant needs delta >= {SMALLEST_DELTA:g}")
    events = merge(events)
    steps = [event.num_steps for event in events]
    tail = delta * 1e-4
    # The split of a cell adds variance h^2 / 4 a step at most, which raises epsilon a little.
    h = min(0.1, math.sqrt(8 * RELATIVE_ERROR * min(max(rough, 1e-3), 4.0) / (sum(steps) * 20)))
    parts = [discretize(event, h, tail / sum(steps)) for event in events]
    high = chernoff(parts, steps, h, +1, tail)
    low = -chernoff(parts, steps, h, -1, tail)
    size = 2 ** math.ceil(math.log2((high - low) / h + 2))
    if size > LARGEST_GRID:
        raise NotApplicable(f"the numerical accountant would need a grid of {size} points")
    spectrum = np.ones(size // 2 + 1, dtype=complex)
    finite = 1.0
    for (masses, first, infinite), count in zip(parts, steps, strict=True):
        folded = np.bincount((first + np.arange(len(masses))) % size, weights=masses, minlength=size)
        spectrum *= np.fft.rfft(folded) ** count
        finite *= (1 - infinite) ** count
    composed = np.fft.irfft(spectrum, size)
    start = math.floor(low / h)
    losses = (start + np.arange(size)) * h
    composed = np.roll(composed, -(start % size))
    rounding = 10 * float(-composed[composed < 0].sum())
    return _solve(losses, np.maximum(composed, 0.0), 1 - finite + 2 * tail + rounding, delta)


def _solve(losses: Array, masses: Array, excess: float, delta: float) -> float:
    """The smallest epsilon with `sum_{L > eps} p(L) (1 - exp(eps - L)) + excess <= delta`."""
    if excess >= delta:
        raise NotApplicable("rounding errors exceed delta")
    kept = losses > 0
    losses, masses = losses[kept], masses[kept]
    above = np.cumsum(masses[::-1])[::-1]
    weighted = np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
    deltas = above - np.exp(losses) * weighted + excess  # at epsilon = each loss
    index = int(np.searchsorted(-deltas, -delta))
    if index >= len(losses):
        raise NotApplicable("the window is too small")
    # Between two grid points delta(eps) = above - exp(eps) * weighted + excess, exactly.
    remaining = above[index] + excess - delta
    return 0.0 if remaining <= 0 else max(0.0, math.log(remaining / weighted[index]))
