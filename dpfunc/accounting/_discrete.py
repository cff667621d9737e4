"""Laws of losses of discrete noise and of answers, and of mixtures of Gaussians.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import functools
import math

import numpy as np

from dpfunc.accounting import _losses as losses
from dpfunc.accounting._losses import Array, Atoms, Direction
from dpfunc.accounting._pairs import CELLS, LARGEST_LOSS, dominating, stated

_REACH = 38.0  # standard deviations; beyond are 1e-315 of the mass
_LEAST_NOISE = 1e-4  # of a mixture, relative to its largest distance: it has a cell for each 1 / 200 of it
_MOST = 4000  # integers that are not put together


@functools.lru_cache(maxsize=256)
def discrete_gaussian(q: float, s: float, k: int, direction: Direction) -> Atoms:
    """The law of an integer with noise `e^(-x^2 / (2 s^2))`, moved by k."""
    reach = math.ceil(_REACH * s) + 1
    x = np.arange(-reach, reach + k + 1, dtype=np.float64)
    plain, moved = (np.exp(-((x - mean) ** 2) / (2 * s * s)) for mean in (0, k))
    total = float(plain.sum())
    return _shifted(q, plain / total, moved / total, (x - k / 2) * k / (s * s), direction)


@functools.lru_cache(maxsize=256)
def discrete_laplace(q: float, b: float, k: int, direction: Direction) -> Atoms:
    """The law of an integer with noise `e^(-|x| / b)`, moved by k; the loss is constant beyond both modes."""
    if k / b > LARGEST_LOSS:
        return stated(k / b, 0.0)  # such a loss has no exponential
    x = np.arange(k + 1, dtype=np.float64)
    plain = np.exp(-x / b) * math.tanh(1 / (2 * b))
    tail = 1 / (1 + math.exp(-1 / b))  # of a mode and what is beyond
    plain[[0, -1]] = tail, math.exp(-k / b) * tail
    return _shifted(q, plain, plain[::-1], (2 * x - k) / b, direction)


def _shifted(q: float, plain: Array, moved: Array, exponent: Array, direction: Direction) -> Atoms:
    """The law of outputs with these masses without and with the record, and the logarithms of their ratios, rising.

    Replaced records are not amplified: sampling is a mixture of the same pair and of one that tells nothing.
    """
    q = 1.0 if direction == "replace" else q
    mixed = (1 - q) * plain + q * moved
    loss = losses.log_ratio(q, exponent)
    p, other = mixed, plain
    if direction == "add":
        p, other, loss = plain[::-1], mixed[::-1], -loss[::-1]
    every = max(1, len(loss) // _MOST)
    if every == 1:
        return Atoms(p, loss, np.zeros(()))
    starts = np.arange(0, len(loss), every)
    ends = np.append(loss[starts], loss[-1])
    return dominating(ends, np.add.reduceat(p, starts), np.add.reduceat(other, starts))


def answers(noise: float, number: int) -> Atoms:
    """The law of randomised response for the answers that differ; all others carry no information."""
    if noise == 0:
        return losses.UNBOUNDED
    false = noise / number
    true = 1 - noise + false
    largest = math.log(true / false)
    return Atoms(np.array([false, (number - 2) * false, true]), np.array([-largest, 0.0, largest]), np.zeros(()))


@functools.lru_cache(maxsize=64)
def mixture(
    s: float, distances: tuple[float, ...], probs: tuple[float, ...], direction: Direction, cells: int = CELLS
) -> Atoms:
    """The law of `sum_i p_i N(c_i, s^2)` against `N(0, s^2)`; with the record the outputs are larger."""
    c, weight = np.array(distances)[:, None], np.array(probs)[:, None]
    if s < _LEAST_NOISE * c.max():
        return losses.UNBOUNDED
    low, high = -9.5 * s, float(c.max()) + 9.5 * s  # of fine cells
    far = np.arange(0.2, 28.5, 0.2) * s
    x = np.concatenate([low - far[::-1], np.arange(low, high, s / cells), high + far])
    edges = np.concatenate([[-np.inf], x, [np.inf]])
    plain = losses.normal_masses(edges / s)
    each = losses.normal_masses((edges - c) / s)
    mixed = (weight * each).sum(axis=0)
    exponents = (c * x - c * c / 2) / (s * s)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_ratio = np.logaddexp.reduce(np.log(weight) + exponents, axis=0)
        ratios = np.exp(exponents)
        raised = (weight * (each[:, 1:-1] - ratios[:, :-1] * plain[1:-1])).sum(axis=0)
        lowered = (weight * (ratios[:, 1:] * plain[1:-1] - each[:, 1:-1])).sum(axis=0) * np.exp(-log_ratio[1:])
    loss, p, gap = log_ratio, mixed, raised
    if direction == "add":
        loss, p, gap = -log_ratio[::-1], plain[::-1], lowered[::-1]
    mass = losses.connected(loss, p[1:-1], gap)
    mass[0] += p[0]
    losses.conserved(float(mass.sum()) + float(p[-1]))
    return Atoms(mass, loss, p[-1])
