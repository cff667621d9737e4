"""Cost of a private search: the best of a random number of private runs, by Renyi differential privacy.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpfunc._utils.validation import below_one, expect, open_unit, positive, real, refuse, wrong_type
from dpfunc.accounting._losses import Array
from dpfunc.accounting._rdp import ORDERS, composed_curve, converted
from dpfunc.accounting._search import MOST_NOISE, falling_root, least_scale
from dpfunc.accounting.accountant import Guarantee, renyi_events
from dpfunc.accounting.events import largest_loss
from dpfunc.accounting.ledger import Ledger, compose
from dpfunc.errors import UnreachableBudget

SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""Names of distributions of the number of runs, and their shapes."""

_MOST_RUNS = 1e4  # on average
_TAIL = 1e-18  # runs less likely than this are never drawn


@dataclass(frozen=True)
class RunCount:
    """Distribution of the number of runs K of a search; it must not depend on the data.

    `P[K = k] ~ (1 - gamma)^k prod_{0 <= j < k} (j + shape) / (j + 1)` for k >= 1, the truncated negative binomial
    distribution, with the gamma in (0, 1] that has the mean: shape 0 is logarithmic, 1 geometric. Shape inf is the
    Poisson distribution, of which k = 0 is possible: then nothing is released.

    Args:
        mean: expected number of runs, 1 <= mean <= 10,000.
        shape: -1 < shape <= inf. The smaller it is, the more K varies, and the less a run of the search costs.

    >>> RunCount(mean=8.0, shape=1.0).gamma
    0.125
    >>> RunCount(mean=8.0, shape=1.0).quantile(0.99)
    35
    """

    mean: float
    shape: float

    def __post_init__(self) -> None:
        real(
            "mean", self.mean, f"1 <= mean <= {_MOST_RUNS:g}", "It is the expected number of runs.",
            lambda mean: 1 <= mean <= _MOST_RUNS,
        )  # fmt: skip
        if self.shape != math.inf:
            real("shape", self.shape, "-1 < shape <= inf", inside=lambda shape: shape > -1)

    @functools.cached_property
    def gamma(self) -> float:
        """Parameter of the truncated negative binomial distribution; NaN for the Poisson distribution."""
        if self.shape == math.inf:
            return math.nan
        if self.shape == 1 or self.mean == 1:
            return 1 / self.mean

        def lacking(x: float) -> float:  # gamma = e^-x
            return self.mean - _mean(math.exp(-x), self.shape)

        hint = f"The shape is {self.shape:g}: take a larger one."
        expect(lacking(700.0) <= 0, "a mean that this shape can have", "mean", self.mean, hint)
        return math.exp(-falling_root(lacking, 0.0, 700.0))

    def quantile(self, probability: float) -> int:
        """The smallest k with `P[K <= k] > probability`; of a uniform random number it is a draw of K.

        Args:
            probability: 0 <= probability < 1. Rounding, and the end of the tail, move the distribution by less than
                1e-12 in total variation, which adds at most `1e-12 (1 + e^epsilon)` to delta.

        >>> [RunCount(mean=2.0, shape=math.inf).quantile(u) for u in (0.0, 0.5, 0.999)]
        [0, 2, 8]
        """
        below_one("probability", probability)
        poisson, gamma = self.shape == math.inf, self.gamma
        if poisson:
            k, mass = 0, math.exp(-self.mean)
        elif gamma == 1:
            k, mass = 1, 1.0
        elif self.shape == 0:
            k, mass = 1, (gamma - 1) / math.log(gamma)
        else:
            k, mass = 1, (1 - gamma) * self.shape / math.expm1(-self.shape * math.log(gamma))
        left = probability - mass
        while left >= 0 and (mass > _TAIL or k < self.mean):
            mass *= self.mean / (k + 1) if poisson else (1 - gamma) * (k + self.shape) / (k + 1)
            k, left = k + 1, left - mass
        return k


def selection_epsilon(
    runs: RunCount, one_run: Sequence[Ledger], delta: float, *, spent: Ledger | None = None
) -> Guarantee:
    """The epsilon of a search that releases the best of K runs alone: an upper bound.

    The search draws K, and then does K times the same: draw a candidate from a public grid, train, give the result a
    score. Released is the run with the highest score: its candidate, its model, its score, and nothing of the others,
    nor K. One run is a mechanism Q with the Renyi curve `R(a)`, for both orders of two neighbours; the search has

        shape < inf:  R(a) + (1 + shape) min_b ((1 - 1/b) R(b) + log(1/gamma) / b) + log(mean) / (a - 1),  b >= 1
        Poisson:      log(e^-mean + mean e^((a - 1) (R(a) + mean d))) / (a - 1)

    where `d` is the delta of Q at epsilon `log(1 + 1 / (a - 1))`. Papernot and Steinke 2022, Hyperparameter Tuning with
    Renyi Differential Privacy, Theorems 2 and 6; the term `e^-mean` is of a search with no run. Proof:
    docs/accounting.md.

    Args:
        runs: distribution of K. Nothing that depends on the data may change K: a run that fails has a score, too.
        one_run: ledgers such that for any two neighbours one of them bounds Q: one for each candidate, with all that a
            run releases about one record, the score included. Their maximum at each order is used.
        delta: 0 < delta < 1. spent: earlier releases on the same data.

    Returns:
        A `Guarantee` for `spent` and the search together. Not covered: the time that a search takes, from which K can
        be guessed; a stop because of what was seen; files of the other runs; a score that is not in `one_run`.

    Raises:
        InvalidArgument: no ledger, a run with a stated delta, or a value outside its domain. LedgerConflict: ledgers of
            different adjacency.

    Guarantees:
        tests/accounting/test_selection.py: not below the exact divergences of finite mechanisms
        (test_the_curve_bounds_the_exact_divergence) and of Gaussian ones (test_epsilon_bounds_a_search_exactly); deltas
        that releases state are counted (test_stated_deltas_are_counted).

    >>> from dpfunc.types import Event
    >>> run = Ledger((Event(0.01, 2.0, 1000),))
    >>> search = selection_epsilon(RunCount(mean=8.0, shape=1.0), [run], 1e-5)
    >>> print(f"one run {run.epsilon(1e-5).epsilon:.2f}, a search {search.epsilon:.2f}")
    one run 0.62, a search 1.44
    """
    refuse(
        (isinstance(one_run, Ledger), wrong_type("a list of ledgers of a run", "one_run", one_run, "Pass [ledger].")),
        (not one_run, "Expected at least one ledger of a run, got none."),
    )
    before = Ledger(adjacency=one_run[0].adjacency) if spent is None else spent
    compose(before, *one_run)  # all of one adjacency
    open_unit("delta", delta)
    stated = max(largest_loss(each.law, each.adjacency)[0] for each in one_run)
    expect(stated == 0, "runs whose releases have no delta of their own, as a Laplace or Gaussian one", "delta", stated)
    left = delta - largest_loss(before.law, before.adjacency)[0]  # no epsilon makes the deltas of earlier runs smaller
    curve = selection_curve(np.max([_curve(each) for each in one_run], axis=0), ORDERS, runs)
    note = f"best of K private runs, mean of K {runs.mean:g}, shape {runs.shape:g}"
    epsilon = converted(curve + _curve(before), ORDERS, left) if left > 0 else math.inf
    return Guarantee(epsilon, delta, "rdp", before.adjacency, note)


def calibrate_search(
    runs: RunCount,
    one_run: Callable[[float], Sequence[Ledger]],
    *,
    epsilon: float,
    delta: float,
    spent: Ledger | None = None,
) -> float:
    """The smallest scale of the noise of a run with which a whole search costs at most (epsilon, delta).

    Args:
        runs, delta, spent: see `selection_epsilon`.
        one_run: scale -> ledgers, as for `selection_epsilon`; the cost must not rise with the scale.
        epsilon: target, > 0, for `spent` and the search together.

    Returns:
        A scale whose epsilon is <= the target, at most 1e-4 (relative) above one whose epsilon is not, or 2**-10.

    Raises:
        UnreachableBudget: even a scale of 2**30 costs more, because of what was spent or of the score.

    Guarantees:
        tests/accounting/test_selection.py::test_a_search_is_calibrated.

    >>> from dpfunc.types import Event
    >>> one_run = lambda scale: [Ledger((Event(0.1, scale, 100),))]
    >>> sigma = calibrate_search(RunCount(mean=8.0, shape=1.0), one_run, epsilon=3.0, delta=1e-5)
    >>> print(f"{sigma:.2f}")
    3.01
    """
    target = positive("epsilon", epsilon)

    def cost(scale: float) -> float:
        return selection_epsilon(runs, one_run(scale), delta, spent=spent).epsilon

    scale = least_scale(cost, target)
    if scale is None:
        raise UnreachableBudget(
            f"Expected a budget that some noise can meet, got epsilon={target:g} at delta={delta:g}: for {runs.mean:g} "
            f"runs on average what was spent before and the score alone cost {cost(MOST_NOISE):.4g}, even if training "
            "costs nothing. Add more noise to the score, take fewer runs, or raise epsilon."
        )
    return scale


def selection_curve(curve: Array, orders: tuple[float, ...], runs: RunCount) -> Array:
    """Renyi divergences of a search, from those of one run at the same orders, all > 1; see `selection_epsilon`."""
    a = np.array(orders)
    if runs.shape == math.inf:
        with np.errstate(over="ignore", invalid="ignore"):
            levels = np.log1p(1 / (a - 1))[:, None]
            logs = (a - 1) * (curve + np.log1p(-1 / a) - levels) - np.log(a)
            deltas = np.exp(np.minimum(0.0, logs.min(axis=1)))  # of one run at each level, from above
            many = math.log(runs.mean) + (a - 1) * (curve + runs.mean * deltas)
            return np.asarray(np.logaddexp(-runs.mean, many) / (a - 1))
    log_gamma = math.log(runs.gamma)
    other_order = min(float(np.min((1 - 1 / a) * curve - log_gamma / a)), -log_gamma)  # the latter: b = 1
    return curve + (1 + runs.shape) * other_order + math.log(runs.mean) / (a - 1)


def _curve(ledger: Ledger) -> Array:
    return composed_curve(renyi_events(ledger.law)[0], ledger.adjacency, ORDERS)


def _mean(gamma: float, shape: float) -> float:
    if gamma == 1:
        return 1.0
    log_gamma = math.log(gamma)
    below = -log_gamma if shape == 0 else -math.expm1(shape * log_gamma) / shape
    return (1 - gamma) / (gamma * below)
