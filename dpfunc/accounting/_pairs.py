"""Laws of few losses that dominate one release: capped batches, Laplace noise, a stated guarantee, an epoch.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import functools
import math

import numpy as np

from dpfunc.accounting import _losses as losses
from dpfunc.accounting._allocation import allocated
from dpfunc.accounting._losses import MEANS, Array, Atoms, Direction

CELLS, FINE_CELLS = 100, 1500  # of one standard deviation: the variance of a loss rises by 2e-5 of itself, or 1e-7
_BULK, _REACH = 9.5, 38.0  # standard deviations: of fine cells, and of all; beyond are 1e-315 of the mass
_LAPLACE_CELLS = 2000
LARGEST_LOSS = 700.0  # e^700 fits into float64


def dominating(loss: Array, p: Array, q: Array, infinite: Array | float = 0.0) -> Atoms:
    """The law of cells with these losses at their ends (n,) and masses under P and Q (n - 1,)."""
    with np.errstate(over="ignore", invalid="ignore"):
        excess = p - np.exp(loss[:-1]) * q
    return Atoms(losses.connected(loss, p, excess), loss, np.asarray(infinite))


def joined(above: Atoms, other: Atoms) -> Atoms:
    """Positive losses of one direction, and negative ones mirrored from the other.

    Delta at -epsilon is that of the other order at epsilon, up to a factor. What is left of the mass has loss 0.
    """
    up, down = above.loss > 0, other.loss > 0
    mass = np.append(above.mass[up], (other.mass * np.exp(-other.loss))[down])
    loss = np.append(above.loss[up], -other.loss[down])
    rest = 1 - float(mass.sum()) - float(above.infinite)
    losses.conserved(float(mass @ np.exp(-loss)) + rest + float(other.infinite))
    return Atoms(np.append(mass, max(rest, 0.0)), np.append(loss, 0.0), above.infinite)


def _ends(s: float, low: float, high: float, cells: int) -> Array:
    """Ends of cells for normals of standard deviation s with means in low..high."""
    fine = np.arange(low - _BULK * s, high + _BULK * s, s / cells)
    return np.append(fine, np.arange(fine[-1] + s / 5, high + _REACH * s, s / 5))


def gaussian(q: float, s: float, direction: Direction, cells: int = CELLS) -> Atoms:
    return losses.atoms(q, s, _ends(s, min(0.0, *MEANS[direction]), max(0.0, *MEANS[direction]), cells), direction)


@functools.lru_cache(maxsize=256)
def capped(q: float, s: float, n: int, cap: int, direction: Direction, cells: int = CELLS) -> Atoms:
    """The law of a batch of a Poisson sample that is cut to `cap` records; see `Capped`."""
    from scipy.stats import binom

    if q == 1:
        return without_replacement(min(cap / n, 1.0), s, direction, cells)
    full = float(binom.sf(cap - 1, n - 1, q))  # the others alone fill the batch
    if full < 1e-300:
        return gaussian(q, s, direction, cells)
    kept = min(1.0, float(binom.sf(cap, n, q)) * cap / n / full)  # the record is in such a batch
    displaced = gaussian(kept, s / 2 if direction == "replace" else s / 4, "replace", cells)
    poisson = gaussian(q, s, direction, cells)
    return Atoms(  # of both: which one it is is seen
        np.append(full * displaced.mass, (1 - full) * poisson.mass),
        np.append(displaced.loss, poisson.loss),
        full * displaced.infinite + (1 - full) * poisson.infinite,
    )


def without_replacement(q: float, s: float, direction: Direction, cells: int = CELLS) -> Atoms:
    """The law of a batch of a fixed share q of all records; see `Capped`."""
    one = losses.atoms(q, s, np.union1d(_ends(s, 0.0, 1.0, cells), 0.5), "remove")  # 1/2 has loss 0
    if direction == "replace":
        return joined(one, one)
    two = _displaced(q, s, cells)
    return joined(two, one) if direction == "remove" else joined(one, two)


def _displaced(q: float, s: float, cells: int) -> Atoms:
    """Losses >= 0 of `P = (1-q) N(0) + q N(2)` and `Q = (1-q) N(0) + q N(1)`: there they increase with x."""
    # loss 0 is at e^((x - 3/2) / s^2) = 1
    x = _ends(s, 1.5 + _BULK * s, 2.0, cells)
    x = np.append(1.5, x[x > 1.5])
    parts = [losses.normal_masses((np.append(x, np.inf) - mean) / s) for mean in (0.0, 1.0, 2.0)]
    p, q_ = (1 - q) * parts[0] + q * parts[2], (1 - q) * parts[0] + q * parts[1]
    log_p, log_q = (
        np.logaddexp(np.log1p(-q) if q < 1 else -np.inf, np.log(q) + (m * x - m * m / 2) / s**2) for m in (2.0, 1.0)
    )
    loss = log_p - log_q
    loss[0] = 0.0
    return dominating(loss, p[:-1], q_[:-1], p[-1])


@functools.lru_cache(maxsize=256)
def laplace(q: float, b: float, direction: Direction, cells: int = CELLS) -> Atoms:
    """The law of a number with Laplace noise of scale b, 1 from its neighbour; the loss is constant beyond both."""
    if 1 / b > LARGEST_LOSS:
        return stated(1 / b, 0.0)  # such a loss has no exponential
    if direction == "replace":  # the number without a record can be that of its neighbour, and 1 away from its own
        one = laplace(q, b, "remove", cells)
        return joined(one, one)
    means = MEANS[direction]
    x = np.linspace(min(0.0, *means), max(0.0, *means), max(_LAPLACE_CELLS * cells // CELLS, math.ceil(cells / b)) + 1)
    edges = np.concatenate([[-np.inf], x, [np.inf]])
    masses = np.stack([_laplace_masses(edges - mean, b) for mean in (0.0, *means)])
    p = (1 - q) * masses[0] + q * masses[1]
    ahead, behind = ((np.abs(x) - np.abs(x - mean)) / b for mean in means)
    loss = losses.log_ratio(q, ahead) - losses.log_ratio(q, behind)
    gap = losses.excess(q, masses[:, 1:-1], np.exp(ahead[:-1]), np.exp(behind[:-1]))
    mass = losses.connected(loss, p[1:-1], gap)
    mass[0] += p[0]
    mass[-1] += p[-1]
    losses.conserved(float(mass.sum()), float(mass @ np.exp(-loss)))
    return Atoms(mass, loss, np.zeros(()))


def _laplace_masses(x: Array, b: float) -> Array:
    """Masses of Laplace noise of scale b between increasing x, with small relative error in both tails."""
    below, above = np.exp(np.minimum(x, 0.0) / b) / 2, np.exp(-np.maximum(x, 0.0) / b) / 2
    both = np.where(x[1:] <= 0, below[1:] - below[:-1], 1 - below[:-1] - above[1:])
    return np.asarray(np.where(x[:-1] >= 0, above[:-1] - above[1:], both))


def stated(epsilon: float, delta: float) -> Atoms:
    """The law that dominates all that is (epsilon, delta)-private: Kairouz, Oh and Viswanath 2015, Theorem 3.4."""
    share = (1 - delta) / (1 + math.exp(-epsilon))
    return Atoms(np.array([1 - delta - share, share]), np.array([-epsilon, epsilon]), np.array(delta))


def epoch(t: int, s: float, direction: Direction) -> Atoms:
    """The law of an epoch in which each record is in one of t batches; of a release of all where none is known."""
    return allocated(t, s).get(direction) or gaussian(1.0, s, direction)
