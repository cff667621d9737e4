"""Privacy losses of one step, as distributions, and discrete losses that dominate them: remove, add and replace.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

The output x of one step, projected on the direction of the record and in units of the sensitivity, is a mixture of
normals P on one data set and Q on its neighbour; the privacy loss `log(P(x) / Q(x))` increases with x.

Each cell's mass under P and Q is put on its two ends so that both masses are kept. That interpolates delta linearly in
e^epsilon ("connect the dots": Doroshenko et al. 2022), so the discrete pair dominates, whatever the cells are. What is
beyond the last cell counts as an infinite loss.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpfunc.accounting._gaussian import as_float
from dpfunc.errors import InvalidArgument
from dpfunc.types import Adjacency

Array = NDArray[np.float64]
Direction = Literal["remove", "add", "replace"]
_BOTH: tuple[Direction, ...] = ("remove", "add")
# Orders of two neighbours that cost differently.
DIRECTIONS: dict[Adjacency, tuple[Direction, ...]] = {
    "add_remove": _BOTH, "zero_out": _BOTH, "replace_one": ("replace",)
}  # fmt: skip


def log_ratio(q: Array | float, exponent: Array) -> Array:
    """`log(1 - q + q e^exponent)` for 0 < q <= 1, without overflow and to the last digits near 0."""
    near = np.clip(exponent, -1.0, 30.0)
    middle = np.log1p(q * np.expm1(near))
    high = exponent + np.log(q + (1 - q) * np.exp(-np.maximum(exponent, 30.0)))
    with np.errstate(divide="ignore"):  # q = 1
        low = np.logaddexp(np.log1p(-q), np.log(q) + np.minimum(exponent, 0.0))
    return np.where(exponent < -1.0, low, np.where(exponent > 30.0, high, middle))


def log_ratios(q: Array | float, s: Array | float, x: Array, direction: Direction) -> tuple[Array, Array]:
    """`log(P / N)` and `log(Q / N)` at the outputs x of one step with standard deviation s, for N = N(0, s^2).

    | direction | P | Q |
    |---|---|---|
    | remove | (1-q) N(0, s^2) + q N(1, s^2) | N(0, s^2) |
    | add | N(0, s^2) | (1-q) N(0, s^2) + q N(-1, s^2) |
    | replace | (1-q) N(0, s^2) + q N(1/2, s^2) | (1-q) N(0, s^2) + q N(-1/2, s^2) |
    """
    if direction == "remove":
        return log_ratio(q, (x - 0.5) / s**2), np.zeros_like(x)
    if direction == "add":
        return np.zeros_like(x), log_ratio(q, (-x - 0.5) / s**2)
    return log_ratio(q, (x - 0.25) / 2 / s**2), log_ratio(q, (-x - 0.25) / 2 / s**2)


# Means of the second parts of P and of Q, see `log_ratios`.
MEANS: dict[Direction, tuple[float, float]] = {"remove": (1.0, 0.0), "add": (0.0, -1.0), "replace": (0.5, -0.5)}


def part_masses(s: Array | float, edges: Array, direction: Direction) -> Array:
    """Masses between outputs (.., n + 1) of N(0, s^2) and of the second parts of P and of Q: (3, .., n)."""
    return np.stack([normal_masses((edges - mean) / s) for mean in (0.0, *MEANS[direction])])


def above(q: Array | float, s: Array | float, x: Array, masses: Array, direction: Direction) -> Array:
    """`P - e^loss Q` of outputs above x, which have these masses (see `part_masses`), for the loss at x."""
    up, down = (np.exp((mean * x - mean * mean / 2) / s**2) for mean in MEANS[direction])
    return excess(q, masses, up, down)


def excess(q: Array | float, masses: Array, up: Array, down: Array) -> Array:
    """`P - r Q` for `P = (1-q) N + q A` and `Q = (1-q) N + q B` with the masses (N, A, B), r = P/Q at one output.

    `up` and `down` are A/N and B/N there. What the mixtures have in common cancels before rounding: a bracket is 0
    where A or B is N.
    """
    middle, ahead, behind = masses
    terms = (1 - q) * ((ahead - up * middle) + (down * middle - behind)) + q * (down * ahead - up * behind)
    return np.asarray(q / ((1 - q) + q * down) * terms)


def loss_of(q: Array | float, s: Array | float, x: Array, direction: Direction) -> Array:
    return np.asarray(np.subtract(*log_ratios(q, s, x, direction)))


def point(q: float, s: float, loss: Array, direction: Direction) -> Array:
    """The output x that has a loss; -inf or inf for losses outside the range."""
    if direction == "add":
        return -point(q, s, -loss, "remove")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if direction == "replace":
            # q r (u/w - w/u) = 2 (1 - q) sinh(loss/2) for u = e^(x/2s^2), w = e^(loss/2), r = e^(-1/8s^2)
            ratio = (1 - q) / q * np.exp(1 / (8 * s**2))
            return np.asarray(s**2 * loss + 2 * s**2 * np.arcsinh(ratio * np.sinh(loss / 2)))
        if q == 1.0:
            return s**2 * loss + 0.5
        inside = np.expm1(loss) + q
        return np.where(inside > 0, s**2 * np.log(inside / q) + 0.5, -np.inf)


def normal_masses(z: Array) -> Array:
    """`Phi(z[i+1]) - Phi(z[i])`, with small relative error in both tails."""
    from scipy.special import ndtr

    below, above = np.diff(ndtr(z)), -np.diff(ndtr(-z))
    return np.asarray(np.where(z[..., :-1] > 0, above, below))


Kind = tuple[float, float, int]  # sampling_prob, noise_multiplier, num_steps

ULP = float(np.finfo(np.float64).eps)


class TiltedUnavailable(InvalidArgument):
    """The events are outside the domain of this accountant."""


def gaussian_part(kinds: Sequence[Kind]) -> float:
    """`mu^2 = sum T / sigma^2` of the events without sampling, rounded up."""
    terms = [as_float(count) / sigma / sigma if sigma > 1e-150 else math.inf for q, sigma, count in kinds if q == 1]
    return math.fsum(terms) * (1 + 4 * ULP) if all(map(math.isfinite, terms)) else math.inf


@dataclass(frozen=True)
class Atoms:
    """Discrete losses that dominate those of one step: masses under P (.., n), the mass of an infinite loss (..)."""

    mass: Array
    loss: Array
    infinite: Array


UNBOUNDED = Atoms(np.zeros(0), np.zeros(0), np.array(1.0))  # nothing is protected, or nothing is known


def _sums_above(loss: Array, mass: Array) -> tuple[Array, Array, Array]:
    """Positive losses, in order, and for each the probability of itself and larger ones under P and under Q."""
    positive = loss > 0
    t, p = loss[positive], mass[positive]
    return t, np.cumsum(p[::-1])[::-1], np.cumsum((p * np.exp(-t))[::-1])[::-1]


def epsilon_at(loss: Array, mass: Array, delta: float) -> float:
    """The smallest epsilon >= 0 with `sum_{loss > epsilon} p (1 - e^(epsilon - loss)) <= delta`, of losses in order."""
    t, above, scaled = _sums_above(loss, mass)
    above = above * (1 + 4 * ULP * len(t))  # rounded up, as in `delta_curve`: no digit of a tiny delta is left
    if not len(t) or above[0] - scaled[0] <= delta:  # at epsilon = 0
        return 0.0
    deltas = above - np.exp(t) * scaled  # delta at epsilon = t[i]; decreasing
    deltas[-1] = 0.0  # no loss is larger, whatever rounding says
    i = int(np.argmax(deltas <= delta))
    return max(0.0, min(float(np.log((above[i] - delta) / scaled[i])), float(t[-1])))


def delta_curve(law: Atoms) -> Callable[[float], float]:
    """Delta as a function of epsilon >= 0, rounded up; the inverse of `epsilon_at`."""
    order = np.argsort(law.loss)
    loss, above, scaled = _sums_above(law.loss[order], law.mass[order])
    rounding = 4 * ULP * len(loss)

    def delta(epsilon: float) -> float:
        i = int(np.searchsorted(loss, epsilon, side="right"))
        finite = 0.0 if i == len(loss) else float(above[i] * (1 + rounding) - math.exp(epsilon) * scaled[i])
        return finite + float(law.infinite)

    return delta


def conserved(*totals: Array | float) -> None:
    """Raise `TiltedUnavailable` unless each total mass is 1: lost mass would make the bound too low."""
    if not all(np.all(np.abs(total - 1) <= 1e-11) for total in totals):
        raise TiltedUnavailable(f"Expected masses that sum to 1, got {totals}. Use method 'rdp'.")


def connected(loss: Array, cells: Array, gap: Array) -> Array:
    """Masses at losses (.., n) of cells with masses P (.., n - 1) and `gap = P - e^loss Q`, loss at the lower end.

    A cell moves `gap / (1 - e^-width)` to its upper end.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        moved = gap / -np.expm1(-np.diff(loss))
    # where nothing can be computed all of it moves: ends of one loss, or the far end of little noise
    moved = np.where(np.isfinite(moved), np.clip(moved, 0.0, cells), cells)
    mass = np.zeros_like(loss)
    mass[..., :-1] += cells - moved
    mass[..., 1:] += moved
    return mass


def atoms(q: Array | float, s: Array | float, x: Array, direction: Direction, loss: Array | None = None) -> Atoms:
    """The atoms for cells with the ends x (.., n), for q and s that are numbers, or (.., 1); what is below is x[0].

    `loss` are the losses at the ends, where they are known.
    """
    loss = loss_of(q, s, x, direction) if loss is None else loss
    infinity = np.full_like(x[..., :1], np.inf)
    parts = part_masses(s, np.concatenate([-infinity, x, infinity], axis=-1), direction)
    p, q_ = (1 - q) * parts[0] + q * parts[1:]
    with np.errstate(over="ignore", invalid="ignore"):
        gap = above(q, s, x[..., :-1], parts[..., 1:-1], direction)
    mass = connected(loss, p[..., 1:-1], gap)
    kept = (mass * np.exp(-loss)).sum(axis=-1)
    mass[..., 0] += p[..., 0]
    conserved(p.sum(axis=-1), kept + q_[..., 0] + q_[..., -1])
    return Atoms(mass, loss, p[..., -1])


Fixed = tuple[int, Atoms]  # number of steps, and the law of one


@dataclass(frozen=True)
class Law:
    """The law of one kind's loss, tilted: weights that sum to 1 at losses about their mean; log sum p e^(t loss)."""

    steps: float
    weight: Array
    loss: Array
    mean: float
    log_moment: float
    infinite: float
    error: float  # bound on the relative rounding of one step's transform

    @property
    def variance(self) -> float:
        return float(self.steps * (self.weight @ (self.loss * self.loss)))


def tilt(atoms: Atoms, steps: float, t: float) -> Law:
    keep = atoms.mass > 0
    loss = atoms.loss[keep]
    exponents = np.log(atoms.mass[keep]) + t * loss
    top = float(exponents.max())
    weight = np.exp(exponents - top)
    total = float(weight.sum())
    weight /= total
    mean = float(weight @ loss)
    error = ULP * (64 + 512 * (1 + t) * float(weight @ np.abs(loss)) + abs(top))
    return Law(steps, weight, loss - mean, mean, math.log(total) + top, float(atoms.infinite), error)
