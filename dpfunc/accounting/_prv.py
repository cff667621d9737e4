"""Numerical composition of privacy losses by FFT, as opacus does it: Gopi, Lee and Wutschitz 2021.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpfunc.accounting._losses import (
    DIRECTIONS,
    MEANS,
    Array,
    Direction,
    epsilon_at,
    log_ratios,
    loss_of,
    part_masses,
    point,
)
from dpfunc.accounting._rdp import FEW_ORDERS, ORDERS, SIGMA_MAX, loss_tail, rdp_epsilon
from dpfunc.errors import InvalidArgument
from dpfunc.types import Adjacency, Event

_MIN_DELTA = 1e-9  # below it the rounding of the FFT puts the answer under the truth
_MAX_POINTS = 2**22
_MAX_LOSS = 650.0  # e^650 fits into float64
_MIN_SIGMA = 0.02
_FEW_KINDS = 8  # more kinds of events use fewer Renyi orders, for speed
_MIN_ERROR, _RELATIVE_ERROR, _MAX_ERROR = 1e-4, 0.02, 0.01  # a grid that does not fit may take all of the 2 %
_REACH = 40.0  # normal mass beyond 40 standard deviations is below float64


class PRVUnavailable(InvalidArgument):
    """Numerical composition cannot give a bound for this ledger."""


class Grid(NamedTuple):
    """The privacy losses `-half * mesh .. (half + 1) * mesh`, and what they may add to epsilon and to delta."""

    half: int
    mesh: float
    eps_error: float
    delta_error: float

    def losses(self) -> Array:
        return np.arange(-self.half, self.half + 2, dtype=np.float64) * self.mesh


def choose_grid(events: Sequence[Event], adjacency: Adjacency, delta: float) -> Grid:
    """The grid of Gopi et al. 2021, Theorem 5.5 and Remark 5.6, with Chernoff bounds for the tails."""
    from scipy.fft import next_fast_len

    if delta < _MIN_DELTA:
        raise PRVUnavailable(
            f"Expected delta >= {_MIN_DELTA:g} for method 'prv', got delta={delta:g}. Use method 'rdp'."
        )
    steps = sum(event.num_steps for event in events)
    orders = FEW_ORDERS if len(events) > _FEW_KINDS else ORDERS
    eps_rdp = rdp_epsilon(events, adjacency, delta, orders)
    if not math.isfinite(eps_rdp) or min(event.noise_multiplier for event in events) < _MIN_SIGMA:
        raise PRVUnavailable(f"Expected noise multipliers >= {_MIN_SIGMA} for method 'prv'. Use method 'rdp'.")
    delta_error = delta / 1000
    # both tails, of the sum of each group of events and of each single step
    total = loss_tail(events, adjacency, delta_error / (16 * len(events)), orders)
    ones = [Event(e.sampling_prob, e.noise_multiplier, 1) for e in events]
    single = max(loss_tail([one], adjacency, delta_error / (16 * steps), orders) for one in ones)
    per_error = math.sqrt(steps * math.log(12 / delta_error) / 2)
    wanted = min(max(_RELATIVE_ERROR * eps_rdp, _MIN_ERROR), _MAX_ERROR)
    allowed = max(wanted, _RELATIVE_ERROR * eps_rdp)
    limit = max(total, single) + allowed
    eps_error = max(wanted, 2 * limit * per_error / _MAX_POINTS)
    if eps_error > allowed or limit > _MAX_LOSS:
        raise PRVUnavailable(
            f"Expected a grid of at most 2**22 points for method 'prv', got {2 * limit * per_error / wanted:.3g} "
            f"(privacy losses up to {limit:.3g}, {steps} steps). Use method 'rdp'."
        )
    mesh = eps_error / per_error
    return Grid(int(next_fast_len(math.ceil(limit / mesh) + 2, real=True)) - 1, mesh, eps_error, delta_error)


def prv_epsilon(events: Sequence[Event], adjacency: Adjacency, delta: float) -> tuple[float, float]:
    """An upper bound on epsilon, and how far it is above the truth at 0.998 delta, within a tenth: (epsilon, error)."""
    grid = choose_grid(events, adjacency, delta)
    return max(_one_direction(events, each, delta, grid) for each in DIRECTIONS[adjacency]), grid.eps_error


def _one_direction(events: Sequence[Event], direction: Direction, delta: float, grid: Grid) -> float:
    """The upper bound for neighbours in one order: from the law of the sum of all losses, whose ends are joined."""
    from scipy.fft import irfft, rfft

    laws = [discretize(e.sampling_prob, min(e.noise_multiplier, SIGMA_MAX), direction, grid) for e in events]
    steps, spectrum, losses = [e.num_steps for e in events], 1.0, grid.losses()
    with np.errstate(all="ignore"):
        for (each, _), number in zip(laws, steps, strict=True):
            spectrum = spectrum * rfft(each) ** number
    # the index of loss 0 is `half`: n losses sum to 0 at n * half, modulo the size
    mass = np.roll(irfft(spectrum, len(losses)), -((sum(steps) - 1) * grid.half % len(losses)))
    shift = sum(number * moved for (_, moved), number in zip(laws, steps, strict=True))
    # Probabilities are not negative: what is below 0 is rounding, and there is as much above 0.
    rounding = 4 * float(-np.minimum(mass, 0.0).sum())
    if not rounding <= delta / 10:
        raise PRVUnavailable(f"The rounding of the FFT ({rounding:.1g}) matters at delta={delta:g}. Use method 'rdp'.")
    return epsilon_at(losses + shift, mass, delta - grid.delta_error - rounding) + grid.eps_error


def discretize(q: float, s: float, direction: Direction, grid: Grid) -> tuple[Array, float]:
    """Masses of the loss of one step on the points of the grid, and a shift of all, so that the mean is exact."""
    losses, mesh, end = grid.losses(), grid.mesh, MEANS[direction][0]
    # all but 1e-23 of the mass
    inside = np.searchsorted(losses, loss_of(q, s, np.array([-10.0 * s, end + 10.0 * s]), direction))
    first, last = max(int(inside[0]) - 2, 0), min(int(inside[1]) + 2, len(losses))
    edges = np.append(losses[first:last] - mesh / 2, losses[last - 1] + mesh / 2)
    middle, ahead, _ = part_masses(s, point(q, s, np.clip(edges, losses[0], losses[-1]), direction), direction)
    mass = np.zeros(len(losses))
    mass[first:last] = (1 - q) * middle + q * ahead
    mass /= mass.sum()
    shift = mean_loss(q, s, direction, losses[0], losses[-1]) - float(np.dot(losses, mass))
    if not abs(shift) < mesh / 2:
        raise PRVUnavailable("The mean of a privacy loss is lost on the grid. Use method 'rdp'.")
    return mass, shift


def mean_loss(q: float, s: float, direction: Direction, low: float, high: float) -> float:
    """The mean of the loss given that it is between low and high, by Gauss-Legendre panels in the output."""
    left, right = point(q, s, np.array([low, high]), direction)
    left, right = max(float(left), -_REACH * s), min(float(right), MEANS[direction][0] + _REACH * s)
    if right <= left:
        return (low + high) / 2
    panels = max(1, math.ceil((right - left) / (min(s, 2 * s * s) / 2)))  # analytic within pi s^2 of the real line
    nodes, weights = np.polynomial.legendre.leggauss(16)
    x = left + (right - left) / panels / 2 * (2 * np.arange(panels)[:, None] + 1 + nodes)
    log_p, log_q = log_ratios(q, s, x, direction)
    density = np.exp(log_p - (x / s) ** 2 / 2) * weights
    return float(np.sum((log_p - log_q) * density) / np.sum(density))
