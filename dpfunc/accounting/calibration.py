"""The least noise, the largest batch, or the most steps that keep a ledger within a budget.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from dpfunc._utils.validation import expect, integer, named, open_unit, positive, probability
from dpfunc.accounting._prv import PRVUnavailable
from dpfunc.accounting._search import MOST_NOISE, largest_integer, least_scale
from dpfunc.accounting.accountant import cached_epsilon, check_bound, rough_epsilon
from dpfunc.accounting.ledger import Ledger, schedule_ledger
from dpfunc.errors import UnreachableBudget
from dpfunc.types import Adjacency, Event, Schedule

_MANY_STEPS = 2**40


def calibrate(ledger_for: Callable[[float], Ledger], *, epsilon: float, delta: float, method: str = "auto") -> float:
    """The smallest scale of the noise with which a ledger costs at most (epsilon, delta).

    Args:
        ledger_for: scale -> ledger; the cost must not rise with the scale. Include what was already spent.
        epsilon: target, > 0. delta: 0 < delta < 1.
        method: see `dpfunc.accounting.epsilon`; `gdp-approximation` is refused.

    Returns:
        A scale whose epsilon is <= the target, at most 1e-4 (relative) above one whose epsilon is not; never below
        2**-10.

    Raises:
        UnreachableBudget: even a scale of 2**30 costs more, e.g. because of what was already spent.

    Guarantees:
        tests/accounting/test_calibration.py::test_calibrated_noise_meets_the_target_and_less_does_not.

    >>> ledger_for = lambda scale: Ledger((Event(1.0, scale, 10),))
    >>> sigma = calibrate(ledger_for, epsilon=2.5944, delta=1e-5)
    >>> round(sigma, 2)
    5.0
    """
    target, delta = _budget(epsilon, delta, method)

    def cost(scale: float) -> float:
        try:
            return _cost(ledger_for(scale), delta, method)
        except PRVUnavailable:
            return math.inf

    aim = max(target, 1.1 * _rough(ledger_for(MOST_NOISE), delta))
    near = least_scale(lambda scale: _rough(ledger_for(scale), delta), aim, rtol=0.02) if math.isfinite(aim) else None
    scale = least_scale(cost, target, near or 1.0, factor=1.01)
    if scale is None:
        raise UnreachableBudget(
            f"Expected a budget that some noise can meet, got epsilon={target:g} at delta={delta:g}: with "
            f"{MOST_NOISE:.3g} times the noise the cost is still {_cost(ledger_for(MOST_NOISE), delta, method):.4g}. "
            "That is what was spent before, where something was, or the least that the accountant can show at this "
            "delta. Raise epsilon or delta, or start on fresh data."
        )
    return scale


def _budget(epsilon: float, delta: float, method: str) -> tuple[float, float]:
    check_bound(method)
    return positive("epsilon", epsilon), open_unit("delta", delta)


def _cost(ledger: Ledger, delta: float, method: str) -> float:
    return cached_epsilon(ledger.law, ledger.adjacency, delta, method).epsilon


def _rough(ledger: Ledger, delta: float) -> float:
    return rough_epsilon(ledger.law, ledger.adjacency, delta)


@named
def calibrate_noise(
    *, epsilon: float, delta: float, sampling_prob: float, num_steps: int, adjacency: Adjacency = "add_remove",
    spent: Ledger | None = None, schedule: Schedule | Sequence[float] | None = None, method: str = "auto",
) -> float:  # fmt: skip
    """The smallest noise multiplier with which `num_steps` steps cost at most (epsilon, delta).

    Args:
        epsilon: target, > 0, for `spent` and the new steps together. delta: 0 < delta < 1.
        sampling_prob: probability of a record to be in a batch, 0 < q <= 1. num_steps: >= 1.
        adjacency: which data sets are neighbours. spent: what was already spent on the same data; of this adjacency.
        schedule: relative noise multipliers over the steps: a `Schedule`, or one number for each step.
        method: see `dpfunc.accounting.epsilon`.

    Returns:
        The noise multiplier; with a schedule the scale s, so that step t has noise multiplier s * schedule(t).

    Raises:
        UnreachableBudget: no noise is enough. InvalidArgument: an argument outside its domain.
        LedgerConflict: `spent` has another adjacency.

    >>> sigma = calibrate_noise(epsilon=8.0, delta=1e-5, sampling_prob=0.04, num_steps=2000)
    >>> print(f"{sigma:.2f}")
    1.29
    """
    probability("sampling_prob", sampling_prob)
    integer("num_steps", num_steps, minimum=1)
    before = _spent(spent, adjacency)
    if schedule is None:
        schedule = Schedule(((1, 1.0),))
    elif not isinstance(schedule, Schedule):  # of a sequence the order does not matter for the cost
        values = [positive("schedule", value) for value in schedule]
        domain = f"one relative noise multiplier for each of {num_steps} steps"
        expect(len(values) == num_steps, domain, "len(schedule)", len(values), "Or a Schedule.")
        schedule = Schedule(tuple((count, value) for value, count in sorted(Counter(values).items())))
    pieces = schedule.pieces

    def ledger_for(scale: float) -> Ledger:
        noise = Schedule(tuple((steps, scale * value) for steps, value in pieces))
        return before.compose(schedule_ledger(sampling_prob, noise, num_steps, adjacency))

    return calibrate(ledger_for, epsilon=epsilon, delta=delta, method=method)


def epsilon_left(*, epsilon: float, delta: float, spent: Ledger | None) -> float:
    """Epsilon of one release of all records, with the noise that a budget still allows: what is left of it.

    Args:
        epsilon: budget, for `spent` and the release together. delta: of both. spent: None or empty leaves all of it.

    Raises:
        UnreachableBudget: nothing is left. InvalidArgument: an argument outside its domain.

    >>> print(f"{epsilon_left(epsilon=3.0, delta=1e-5, spent=Ledger((Event(0.04, 1.0, 100),))):.2f}")
    1.01
    """
    if spent is None or not spent.events:
        return epsilon
    sigma = calibrate_noise(
        epsilon=epsilon, delta=delta, sampling_prob=1.0, num_steps=1, adjacency=spent.adjacency, spent=spent
    )
    return Ledger((Event(1.0, sigma, 1),), spent.adjacency).epsilon(delta).epsilon


def calibrate_batch_size(
    *, epsilon: float, delta: float, dataset_size: int, num_steps: int, noise_multiplier: float,
    adjacency: Adjacency = "add_remove", spent: Ledger | None = None, method: str = "auto",
) -> int:  # fmt: skip
    """The largest expected batch size with which `num_steps` steps cost at most (epsilon, delta).

    Args:
        epsilon, delta, num_steps, adjacency, spent, method: see `calibrate_noise`.
        dataset_size: number of records n; the sampling probability is batch size / n. noise_multiplier: > 0.

    Returns:
        An expected batch size in 1..n that meets the target; one more does not.

    Raises:
        UnreachableBudget: even an expected batch size of 1 costs more. InvalidArgument: an argument outside its domain.

    >>> calibrate_batch_size(epsilon=100.0, delta=1e-5, dataset_size=500, num_steps=10, noise_multiplier=2.0)
    500
    """
    target, delta = _budget(epsilon, delta, method)
    n = integer("dataset_size", dataset_size, minimum=1)
    steps, sigma = integer("num_steps", num_steps, minimum=1), positive("noise_multiplier", noise_multiplier)
    before = _spent(spent, adjacency)

    def ledger_for(batch_size: int) -> Ledger:
        return before.record(Event(batch_size / n, sigma, steps)) if batch_size else before

    size = affordable_steps(ledger_for, epsilon=target, delta=delta, limit=n, method=method)
    if size == 0:
        raise UnreachableBudget(
            f"Expected a budget that a batch of one record can meet, got epsilon={target:g} at delta={delta:g}, where "
            f"it costs {_cost(ledger_for(1), delta, method):.4g}. Take more noise or fewer steps."
        )
    return size


class BudgetLeft(NamedTuple):
    """Rest of a budget. Plan with the steps: epsilons do not add up, so `epsilon_left` is only a difference.

    >>> BudgetLeft(num_steps=120, epsilon_spent=1.5, epsilon_left=0.5).num_steps
    120
    """

    num_steps: int
    epsilon_spent: float
    epsilon_left: float


def affordable_steps(
    ledger_after: Callable[[int], Ledger], *, epsilon: float, delta: float, limit: int, method: str = "auto"
) -> int:
    """The most steps after which a ledger still costs at most (epsilon, delta): ask once, before the run.

    Args:
        ledger_after: k -> the ledger after k more steps, for k in 0..limit; its cost must not fall with k.
        epsilon: budget, > 0. delta: 0 < delta < 1. limit: most steps of interest, >= 0.
        method: see `dpfunc.accounting.epsilon`; `gdp-approximation` is refused.

    Returns:
        k <= limit within the budget, while k + 1 is above it (or k = limit). 0 also when the budget is already spent.

    Guarantees:
        tests/accounting/test_calibration.py::test_one_step_more_is_too_much.

    >>> affordable_steps(lambda k: Ledger((Event(1.0, 5.0, 1),) * k), epsilon=2.6, delta=1e-5, limit=100)
    10
    """
    target, delta = _budget(epsilon, delta, method)
    most = integer("limit", limit)
    # a cheap cost finds where to look
    near = largest_integer(lambda k: _rough(ledger_after(k), delta), target, most, min(most, 1000))
    return largest_integer(lambda k: _cost(ledger_after(k), delta, method), target, most, near)


def _spent(spent: Ledger | None, adjacency: Adjacency) -> Ledger:
    """Check that a ledger is of this adjacency; an empty one for None."""
    empty = Ledger(adjacency=adjacency)
    return empty if spent is None else empty.compose(spent)


def calibrate_steps(
    *, epsilon: float, delta: float, sampling_prob: float, noise_multiplier: float,
    adjacency: Adjacency = "add_remove", spent: Ledger | None = None, method: str = "auto",
) -> int:  # fmt: skip
    """The most steps that cost at most (epsilon, delta), up to 2**40.

    Args:
        epsilon, delta, sampling_prob, adjacency, spent, method: see `calibrate_noise`.
        noise_multiplier: > 0.

    Raises:
        UnreachableBudget: not even one step fits. InvalidArgument: an argument outside its domain.
        LedgerConflict: `spent` has another adjacency.

    >>> calibrate_steps(epsilon=2.0, delta=1e-5, sampling_prob=0.01, noise_multiplier=1.0)
    1202
    """
    event = Event(sampling_prob, positive("noise_multiplier", noise_multiplier), 1)
    before = _spent(spent, adjacency)
    steps, spent_before, _ = remaining(before, epsilon=epsilon, delta=delta, event=event, method=method)
    if steps == 0:
        raise UnreachableBudget(
            f"Expected a budget for at least one step, got epsilon={epsilon:g} at delta={delta:g}: "
            f"{spent_before:.4g} is spent, and one step makes it {_cost(before.record(event), delta, method):.4g}. "
            "Take more noise or smaller batches."
        )
    return steps


def remaining(ledger: Ledger, *, epsilon: float, delta: float, event: Event, method: str = "auto") -> BudgetLeft:
    """Compute how many more steps of one kind fit into a budget.

    Args:
        ledger: what was spent. epsilon: budget, > 0. delta: 0 < delta < 1.
        event: the kind of step; its `num_steps` must be 1. method: see `dpfunc.accounting.epsilon`.

    Returns:
        Steps (up to 2**40), epsilon spent, and epsilon left (0 when overspent).

    >>> spent = Ledger((Event(1.0, 5.0, 4),))
    >>> remaining(spent, epsilon=2.6, delta=1e-5, event=Event(1.0, 5.0, 1)).num_steps
    6
    """
    expect(
        isinstance(event, Event) and event.num_steps == 1, "an event of one step", "event", event,
        "The answer counts steps of this kind.",
    )  # fmt: skip

    def ledger_after(steps: int) -> Ledger:
        return ledger.record(replace(event, num_steps=steps)) if steps else ledger

    steps = affordable_steps(ledger_after, epsilon=epsilon, delta=delta, limit=_MANY_STEPS, method=method)
    spent = _cost(ledger, delta, method)
    return BudgetLeft(steps, spent, max(0.0, epsilon - spent))
