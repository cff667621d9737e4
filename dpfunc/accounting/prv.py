"""Numerical composition of privacy losses by FFT, on opacus's machinery: Gopi, Lee and Wutschitz 2021."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpfunc.accounting.losses import Direction, StepLoss
from dpfunc.accounting.rdp import SIGMA_MAX, loss_tail
from dpfunc.errors import InvalidArgument
from dpfunc.types import Adjacency, Event

if TYPE_CHECKING:
    from opacus.accountants.analysis.prv import DiscretePRV, Domain

Array = NDArray[np.float64]

MIN_DELTA = 1e-9  # below it the rounding of the FFT puts the answer under the truth
MAX_POINTS = 2**22
MAX_LOSS = 650.0  # e^650 fits into float64
MIN_SIGMA = 0.02
MIN_ERROR, RELATIVE_ERROR, MAX_ERROR = 1e-4, 0.02, 0.01


class PRVUnavailable(InvalidArgument):
    """Numerical composition cannot give a bound for this ledger."""


@dataclass(frozen=True)
class Grid:
    """The domain [-limit, limit] of the privacy loss and its mesh.

    Args:
        eps_error: what the discretisation may add to epsilon. delta_error: what the cut at the limit may add to delta.
    """

    limit: float
    mesh: float
    eps_error: float
    delta_error: float


def choose_grid(events: Sequence[Event], adjacency: Adjacency, delta: float, eps_rdp: float) -> Grid:
    """The grid of Gopi et al. 2021, Theorem 5.5 and Remark 5.6, with Chernoff bounds for the tails.

    The error is 2 % of epsilon, within 1e-4..0.01; a grid that does not fit may take the whole 2 %.

    Raises:
        PRVUnavailable: delta below 1e-9, or a grid of more than 2**22 points.
    """
    if delta < MIN_DELTA:
        raise PRVUnavailable(
            f"Expected delta >= {MIN_DELTA:g} for method 'prv', got delta={delta:g}. Use method 'rdp'."
        )
    if not math.isfinite(eps_rdp) or min(event.noise_multiplier for event in events) < MIN_SIGMA:
        raise PRVUnavailable(f"Expected noise multipliers >= {MIN_SIGMA} for method 'prv'. Use method 'rdp'.")
    delta_error = delta / 1000
    steps = sum(event.num_steps for event in events)
    total = loss_tail(events, adjacency, delta_error / (16 * len(events)))
    single = max(
        loss_tail([Event(e.sampling_prob, e.noise_multiplier, 1)], adjacency, delta_error / (16 * steps))
        for e in events
    )
    per_error = math.sqrt(steps * math.log(12 / delta_error) / 2)
    wanted = min(max(RELATIVE_ERROR * eps_rdp, MIN_ERROR), MAX_ERROR)
    limit = max(total, single) + max(MAX_ERROR, RELATIVE_ERROR * eps_rdp)
    fitting = 2 * limit * per_error / (MAX_POINTS - 4)
    eps_error = max(wanted, fitting)
    if eps_error > max(wanted, RELATIVE_ERROR * eps_rdp) or limit > MAX_LOSS:
        points = 2 * limit * per_error / wanted
        raise PRVUnavailable(
            f"Expected a grid of at most 2**22 points for method 'prv', got {points:.3g} (privacy losses up to "
            f"{limit:.3g}, {steps} steps). Use method 'rdp'."
        )
    return Grid(limit, eps_error / per_error, eps_error, delta_error)


def prv_epsilon(events: Sequence[Event], adjacency: Adjacency, delta: float, eps_rdp: float) -> tuple[float, float]:
    """An upper bound on epsilon, at most about `error` above the truth: (epsilon, error).

    Under add_remove and zero_out it is the larger of the two directions; replace_one is symmetric.

    Args:
        events: at least one.
        eps_rdp: the Renyi bound, which sets the error.

    Raises:
        PRVUnavailable: see `choose_grid`; or rounding that would matter at this delta.
    """
    grid = choose_grid(events, adjacency, delta, eps_rdp)
    directions: tuple[Direction, ...] = ("replace",) if adjacency == "replace_one" else ("remove", "add")
    return max(one_direction(events, direction, delta, grid) for direction in directions), grid.eps_error


def one_direction(events: Sequence[Event], direction: Direction, delta: float, grid: Grid) -> float:
    """The upper bound for neighbours in one order."""
    from opacus.accountants.analysis.prv import Domain, compose_heterogeneous

    domain = Domain.create_aligned(-grid.limit, grid.limit, grid.mesh)
    losses = [StepLoss(e.sampling_prob, min(e.noise_multiplier, SIGMA_MAX), direction) for e in events]
    with np.errstate(all="ignore"):
        composed = compose_heterogeneous([discretize(loss, domain) for loss in losses], [e.num_steps for e in events])
    # Probabilities are not negative: what is below 0 is rounding, and there is as much above 0.
    rounding = 4 * float(-np.minimum(composed.pmf, 0.0).sum())
    if not rounding <= delta / 10:
        raise PRVUnavailable(f"The rounding of the FFT ({rounding:.1g}) matters at delta={delta:g}. Use method 'rdp'.")
    target = delta - grid.delta_error - rounding
    return epsilon_at(composed.domain.ts, composed.pmf, target) + grid.eps_error


def discretize(loss: StepLoss, domain: Domain) -> DiscretePRV:
    """The loss, cut off at the ends of the domain, on its grid; shifted so that the mean is exact."""
    from opacus.accountants.analysis.prv import DiscretePRV

    ts, low, high, mesh = domain.ts, domain.t_min, domain.t_max, domain.dt
    edges = np.clip(np.append(ts - mesh / 2, high + mesh / 2), low, high)
    pmf = loss.masses(loss.point(edges))
    pmf /= pmf.sum()
    shift = loss.mean(low, high) - float(np.dot(ts, pmf))
    if not abs(shift) < mesh / 2:
        raise PRVUnavailable("The mean of a privacy loss is lost on the grid. Use method 'rdp'.")
    return DiscretePRV(pmf=pmf, domain=domain.shift_right(shift))


def epsilon_at(losses: Array, pmf: Array, delta: float) -> float:
    """The smallest epsilon >= 0 with `sum_{loss > epsilon} p (1 - e^(epsilon - loss)) <= delta`."""
    positive = losses > 0
    t, p = losses[positive], pmf[positive]
    above = np.cumsum(p[::-1])[::-1]
    scaled = np.cumsum((p * np.exp(-t))[::-1])[::-1]
    deltas = above - np.exp(t) * scaled  # delta at epsilon = t[i]; decreasing
    if above[0] - scaled[0] <= delta:  # at epsilon = 0
        return 0.0
    i = int(np.argmax(deltas <= delta))
    return max(0.0, float(np.log((above[i] - delta) / scaled[i])))
