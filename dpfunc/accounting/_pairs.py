"""Laws of few losses that dominate one release: capped batches, Laplace noise, a stated guarantee, an epoch."""

import functools
import math

import numpy as np
from numpy.typing import NDArray

from dpfunc.accounting import _losses as losses
from dpfunc.accounting._losses import MEANS, ULP, Array, Atoms, Direction

_CELLS = 100  # of one standard deviation: the variance of a loss rises by 2e-5 of itself
_BULK, _REACH = 9.5, 38.0  # standard deviations: of fine cells, and of all; beyond are 1e-315 of the mass
_LAPLACE_CELLS = 2000
LARGEST_LOSS = 700.0  # e^700 fits into float64
_POINTS, _MOST = 2**15, 2**17  # of the grid of an epoch
_EPOCH_CELLS = 64  # of the loss of a record that does not take part, if there is room
_TILTS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
_STEP_REACH = 10.5  # standard deviations of one step that the grid has
_LOW, _KEPT = -40.0, 3000  # the least loss, and the number of losses, of the law of an epoch


def dominating(loss: Array, p: Array, q: Array, below: float, infinite: Array | float = 0.0) -> Atoms:
    """The law of cells with these losses at their ends (n,) and masses under P and Q (n - 1,), and one below them."""
    with np.errstate(over="ignore", invalid="ignore"):
        excess = p - np.exp(loss[:-1]) * q
    mass = losses.connected(loss, p, excess)
    mass[0] += below
    return Atoms(mass, loss, np.asarray(infinite))


def joined(above: Atoms, other: Atoms) -> Atoms:
    """The law with the losses > 0 of one law, and those < 0 that the other order of the neighbours has as losses > 0.

    Delta at -epsilon is that of the other order at epsilon, up to a factor. What is left of the mass has loss 0.
    """
    up, down = above.loss > 0, other.loss > 0
    mass = np.append(above.mass[up], (other.mass * np.exp(-other.loss))[down])
    loss = np.append(above.loss[up], -other.loss[down])
    rest = 1 - float(mass.sum()) - float(above.infinite)
    losses.conserved(float(mass @ np.exp(-loss)) + rest + float(other.infinite))
    return Atoms(np.append(mass, max(rest, 0.0)), np.append(loss, 0.0), above.infinite)


def _ends(s: float, low: float, high: float) -> Array:
    """Ends of cells for normals of standard deviation s with means in low..high."""
    fine = np.arange(low - _BULK * s, high + _BULK * s, s / _CELLS)
    return np.append(fine, np.arange(fine[-1] + s / 5, high + _REACH * s, s / 5))


def gaussian(q: float, s: float, direction: Direction) -> Atoms:
    return losses.atoms(q, s, _ends(s, min(0.0, *MEANS[direction]), max(0.0, *MEANS[direction])), direction)


@functools.lru_cache(maxsize=256)
def capped(q: float, s: float, n: int, cap: int, direction: Direction) -> Atoms:
    """The law of a batch of a Poisson sample that is cut to `cap` records; see `Capped`."""
    from scipy.stats import binom

    if q == 1:
        return without_replacement(min(cap / n, 1.0), s, direction)
    full = float(binom.sf(cap - 1, n - 1, q))  # the others alone fill the batch
    if full < 1e-300:
        return gaussian(q, s, direction)
    kept = min(1.0, float(binom.sf(cap, n, q)) * cap / n / full)  # the record is in such a batch
    displaced = gaussian(kept, s / 2 if direction == "replace" else s / 4, "replace")
    poisson = gaussian(q, s, direction)
    return Atoms(  # of both: which one it is is seen
        np.append(full * displaced.mass, (1 - full) * poisson.mass),
        np.append(displaced.loss, poisson.loss),
        full * displaced.infinite + (1 - full) * poisson.infinite,
    )


def without_replacement(q: float, s: float, direction: Direction) -> Atoms:
    """The law of a batch of a fixed share q of all records; see `Capped`."""
    one = losses.atoms(q, s, np.union1d(_ends(s, 0.0, 1.0), 0.5), "remove")  # 1/2 has loss 0
    if direction == "replace":
        return joined(one, one)
    two = _displaced(q, s)
    return joined(two, one) if direction == "remove" else joined(one, two)


def _displaced(q: float, s: float) -> Atoms:
    """Losses >= 0 of `P = (1-q) N(0) + q N(2)` and `Q = (1-q) N(0) + q N(1)`: there they increase with x."""
    # loss 0 is at e^((x - 3/2) / s^2) = 1
    x = _ends(s, 1.5 + _BULK * s, 2.0)
    x = np.append(1.5, x[x > 1.5])
    parts = [losses.normal_masses((np.append(x, np.inf) - mean) / s) for mean in (0.0, 1.0, 2.0)]
    p, q_ = (1 - q) * parts[0] + q * parts[2], (1 - q) * parts[0] + q * parts[1]
    log_p, log_q = (
        np.logaddexp(np.log1p(-q) if q < 1 else -np.inf, np.log(q) + (m * x - m * m / 2) / s**2) for m in (2.0, 1.0)
    )
    loss = log_p - log_q
    loss[0] = 0.0
    return dominating(loss, p[:-1], q_[:-1], 0.0, p[-1])


@functools.lru_cache(maxsize=256)
def laplace(q: float, b: float, direction: Direction) -> Atoms:
    """The law of a number with Laplace noise of scale b, 1 from its neighbour; the loss is constant beyond both."""
    if 1 / b > LARGEST_LOSS:
        return stated(1 / b, 0.0)  # such a loss has no exponential
    means = MEANS[direction]
    x = np.linspace(min(0.0, *means), max(0.0, *means), max(_LAPLACE_CELLS, math.ceil(_CELLS / b)) + 1)
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


@functools.lru_cache(maxsize=64)
def allocated(t: int, s: float, direction: Direction) -> Atoms:
    """The law of an epoch in which each record is in one of t batches, drawn independently of others.

    P, the epoch, is the mixture of `N(e_i, s^2)`, i = 1..t, and Q is `N(0, s^2)`. Let P' be t Poisson-sampled steps
    with q = 1/t, given that the record is in one at least. (P', Q) dominates (P, Q) in both orders: the best test for
    (P, Q) is a set of outputs that grow in each coordinate, and one more participation makes it more likely. The
    sampled steps are `(1 - p) Q + p P'` with p = 1 - (1 - q)^t: P'/Q follows from their law, whose masses are powers of
    transforms of tilted laws, with an error that is added. Feldman and Shenfeld 2025, arXiv 2502.08202. Where nothing
    better is known, it is the law of one release of all records.
    """
    from scipy.fft import next_fast_len

    whole = gaussian(1.0, s, direction)
    top = -math.log1p(-1 / t)
    span = 2 * (math.log1p(math.expm1(min((0.5 + _STEP_REACH * s) / s**2, 300.0)) / t) + 2.0)
    cells = min(max(_EPOCH_CELLS, math.floor(top * _POINTS / span)), math.floor(top * _MOST / span))
    if direction == "replace" or cells < 1:
        return whole
    step = _one_step(t, s, direction, top, cells, span / 2)
    points = next_fast_len(math.ceil(span / top * cells), real=True)
    loss, mass, infinite = _power(step, t, top / cells, direction, points)
    p, ratio = -math.expm1(-t * top), np.exp(loss if direction == "remove" else -loss)
    rest = np.maximum(ratio - (1 - p), 0.0) / p  # P'/Q
    rest[0] = 0.0  # by rounding it is not
    if direction == "remove":
        mass, infinite = mass / ratio * rest, infinite / p
        ahead = np.log(np.maximum(rest, math.exp(_LOW)))
    else:
        infinite, mass, rest = infinite + float(mass[0]), mass[1:], rest[1:]
        ahead = -np.log(np.maximum(rest, 1e-300))
    return _fewer(Atoms(mass, np.maximum(ahead, _LOW), np.array(infinite)))


def _one_step(t: int, s: float, direction: Direction, top: float, cells: int, reach: float) -> Atoms:
    """The law of a Poisson-sampled step at multiples of `top / cells`, from its end that is `top` away from 0."""
    grid: Array = np.arange(-cells, math.ceil(reach / top * cells) + 1, dtype=np.float64) * (top / cells)
    remove = direction == "remove"
    loss = grid if remove else -grid[::-1]
    x = losses.point(1 / t, s, loss, direction)
    x[0 if remove else -1] = -np.inf if remove else np.inf
    middle, ahead, behind = losses.part_masses(s, np.concatenate([[-np.inf], x, [np.inf]]), direction)
    p: Array = (1 - 1 / t) * middle + ahead / t
    q: Array = (1 - 1 / t) * middle + behind / t
    return dominating(loss, p[1:-1], q[1:-1], float(p[0]), p[-1] if remove else 0.0)


def _power(step: Atoms, t: int, width: float, direction: Direction, points: int) -> tuple[Array, Array, float]:
    """Losses of t steps from the end of the grid on, bounds on their masses, and on the mass of an infinite loss."""
    from scipy.fft import irfft, rfft

    remove = direction == "remove"
    mass, loss = (step.mass, step.loss) if remove else (step.mass[::-1], step.loss[::-1])
    total = t * loss[0] + np.arange(points) * (width if remove else -width)
    log_mass = np.full(points, np.inf)
    log_tail = math.inf
    for tilt in _TILTS:
        with np.errstate(divide="ignore"):
            exponents = np.log(mass) + tilt * loss
        moment = float(np.logaddexp.reduce(exponents))
        weight = np.exp(exponents - moment)
        if tilt and t * float(weight @ loss) > total.max():
            break
        found = np.maximum(irfft(_to_the(rfft(weight, points), t), points), 0.0) + ULP * (t + 64)
        log_mass = np.minimum(log_mass, np.log(found) + t * moment - tilt * total)
        log_tail = min(log_tail, t * moment - tilt * float(total[-1]))
    beyond = math.exp(log_tail) + t * float(step.infinite) if remove else 0.0  # what is folded there is lower
    return total, np.exp(np.minimum(log_mass, 0.0)), beyond


def _to_the(base: NDArray[np.complex128], power: int) -> NDArray[np.complex128]:
    """A power by squares: faster than complex logarithms."""
    found = np.ones_like(base)
    while power:
        if power % 2:
            found *= base
        base = base * base
        power //= 2
    return found


def _fewer(law: Atoms) -> Atoms:
    """A law of fewer losses that dominates: each mass is put on the ends of its cell, both masses are kept."""
    order = np.argsort(law.loss)
    loss, mass = law.loss[order], law.mass[order]
    mean = float(mass @ loss / mass.sum())
    deviation = math.sqrt(float(mass @ (loss - mean) ** 2 / mass.sum()))
    near = np.clip(mean + deviation * np.linspace(-10, 10, _KEPT // 2), loss[0], loss[-1])
    ends = np.unique(np.concatenate([near, np.linspace(loss[0], loss[-1], _KEPT // 2)]))
    place = np.clip(np.searchsorted(ends, loss, "right") - 1, 0, len(ends) - 2)
    low, high = ends[place], ends[place + 1]
    share = np.clip(np.expm1(low - loss) / np.expm1(low - high), 0.0, 1.0)
    kept: Array = np.bincount(place, mass * (1 - share), len(ends)).astype(np.float64)
    return Atoms(kept + np.bincount(place + 1, mass * share, len(ends)), ends, law.infinite)
