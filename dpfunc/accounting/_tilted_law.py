"""Discrete privacy losses that dominate those of one step, and their tilted laws.

The outputs are divided into cells, and each cell's mass under P and Q is put on its two ends so that both masses are
kept. That interpolates delta linearly in e^epsilon ("connect the dots": Doroshenko et al. 2022), so the discrete pair
dominates, whatever the cells are. Everything beyond the last cell counts as an infinite loss; in direction add that is
the end where the losses are near their limit, -log(1 - q).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpfunc.accounting._losses import Array, Direction, log_ratios, normal_masses
from dpfunc.errors import InvalidArgument

Kind = tuple[float, float, int]
"""sampling_prob, noise_multiplier, num_steps."""

ULP = float(np.finfo(np.float64).eps)


class TiltedUnavailable(InvalidArgument):
    """The events are outside the domain of this accountant."""


def gaussian_part(kinds: Sequence[Kind]) -> float:
    """`mu^2 = sum T / sigma^2` of the events without sampling, rounded up."""
    terms = [count / sigma / sigma if sigma > 1e-150 else math.inf for q, sigma, count in kinds if q == 1]
    return math.fsum(terms) * (1 + 4 * ULP) if all(map(math.isfinite, terms)) else math.inf


@dataclass(frozen=True)
class Atoms:
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


def atoms_add_remove(q: Array | float, s: Array | float, y: Array, direction: Direction) -> Atoms:
    """The atoms for cells with the ends y; the subsampled pair of a pair that dominates dominates."""
    from scipy.special import ndtr

    b, a = pair_masses(y, s)
    loss, _ = log_ratios(q, s, y, "remove")
    if direction == "remove":
        loss = np.concatenate([np.zeros_like(y[..., :1]) + np.log1p(-q), loss], axis=-1)
        beyond = (1 - q) * ndtr(-y[..., -1:] / s) + q * ndtr((1 - y[..., -1:]) / s)
        return Atoms((1 - q) * b + q * a, loss, beyond[..., 0])
    b[..., -1:] += ndtr(-y[..., -1:] / s)  # the least losses, rounded up
    # b[0] is below 1e-8 delta, so that it may count in full; with its own loss, e^(t loss) b[0] can be huge
    return Atoms(b[..., 1:], -loss, b[..., 0])


def atoms_replace(q: Array | float, s: Array | float, x: Array) -> Atoms:
    """The atoms of P, Q = (1-q) N(0, s^2) + q N(+-1/2, s^2) for cells with the ends x; below x[0] rounded up."""
    from scipy.special import ndtr

    middle, ahead, behind = normal_masses(x / s), normal_masses((x - 0.5) / s), normal_masses((x + 0.5) / s)
    half = x[..., :-1] / (2 * s**2)
    c = 1 / (8 * s**2)
    up, down = np.exp(half - c), np.exp(-half - c)  # N(1/2) / N(0) and N(-1/2) / N(0) at the lower ends
    loss = np.subtract(*log_ratios(q, s, x, "replace"))
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
    return Atoms(mass, loss, infinite)


@dataclass(frozen=True)
class Law:
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


def tilt(atoms: Atoms, steps: float, t: float) -> Law:
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
    error = ULP * (64 + 512 * (1 + t) * scale + abs(top))
    return Law(steps, weight, loss - mean, mean, math.log(total) + top, float(atoms.infinite), error)
