"""Steps that a budget allows: the last one fits and one more does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.accounting import Ledger, affordable_steps, calibrate_steps, epsilon, remaining
from dpfunc.accounting.search import largest_integer, smallest_real
from dpfunc.errors import InvalidArgument, LedgerConflict, UnreachableBudget
from dpfunc.types import Event


@settings(max_examples=6)
@given(st.floats(0.5, 6.0), st.floats(0.002, 0.5), st.floats(0.8, 4.0), st.sampled_from(["auto", "rdp"]))
def test_one_step_more_is_too_much(target, q, sigma, method):
    def after(steps):
        return Ledger((Event(q, sigma, steps),)) if steps else Ledger()

    steps = affordable_steps(after, epsilon=target, delta=1e-5, limit=3000, method=method)
    assert epsilon(after(steps), 1e-5, method).epsilon <= target
    assert steps == 3000 or epsilon(after(steps + 1), 1e-5, method).epsilon > target


def test_reference_steps():
    assert calibrate_steps(epsilon=2.0, delta=1e-5, sampling_prob=0.01, noise_multiplier=1.0) == 1202


def test_limit_and_nothing():
    def after(steps):
        return Ledger((Event(1.0, 5.0, 3 + steps),))

    assert affordable_steps(after, epsilon=2.6, delta=1e-5, limit=4) == 4
    assert affordable_steps(after, epsilon=2.6, delta=1e-5, limit=0) == 0
    assert affordable_steps(after, epsilon=2.6, delta=1e-5, limit=100) == 7
    assert affordable_steps(after, epsilon=0.1, delta=1e-5, limit=100) == 0


def test_remaining_counts_steps_and_not_epsilon():
    spent = Ledger((Event(0.01, 1.0, 1000),))
    left = remaining(spent, epsilon=2.0, delta=1e-5, event=Event(0.01, 1.0, 1))
    assert left.num_steps == 202
    assert left.epsilon_spent == epsilon(spent, 1e-5).epsilon
    assert left.epsilon_left == pytest.approx(2.0 - left.epsilon_spent)
    with pytest.raises(UnreachableBudget):  # subtracting epsilons would have stopped the run far too early
        calibrate_steps(epsilon=left.epsilon_left, delta=1e-5, sampling_prob=0.01, noise_multiplier=1.0)


def test_overspent():
    spent = Ledger((Event(0.1, 1.0, 1000),))
    left = remaining(spent, epsilon=1.0, delta=1e-5, event=Event(0.01, 1.0, 1))
    assert left.num_steps == 0
    assert left.epsilon_left == 0.0
    assert left.epsilon_spent > 1.0
    with pytest.raises(UnreachableBudget, match="is spent"):
        calibrate_steps(epsilon=1.0, delta=1e-5, sampling_prob=0.01, noise_multiplier=1.0, spent=spent)


@pytest.mark.parametrize(
    "make",
    [
        lambda: remaining(Ledger(), epsilon=1.0, delta=1e-5, event=Event(0.1, 1.0, 5)),
        lambda: remaining(Ledger(), epsilon=0.0, delta=1e-5, event=Event(0.1, 1.0, 1)),
        lambda: affordable_steps(lambda k: Ledger(), epsilon=1.0, delta=1e-5, limit=-1),
        lambda: affordable_steps(lambda k: Ledger(), epsilon=1.0, delta=1e-5, limit=9, method="gdp-approximation"),
        lambda: calibrate_steps(epsilon=1.0, delta=1e-5, sampling_prob=0.1, noise_multiplier=0.0),
    ],
)
def test_bad_arguments_are_refused(make):
    with pytest.raises(InvalidArgument):
        make()


def test_spent_of_another_adjacency_is_refused():
    with pytest.raises(LedgerConflict):
        calibrate_steps(
            epsilon=1.0, delta=1e-5, sampling_prob=0.1, noise_multiplier=1.0, spent=Ledger(adjacency="zero_out")
        )


@given(st.floats(0.2, 3.0), st.floats(1e-3, 1e3), st.integers(0, 10**6), st.floats(0.1, 10.0))
def test_the_integer_search_finds_the_last_that_fits(power, scale, guess, target):
    limit = 10**6

    def cost(k):
        return scale * (k / 1000) ** power

    k = largest_integer(cost, target, limit, guess)
    assert cost(k) <= target
    assert k == limit or cost(k + 1) > target


@given(st.floats(-3.0, -0.2), st.floats(0.01, 100.0), st.booleans())
def test_the_real_search_finds_the_edge(power, root, jump):
    def cost(s):
        return (s / root) ** power * (3.0 if jump and s < root else 1.0)

    found = smallest_real(cost, 1.0, root / 50, root * 7, 1e-4)
    assert cost(found) <= 1.0 < cost(found * (1 - 2.1e-4))
