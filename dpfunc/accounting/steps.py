"""Numbers of steps that a privacy budget allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from dpfunc._utils.validation import fail, integer, open_unit, positive
from dpfunc.accounting.accountant import cached_epsilon, check_bound
from dpfunc.accounting.calibration import rough_epsilon
from dpfunc.accounting.ledger import Ledger
from dpfunc.accounting.search import largest_integer
from dpfunc.errors import UnreachableBudget
from dpfunc.types import Adjacency, Event

_MANY_STEPS = 2**40


class Remaining(NamedTuple):
    """Rest of a budget. Plan with the steps: epsilons do not add up, so `epsilon_left` is only a difference.

    >>> Remaining(num_steps=120, epsilon_spent=1.5, epsilon_left=0.5).num_steps
    120
    """

    num_steps: int
    epsilon_spent: float
    epsilon_left: float


def affordable_steps(
    ledger_after: Callable[[int], Ledger], *, epsilon: float, delta: float, limit: int, method: str = "auto"
) -> int:
    """The most steps after which a ledger still costs at most (epsilon, delta).

    Ask once, before the run, and compare integers while it runs.

    Args:
        ledger_after: k -> the ledger after k more steps, for k in 0..limit; its cost must not fall with k.
        epsilon: budget, > 0.
        delta: 0 < delta < 1.
        limit: most steps of interest, >= 0.
        method: see `dpfunc.accounting.epsilon`; `gdp-approximation` is refused.

    Returns:
        k <= limit within the budget, while k + 1 is above it (or k = limit). 0 also when the budget is already spent.

    Raises:
        InvalidArgument: an argument outside its domain.

    Guarantees:
        tests/accounting/test_steps.py::test_one_step_more_is_too_much.

    >>> affordable_steps(lambda k: Ledger((Event(1.0, 5.0, 1),) * k), epsilon=2.6, delta=1e-5, limit=100)
    10
    """
    target, delta = positive("epsilon", epsilon), open_unit("delta", delta)
    most = integer("limit", limit)
    check_bound(method)
    rough = largest_integer(lambda k: rough_epsilon(ledger_after(k), delta), target, most, min(most, 1000))
    return largest_integer(lambda k: cached_epsilon(ledger_after(k), delta, method).epsilon, target, most, rough)


def calibrate_steps(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    noise_multiplier: float,
    adjacency: Adjacency = "add_remove",
    spent: Ledger | None = None,
    method: str = "auto",
) -> int:
    """The most steps that cost at most (epsilon, delta), up to 2**40.

    Args:
        epsilon: budget, > 0, for `spent` and the new steps together.
        delta: 0 < delta < 1.
        sampling_prob: probability of a record to be in a batch, 0 < q <= 1.
        noise_multiplier: > 0.
        adjacency: which data sets are neighbours.
        spent: what was already spent on the same data; of the same adjacency.
        method: see `dpfunc.accounting.epsilon`.

    Raises:
        UnreachableBudget: not even one step fits. InvalidArgument: an argument outside its domain.
        LedgerConflict: `spent` has another adjacency.

    >>> calibrate_steps(epsilon=2.0, delta=1e-5, sampling_prob=0.01, noise_multiplier=1.0)
    1202
    """
    event = Event(sampling_prob, positive("noise_multiplier", noise_multiplier), 1)
    before = Ledger(adjacency=adjacency).compose(*([] if spent is None else [spent]))
    steps = affordable_steps(_more(before, event), epsilon=epsilon, delta=delta, limit=_MANY_STEPS, method=method)
    if steps == 0:
        spent_before = cached_epsilon(before, delta, method).epsilon
        one = cached_epsilon(before.record(event), delta, method).epsilon
        raise UnreachableBudget(
            f"Expected a budget for at least one step, got epsilon={epsilon:g} at delta={delta:g}: "
            f"{spent_before:.4g} is spent, and one step makes it {one:.4g}. Take more noise or smaller batches."
        )
    return steps


def _more(ledger: Ledger, event: Event) -> Callable[[int], Ledger]:
    """The ledger after a number of more steps of one kind, as a function of it."""
    return lambda steps: ledger.record(replace(event, num_steps=steps)) if steps else ledger


def remaining(ledger: Ledger, *, epsilon: float, delta: float, event: Event, method: str = "auto") -> Remaining:
    """Compute how many more steps of one kind fit into a budget.

    Args:
        ledger: what was spent.
        epsilon: budget, > 0.
        delta: 0 < delta < 1.
        event: the kind of step; its `num_steps` must be 1.
        method: see `dpfunc.accounting.epsilon`.

    Returns:
        Steps (up to 2**40), epsilon spent, and epsilon left (0 when overspent).

    Raises:
        InvalidArgument: an argument outside its domain.

    >>> spent = Ledger((Event(1.0, 5.0, 4),))
    >>> remaining(spent, epsilon=2.6, delta=1e-5, event=Event(1.0, 5.0, 1)).num_steps
    6
    """
    positive("epsilon", epsilon)
    if not isinstance(event, Event) or event.num_steps != 1:
        raise fail("an event of one step", "event", event, "The answer counts steps of this kind.")

    steps = affordable_steps(_more(ledger, event), epsilon=epsilon, delta=delta, limit=_MANY_STEPS, method=method)
    spent = cached_epsilon(ledger, delta, method).epsilon
    return Remaining(steps, spent, max(0.0, epsilon - spent))
