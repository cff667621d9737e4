"""The trade-off curve of a ledger: what an attacker can reach who guesses whether one unit was there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpfunc.accounting import Ledger
from dpfunc.accounting._search import falling_root, least
from dpfunc.errors import InvalidArgument

RATES = (0.001, 0.01, 0.1)
"""False positives at which the page says how many true ones there can be."""

_DELTAS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 0.9, 0.97, 0.99)
_WIDTH = 1.0  # of log delta, where the bound on true positives is least
_LARGEST = 700.0  # e^700 fits into float64

Point = tuple[float, float]
"""(delta, epsilon)"""


def tight_method(ledger: Ledger) -> str:
    """The accountant of the trade-off curve: one that needs neither torch nor opacus."""
    return "gaussian" if all(event.sampling_prob == 1 for event in ledger.law) else "tilted"


def delta_at(ledger: Ledger, epsilon: float) -> float:
    """The least delta at which a ledger costs at most `epsilon`, within 1e-6 of itself, from above.

    >>> from dpfunc.types import Event
    >>> f"{delta_at(Ledger((Event(1.0, 1.0, 1),)), 1.0):.6f}"
    '0.126937'
    """
    method = tight_method(ledger)
    log = falling_root(lambda x: ledger.epsilon(math.exp(x), method).epsilon - epsilon, -69.0, -1e-9, atol=1e-6)
    return math.exp(log)


def curve(ledger: Ledger, delta: float) -> list[Point]:
    """Points (delta, epsilon) of a ledger: of a claim at `delta`, of a grid, and where the bounds of `RATES` are best.

    Raises:
        InvalidArgument: no accountant can give the claim. A point of the grid that none can give is left out.
    """
    method = tight_method(ledger)
    found = {delta: ledger.epsilon(delta, method).epsilon}
    for at in _DELTAS:
        try:
            found[at] = ledger.epsilon(at, method).epsilon
        except InvalidArgument:  # of delta near 1, for some ledgers
            continue
        if found[at] == 0:
            break  # larger ones cost nothing either
    grid = sorted(found.items())
    for rate in RATES:
        found.update(_refined(ledger, grid, rate))
    return sorted(found.items())


def _refined(ledger: Ledger, grid: Sequence[Point], rate: float) -> dict[float, float]:
    """Points around the one of a grid that bounds true positives best."""
    found: dict[float, float] = {}

    def bound(log_delta: float) -> float:
        delta = math.exp(log_delta)
        found[delta] = ledger.epsilon(delta, tight_method(ledger)).epsilon
        return true_positives([(delta, found[delta])], rate)

    best = min(range(len(grid)), key=lambda i: true_positives([grid[i]], rate))
    low, high = grid[max(0, best - 1)][0], grid[min(len(grid) - 1, best + 1)][0]
    least(bound, math.log(low), math.log(high), _WIDTH)
    return found


def true_positives(points: Sequence[Point], rate: float) -> float:
    """Largest share of true positives at a share of false ones, of any attack: each point bounds it in two ways.

    `min over (delta, epsilon) of e^epsilon rate + delta and 1 - e^-epsilon (1 - delta - rate)`: Wasserman and Zhou
    2010, A Statistical Framework for Differential Privacy, Theorem 2.4, for both orders of the neighbours.

    >>> round(true_positives([(1e-5, 1.0)], 0.1), 4)
    0.2718
    """
    return min(1.0, *(_one_point(delta, min(epsilon, _LARGEST), rate) for delta, epsilon in points))


def _one_point(delta: float, epsilon: float, rate: float) -> float:
    return min(math.exp(epsilon) * rate + delta, 1 - math.exp(-epsilon) * max(0.0, 1 - delta - rate))
