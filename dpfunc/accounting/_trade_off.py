"""The trade-off curve of a ledger: what an attacker can reach who guesses whether one unit was there.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpfunc._utils.validation import expect, non_negative, open_unit, unit_interval
from dpfunc.accounting._gaussian import gaussian_delta, gaussian_mu, gaussian_true_positives
from dpfunc.accounting._pairs import LARGEST_LOSS
from dpfunc.accounting._search import least
from dpfunc.accounting._tilted import LEAST_DELTA
from dpfunc.accounting.accountant import ROUNDING, all_take_part, deltas_of, rough_delta
from dpfunc.accounting.events import largest_loss
from dpfunc.accounting.ledger import Ledger
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event

RATES = (0.001, 0.01, 0.1)  # false positives at which the page says how many true ones there can be

_DELTAS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 0.9, 0.97, 0.99)
_WIDTH = 1.0  # of log delta, where the bound on true positives is least
_NARROW, _FLAT = 1e-5, 1e-6  # parts of a range of epsilon, unless the bound is flat to this share of itself

Point = tuple[float, float]  # delta, epsilon


def tight_method(ledger: Ledger) -> str:
    return "gaussian" if all_take_part(ledger.law) else "tilted"


def delta_at(ledger: Ledger, epsilon: float) -> float:
    """The least delta at which a ledger costs at most `epsilon`: an upper bound on the true one.

    Args:
        ledger: what was released. epsilon: >= 0.

    Returns:
        delta in 0..1, from public facts only. Exact to 1e-9 of itself where all records are in every batch; else about
        as far above the truth as `tilted` is. 0 of nothing, and of a pure release at its epsilon; 1 if `tilted` says
        nothing.

    Raises:
        InvalidArgument: epsilon outside its domain.

    Guarantees:
        tests/accounting/test_trade_off.py::test_delta_is_the_inverse_of_epsilon, ::test_delta_against_integration,
        ::test_ends_of_pure_releases.

    >>> print(f"{delta_at(Ledger((Event(1.0, 1.0, 1),)), 1.0):.9f}")
    0.126936738
    """
    target = non_negative("epsilon", epsilon)
    if not ledger.events:
        return 0.0
    if any(event.noise_multiplier == 0 for event in ledger.law if type(event) is Event):
        return 1.0
    if tight_method(ledger) == "gaussian":
        return gaussian_delta(target, gaussian_mu(ledger.law))

    lost, worst = largest_loss(ledger.law, ledger.adjacency)
    if target >= worst * (1 - ROUNDING) or lost == 1:
        return lost

    delta, near = 1.0, max(rough_delta(ledger.law, ledger.adjacency, target) / 3, LEAST_DELTA)
    while near >= LEAST_DELTA:
        delta = min(delta, deltas_of(ledger.law, ledger.adjacency, [near], target)(target))
        if near <= delta <= 10 * near:  # elsewhere the bound may be loose
            break
        near = delta / 3
    return min(1.0, lost + delta)


@dataclass(frozen=True)
class TradeOff:
    """Limits of an attacker who sees what was released, knows all other records, and guesses if a unit was there.

    Each figure is an upper bound on success (`false_negatives`: a lower bound on failure), for both orders of the
    neighbours, from public facts only: at most 2e-5 of itself above the best one that the ledger's epsilons give.
    Wasserman and Zhou 2010, A Statistical Framework for Differential Privacy; Dong, Roth and Su 2022, Gaussian DP.

    Args:
        ledger: what was released.

    Raises:
        InvalidArgument: not a ledger, or an argument outside its domain.

    Guarantees:
        tests/accounting/test_trade_off.py::test_a_gaussian_has_its_own_curve, ::test_no_test_does_better,
        ::test_pure_releases_have_their_own_curve, ::test_the_curve_of_delta_is_above_the_truth_everywhere.

    >>> from dpfunc.types import Event
    >>> limits = TradeOff(Ledger((Event(1.0, 1.0, 1),)))
    >>> print(f"{limits.true_positives(0.1):.5f} {limits.advantage():.5f} {limits.bayes_success():.5f}")
    0.38914 0.38292 0.69146
    """

    ledger: Ledger

    def __post_init__(self) -> None:
        expect(isinstance(self.ledger, Ledger), "a Ledger", "ledger", self.ledger, "Use Ledger((Event(...), ...)).")

    def true_positives(self, false_positives: float) -> float:
        """Most true positives of a test with at most this share of false ones, 0 < share < 1.

        `min over delta of e^epsilon share + delta and 1 - e^-epsilon (1 - delta - share)`, for epsilon at delta.
        """
        rate = open_unit("false_positives", false_positives)
        if not self.ledger.events:
            return rate
        law, adjacency = self.ledger.law, self.ledger.adjacency
        if tight_method(self.ledger) == "gaussian":
            return gaussian_true_positives(rate, gaussian_mu(law))
        lost, worst = largest_loss(law, adjacency)
        most = true_positives([(lost, worst)], rate)
        if lost == 1:
            return most
        curve = deltas_of(law, adjacency, [rate / 1000, (1 - rate) / 20])

        def smallest(bound: Callable[[Point, float], float], factor: float) -> float:
            """Least bound; beyond the logarithm of the factor it is above what was found."""
            high = min(worst, math.log(factor), LARGEST_LOSS)
            return least(lambda at: bound((lost + curve(at), at), rate), 0.0, high, _NARROW * high, _FLAT)[1]

        # delta is convex in e^epsilon, so each of both bounds has one minimum; the smaller one of them may have two
        most = min(most, smallest(_by_false_positives, 1 / rate))
        return min(most, smallest(_by_false_negatives, (1 - rate) / max(1 - most, 1e-300)))

    def false_negatives(self, false_positives: float) -> float:
        """Least share of false negatives of a test with at most this share of false positives: the trade-off curve."""
        return 1 - self.true_positives(false_positives)

    def advantage(self) -> float:
        """Most that true positives are above false ones, of any test: delta at epsilon 0, the total variation."""
        return delta_at(self.ledger, 0.0)

    def bayes_success(self, prior: float = 0.5) -> float:
        """Most that a guess is right with, if the unit is there with probability `prior`, 0 <= prior <= 1.

        `m + (1 - m) delta(log(m / (1 - m)))` with m the larger of prior and 1 - prior.
        """
        share = unit_interval("prior", prior)
        sure = max(share, 1 - share)
        return 1.0 if sure == 1 else sure + (1 - sure) * delta_at(self.ledger, math.log(sure / (1 - sure)))


def curve(ledger: Ledger, delta: float) -> list[Point]:
    """Points (delta, epsilon) of a ledger, see `points_of`."""
    method = tight_method(ledger)
    return points_of(lambda at: ledger.epsilon(at, method).epsilon, delta)


def points_of(epsilon: Callable[[float], float], delta: float) -> list[Point]:
    """Points (delta, epsilon) of a function: of a claim, of a grid, and where the bounds of `RATES` are best."""
    epsilons = {delta: epsilon(delta)}
    for at in _DELTAS:
        try:
            epsilons[at] = epsilon(at)
        except InvalidArgument:  # no accountant can give it: of delta near 1, for some ledgers
            continue
        if epsilons[at] == 0:
            break  # larger ones cost nothing either
    grid = sorted(epsilons.items())

    def bound(rate: float, log_delta: float) -> float:
        at = math.exp(log_delta)
        epsilons[at] = epsilon(at)
        return true_positives([(at, epsilons[at])], rate)

    for rate in RATES:  # around the point of the grid that is best
        best = min(range(len(grid)), key=lambda i: true_positives([grid[i]], rate))
        low, high = grid[max(0, best - 1)][0], grid[min(len(grid) - 1, best + 1)][0]
        least(functools.partial(bound, rate), math.log(low), math.log(high), _WIDTH)
    return sorted(epsilons.items())


def true_positives(points: Sequence[Point], rate: float) -> float:
    """Largest share of true positives at a share of false ones, of any attack: each point bounds it in two ways.

    `min over (delta, epsilon) of e^epsilon rate + delta and 1 - e^-epsilon (1 - delta - rate)`: Wasserman and Zhou
    2010, Theorem 2.4, for both orders of the neighbours.
    """
    known = [(delta, min(epsilon, LARGEST_LOSS)) for delta, epsilon in points]
    return min(1.0, *(bound(point, rate) for point in known for bound in (_by_false_positives, _by_false_negatives)))


def _by_false_positives(point: Point, rate: float) -> float:
    delta, epsilon = point
    return math.exp(epsilon) * rate + delta


def _by_false_negatives(point: Point, rate: float) -> float:
    delta, epsilon = point
    return 1 - math.exp(-epsilon) * (1 - delta - rate)
