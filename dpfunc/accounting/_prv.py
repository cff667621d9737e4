"""Numerical composition of privacy losses by FFT, on opacus's machinery: Gopi, Lee and Wutschitz 2021."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpfunc.accounting._losses import DIRECTIONS, Array, Direction, StepLoss
from dpfunc.accounting._rdp import SIGMA_MAX, loss_tail
from dpfunc.errors import InvalidArgument
from dpfunc.types import Adjacency, Event

if TYPE_CHECKING:
    from opacus.accountants.analysis.prv import DiscretePRV, Domain


_MIN_DELTA = 1e-9  # below it the rounding of the FFT puts the answer under the truth
_MAX_POINTS = 2**22
_MAX_LOSS = 650.0  # e^650 fits into float64
_MIN_SIGMA = 0.02
FEW_KINDS = 8  # more kinds of events use fewer Renyi orders, for speed
_MIN_ERROR, _RELATIVE_ERROR, _MAX_ERROR = 1e-4, 0.02, 0.01


class PRVUnavailable(InvalidArgument):
    """Numerical composition cannot give a bound for this ledger."""


@dataclass(frozen=True)
class Grid:
    """The privacy losses `-half * mesh .. (half + 1) * mesh`.

    Args:
        half: points below 0. mesh: distance of two points.
        eps_error: what the discretisation may add to epsilon. delta_error: what truncation may add to delta.
    """

    half: int
    mesh: float
    eps_error: float
    delta_error: float

    def domain(self) -> Domain:
        """The grid as opacus has it: an even number of points, with 0 among them."""
        from opacus.accountants.analysis.prv import Domain

        return Domain(-self.half * self.mesh, (self.half + 1) * self.mesh, 2 * self.half + 2)


def choose_grid(events: Sequence[Event], adjacency: Adjacency, delta: float, eps_rdp: float) -> Grid:
    """The grid of Gopi et al. 2021, Theorem 5.5 and Remark 5.6, with Chernoff bounds for the tails.

    The error is 2 % of epsilon, within 1e-4..0.01; a grid that does not fit may take all of the 2 %.

    Raises:
        PRVUnavailable: delta below 1e-9, or a grid of more than 2**22 points.
    """
    from scipy.fft import next_fast_len

    if delta < _MIN_DELTA:
        raise PRVUnavailable(
            f"Expected delta >= {_MIN_DELTA:g} for method 'prv', got delta={delta:g}. Use method 'rdp'."
        )
    if not math.isfinite(eps_rdp) or min(event.noise_multiplier for event in events) < _MIN_SIGMA:
        raise PRVUnavailable(f"Expected noise multipliers >= {_MIN_SIGMA} for method 'prv'. Use method 'rdp'.")
    delta_error = delta / 1000
    steps, few = sum(event.num_steps for event in events), len(events) > FEW_KINDS
    # both tails, of the sum of each group of events and of each single step
    total = loss_tail(events, adjacency, delta_error / (16 * len(events)), few)
    ones = [Event(e.sampling_prob, e.noise_multiplier, 1) for e in events]
    single = max(loss_tail([one], adjacency, delta_error / (16 * steps), few) for one in ones)
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
    half = int(next_fast_len(math.ceil(limit / mesh) + 2, real=True)) - 1
    return Grid(half, mesh, eps_error, delta_error)


def prv_epsilon(events: Sequence[Event], adjacency: Adjacency, delta: float, eps_rdp: float) -> tuple[float, float]:
    """An upper bound on epsilon, and how far it is above the truth at 0.998 delta, within a tenth: (epsilon, error).

    Under add_remove and zero_out it is the larger of the two directions; replace_one is symmetric.

    Args:
        events: at least one.
        eps_rdp: the Renyi bound, which sets the error.

    Raises:
        PRVUnavailable: see `choose_grid`; or rounding that would matter at this delta.
    """
    grid = choose_grid(events, adjacency, delta, eps_rdp)
    return max(_one_direction(events, each, delta, grid) for each in DIRECTIONS[adjacency]), grid.eps_error


def _one_direction(events: Sequence[Event], direction: Direction, delta: float, grid: Grid) -> float:
    """The upper bound for neighbours in one order."""
    domain = grid.domain()
    losses = [StepLoss(e.sampling_prob, min(e.noise_multiplier, SIGMA_MAX), direction) for e in events]
    composed = compose_laws([discretize(loss, domain) for loss in losses], [e.num_steps for e in events])
    # Probabilities are not negative: what is below 0 is rounding, and there is as much above 0.
    rounding = 4 * float(-np.minimum(composed.pmf, 0.0).sum())
    if not rounding <= delta / 10:
        raise PRVUnavailable(f"The rounding of the FFT ({rounding:.1g}) matters at delta={delta:g}. Use method 'rdp'.")
    target = delta - grid.delta_error - rounding
    return epsilon_at(composed.domain.ts, composed.pmf, target) + grid.eps_error


def compose_laws(laws: list[DiscretePRV], num_steps: list[int]) -> DiscretePRV:
    """The law of the sum of `num_steps[i]` losses from each law, all on one grid; its ends are joined.

    One law is composed by opacus. For several it would convolve each pair on twice the grid; the product of all
    spectra needs one inverse (tests/accounting/test_prv.py::test_composition_agrees_with_opacus).
    """
    from opacus.accountants.analysis.prv import DiscretePRV, compose_heterogeneous
    from scipy.fft import irfft, rfft

    with np.errstate(all="ignore"):
        if len(laws) == 1:
            return compose_heterogeneous(laws, num_steps)
        spectrum = 1.0
        for law, steps in zip(laws, num_steps, strict=True):
            spectrum = spectrum * rfft(law.pmf) ** steps
        size = len(laws[0].pmf)
        pmf = irfft(spectrum, size)
    zero = size // 2 - 1  # the index of loss 0: n losses sum to 0 at n * zero, modulo the size
    pmf = np.roll(pmf, -((sum(num_steps) - 1) * zero % size))
    centred = laws[0].domain.shift_right(-laws[0].domain.shifts)
    shift = sum(steps * law.domain.shifts for law, steps in zip(laws, num_steps, strict=True))
    return DiscretePRV(pmf=pmf, domain=centred.shift_right(shift))


def discretize(loss: StepLoss, domain: Domain) -> DiscretePRV:
    """The loss, truncated at the ends of the domain, on its grid; shifted so that the mean is exact."""
    from opacus.accountants.analysis.prv import DiscretePRV

    ts, low, high, mesh = domain.ts, domain.t_min, domain.t_max, domain.dt
    inside = np.searchsorted(ts, loss.support())
    first, last = max(int(inside[0]) - 2, 0), min(int(inside[1]) + 2, len(ts))
    cells = ts[first:last]
    edges = np.clip(np.append(cells - mesh / 2, cells[-1] + mesh / 2), low, high)
    pmf = np.zeros(len(ts))
    pmf[first:last] = loss.masses(loss.point(edges))
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
