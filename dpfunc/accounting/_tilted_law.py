"""Discrete privacy losses that dominate those of one step, and their tilted laws.

Each cell's mass under P and Q is put on its two ends so that both masses are kept. That interpolates delta linearly in
e^epsilon ("connect the dots": Doroshenko et al. 2022), so the discrete pair dominates, whatever the cells are. What is
beyond the last cell counts as an infinite loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpfunc.accounting._gaussian import as_float
from dpfunc.accounting._losses import Array, Direction, above, loss_of, part_masses
from dpfunc.errors import InvalidArgument

Kind = tuple[float, float, int]
"""sampling_prob, noise_multiplier, num_steps."""

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


def conserved(*totals: Array | float) -> None:
    """Raise `TiltedUnavailable` unless each total mass is 1: a mass that is lost would be a bound that is too low."""
    if not all(np.all(np.abs(total - 1) <= 1e-11) for total in totals):
        raise TiltedUnavailable(f"Expected masses that sum to 1, got {totals}. Use method 'rdp'.")


def connected(loss: Array, cells: Array, excess: Array) -> Array:
    """Masses at losses (.., n) of cells with masses P (.., n - 1) and `excess = P - e^loss Q`, loss at the lower end.

    A cell moves `excess / (1 - e^-width)` to its upper end.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        moved = excess / -np.expm1(-np.diff(loss))
    # where nothing can be computed all of it moves: ends of one loss, or the far end of little noise
    moved = np.where(np.isfinite(moved), np.clip(moved, 0.0, cells), cells)
    mass = np.zeros_like(loss)
    mass[..., :-1] += cells - moved
    mass[..., 1:] += moved
    return mass


def atoms(q: Array | float, s: Array | float, x: Array, direction: Direction) -> Atoms:
    """The atoms for cells with the ends x (.., n), for q and s that are numbers, or (.., 1); what is below is x[0]."""
    loss = loss_of(q, s, x, direction)
    infinity = np.full_like(x[..., :1], np.inf)
    parts = part_masses(s, np.concatenate([-infinity, x, infinity], axis=-1), direction)
    p, q_ = (1 - q) * parts[0] + q * parts[1:]
    with np.errstate(over="ignore", invalid="ignore"):
        excess = above(q, s, x[..., :-1], parts[..., 1:-1], direction)
    mass = connected(loss, p[..., 1:-1], excess)
    kept = (mass * np.exp(-loss)).sum(axis=-1)
    mass[..., 0] += p[..., 0]
    conserved(p.sum(axis=-1), kept + q_[..., 0] + q_[..., -1])
    return Atoms(mass, loss, p[..., -1])


Fixed = tuple[int, Atoms]
"""Number of steps, and the law of one."""


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
        """Variance of the tilted loss of all steps together."""
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
    scale = float(weight @ np.abs(loss))
    error = ULP * (64 + 512 * (1 + t) * scale + abs(top))
    return Law(steps, weight, loss - mean, mean, math.log(total) + top, float(atoms.infinite), error)
