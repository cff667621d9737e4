"""Law of the loss of an epoch in which each record is in one of t batches, drawn independently of others.

P, the epoch, is the mixture of `N(e_i, s^2)`, i = 1..t, and Q is `N(0, s^2)`. Let P' be t Poisson-sampled steps with
q = 1/t, given that the record is in one at least. (P', Q) dominates (P, Q) in both orders: the best test for (P, Q) is
a set of outputs that grow in each coordinate, and one more participation makes it more likely. The sampled steps are
`(1 - p) Q + p P'` with p = 1 - (1 - q)^t: P'/Q follows from their law, whose masses are powers of transforms of
tilted laws, with an error that is added. Feldman and Shenfeld 2025, arXiv 2502.08202.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from dpfunc.accounting._losses import Array, Direction, part_masses, point
from dpfunc.accounting._pairs import dominating, gaussian
from dpfunc.accounting._tilted_law import ULP, Atoms

_POINTS, _MOST = 2**15, 2**17  # of the grid
_CELLS = 64  # of the loss of a record that does not take part, if there is room
_TILTS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
_REACH = 10.5  # standard deviations of one step that the grid has
_LOW, _KEPT = -40.0, 3000  # the least loss, and the number of losses, of the law of an epoch


@functools.lru_cache(maxsize=64)
def allocated(t: int, s: float, direction: Direction) -> Atoms:
    """The law of one epoch; that of one release of all records where nothing better is known."""
    from scipy.fft import next_fast_len

    whole = gaussian(1.0, s, direction)
    top = -math.log1p(-1 / t)
    span = 2 * (math.log1p(math.expm1(min((0.5 + _REACH * s) / s**2, 300.0)) / t) + 2.0)
    cells = min(max(_CELLS, math.floor(top * _POINTS / span)), math.floor(top * _MOST / span))
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
    x = point(1 / t, s, loss, direction)
    x[0 if remove else -1] = -np.inf if remove else np.inf
    middle, ahead, behind = part_masses(s, np.concatenate([[-np.inf], x, [np.inf]]), direction)
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
        found = irfft(_to_the(rfft(weight, points), t), points)
        found = np.maximum(found, 0.0) + ULP * (t + 64)
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
