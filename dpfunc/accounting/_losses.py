"""Privacy losses of one step, as distributions: remove, add and replace one record.

The output of one step, projected on the direction of the record and in units of the sensitivity, is a mixture of
normals P on one data set and Q on its neighbour. Under the map `loss(x) = log(P(x) / Q(x))`, which is monotone here,
the law of x under P is the law of the privacy loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpfunc.types import Adjacency

Array = NDArray[np.float64]
Direction = Literal["remove", "add", "replace"]
_BOTH: tuple[Direction, ...] = ("remove", "add")
DIRECTIONS: dict[Adjacency, tuple[Direction, ...]] = {
    "add_remove": _BOTH, "zero_out": _BOTH, "replace_one": ("replace",)
}  # fmt: skip
"""Orders of two neighbours that cost differently."""

_REACH = 40.0  # normal mass beyond 40 standard deviations is below float64


def _log_ratio(q: Array | float, exponent: Array) -> Array:
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

    The privacy loss is their difference. In each row it increases with x.
    """
    if direction == "remove":
        return _log_ratio(q, (x - 0.5) / s**2), np.zeros_like(x)
    if direction == "add":
        return np.zeros_like(x), _log_ratio(q, (-x - 0.5) / s**2)
    return _log_ratio(q, (x - 0.25) / 2 / s**2), _log_ratio(q, (-x - 0.25) / 2 / s**2)


MEANS: dict[Direction, tuple[float, float]] = {"remove": (1.0, 0.0), "add": (0.0, -1.0), "replace": (0.5, -0.5)}
"""Means of the second parts of P and of Q, see `log_ratios`."""


def part_masses(s: Array | float, edges: Array, direction: Direction) -> Array:
    """Masses between outputs (.., n + 1) of N(0, s^2) and of the second parts of P and of Q: (3, .., n)."""
    return np.stack([normal_masses((edges - mean) / s) for mean in (0.0, *MEANS[direction])])


def above(q: Array | float, s: Array | float, x: Array, masses: Array, direction: Direction) -> Array:
    """`P - e^loss Q` of outputs above x, which have these masses (see `part_masses`), for the loss at x.

    What the two mixtures have in common cancels before rounding: in remove and add one bracket is 0.
    """
    middle, ahead, behind = masses
    up, down = (np.exp((mean * x - mean * mean / 2) / s**2) for mean in MEANS[direction])
    terms = (1 - q) * ((ahead - up * middle) + (down * middle - behind)) + q * (down * ahead - up * behind)
    return np.asarray(q / ((1 - q) + q * down) * terms)


@dataclass(frozen=True)
class StepLoss:
    """The privacy loss of one step, see `log_ratios`."""

    sampling_prob: float
    noise_multiplier: float
    direction: Direction

    @property
    def shift(self) -> float:
        """The mean of the second part of P."""
        return MEANS[self.direction][0]

    def loss(self, x: Array) -> Array:
        """Privacy loss `log(P(x) / Q(x))` of the outputs x."""
        log_p, log_q = log_ratios(self.sampling_prob, self.noise_multiplier, x, self.direction)
        return log_p - log_q

    def point(self, loss: Array) -> Array:
        """The x at which a loss is reached; -inf or inf for losses outside the range."""
        q, s = self.sampling_prob, self.noise_multiplier
        if self.direction == "replace":
            # q r (u/w - w/u) = 2 (1 - q) sinh(loss/2) for u = e^(x/2s^2), w = e^(loss/2), r = e^(-1/8s^2)
            with np.errstate(over="ignore"):
                ratio = (1 - q) / q * np.exp(1 / (8 * s**2))
                return np.asarray(s**2 * loss + 2 * s**2 * np.arcsinh(ratio * np.sinh(loss / 2)))
        if self.direction == "add":
            return -self._mixture_point(-loss)
        return self._mixture_point(loss)

    def _mixture_point(self, loss: Array) -> Array:
        q, s = self.sampling_prob, self.noise_multiplier
        if q == 1.0:
            return s**2 * loss + 0.5
        inside = np.expm1(loss) + q
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            x = s**2 * np.log(inside / q) + 0.5
        return np.where(inside > 0, x, -np.inf)

    def masses(self, edges: Array) -> Array:
        """The probabilities under P of the cells between increasing x: (n + 1,) -> (n,)."""
        middle, ahead, _ = part_masses(self.noise_multiplier, edges, self.direction)
        return np.asarray((1 - self.sampling_prob) * middle + self.sampling_prob * ahead)

    def density(self, x: Array) -> Array:
        """Probability density of P at the outputs x."""
        q, s = self.sampling_prob, self.noise_multiplier
        norm = s * np.sqrt(2 * np.pi)
        first, second = np.exp(-((x / s) ** 2) / 2), np.exp(-(((x - self.shift) / s) ** 2) / 2)
        return np.asarray(((1 - q) * first + q * second) / norm)

    def support(self) -> Array:
        """The smallest and largest loss of all but 1e-23 of the mass: (2,)."""
        reach = 10.0 * self.noise_multiplier
        return self.loss(np.array([-reach, self.shift + reach]))

    def mean(self, low: float, high: float) -> float:
        """The mean of the loss given that it is between low and high, by Gauss-Legendre panels in x."""
        s = self.noise_multiplier
        x_low, x_high = self.point(np.array([low, high]))
        left = max(float(x_low), -_REACH * s)
        right = min(float(x_high), self.shift + _REACH * s)
        if right <= left:
            return (low + high) / 2
        width = min(s, 2 * s * s) / 2  # the loss is analytic within pi s^2 of the real line
        panels = max(1, int(np.ceil((right - left) / width)))
        nodes, weights = np.polynomial.legendre.leggauss(16)
        edges = np.linspace(left, right, panels + 1)
        half = (edges[1:] - edges[:-1])[:, None] / 2
        x = (edges[1:] + edges[:-1])[:, None] / 2 + half * nodes
        density = self.density(x) * weights * half
        return float(np.sum(self.loss(x) * density) / np.sum(density))


def normal_masses(z: Array) -> Array:
    """`Phi(z[i+1]) - Phi(z[i])`, with small relative error in both tails."""
    from scipy.special import ndtr

    below, above = np.diff(ndtr(z)), -np.diff(ndtr(-z))
    return np.asarray(np.where(z[..., :-1] > 0, above, below))
