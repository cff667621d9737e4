"""Calibration is the inverse of epsilon, from the safe side."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.accounting import (
    Ledger,
    affordable_steps,
    calibrate,
    calibrate_batch_size,
    calibrate_noise,
    calibrate_steps,
    epsilon,
    remaining,
    schedule_ledger,
)
from dpfunc.accounting.accountant import cached_epsilon
from dpfunc.errors import InvalidArgument, LedgerConflict, UnreachableBudget
from dpfunc.types import Event, Schedule


@settings(max_examples=8)
@given(
    st.floats(0.3, 12.0),
    st.floats(0.002, 1.0),
    st.integers(1, 1000),
    st.sampled_from(["auto", "rdp"]),
    st.sampled_from(["add_remove", "replace_one"]),
)
def test_calibrated_noise_meets_the_target_and_less_does_not(target, q, steps, method, adjacency):
    sigma = calibrate_noise(
        epsilon=target, delta=1e-5, sampling_prob=q, num_steps=steps, method=method, adjacency=adjacency
    )

    def cost(noise):
        return epsilon(Ledger((Event(q, noise, steps),), adjacency), 1e-5, method).epsilon

    assert cost(sigma) <= target < cost(sigma * (1 - 4e-4))


@pytest.mark.parametrize(
    ("target", "q", "steps", "sigma"),
    [(0.1, 0.01, 1000, 9.7968), (8.0, 0.04, 2000, 1.28997), (0.05, 0.01, 1000, 18.327), (1.0, 0.01, 1000, 1.41458)],
)
def test_reference_noise(target, q, steps, sigma):
    found = calibrate_noise(epsilon=target, delta=1e-5, sampling_prob=q, num_steps=steps)
    assert found == pytest.approx(sigma, rel=6e-4)


def test_few_evaluations():
    cached_epsilon.cache_clear()
    calibrate_noise(epsilon=3.0, delta=1e-5, sampling_prob=0.1, num_steps=200)
    assert cached_epsilon.cache_info().misses <= 12


def test_five_hundred_kinds_take_few_evaluations():
    """Each evaluation composes all that was spent, so their number is the time."""
    spent = Ledger(tuple(Event(0.01 + i * 1e-5, 1.0 + i / 500, 1) for i in range(500)))
    target = {"epsilon": 3.0, "delta": 1e-5, "spent": spent}

    def evaluations(calibrate_one):
        cached_epsilon.cache_clear()
        return calibrate_one(), cached_epsilon.cache_info().misses

    sigma, of_noise = evaluations(lambda: calibrate_noise(sampling_prob=0.01, num_steps=1000, **target))
    steps, of_steps = evaluations(lambda: calibrate_steps(sampling_prob=0.01, noise_multiplier=1.0, **target))
    assert max(of_noise, of_steps) <= 5
    assert epsilon(spent.record(Event(0.01, sigma, 1000)), 1e-5).epsilon <= 3.0
    assert epsilon(spent.record(Event(0.01, sigma * (1 - 4e-4), 1000)), 1e-5).epsilon > 3.0
    assert epsilon(spent.record(Event(0.01, 1.0, steps)), 1e-5).epsilon <= 3.0


def test_no_sampling_is_exact():
    sigma = calibrate_noise(epsilon=2.5943784, delta=1e-5, sampling_prob=1.0, num_steps=10)
    assert sigma == pytest.approx(5.0, rel=2e-4)


@pytest.mark.parametrize("target", [1e-3, 500.0])
def test_extreme_targets(target):
    sigma = calibrate_noise(epsilon=target, delta=1e-5, sampling_prob=0.01, num_steps=50)
    assert epsilon(Ledger((Event(0.01, sigma, 50),)), 1e-5).epsilon <= target


def test_the_least_noise_is_a_floor():
    sigma = calibrate_noise(epsilon=1e9, delta=1e-5, sampling_prob=0.01, num_steps=1)
    assert 2**-10 <= sigma <= 2**-9


def test_what_was_spent_counts():
    before = Ledger((Event(0.02, 1.5, 400),))
    alone = calibrate_noise(epsilon=3.0, delta=1e-5, sampling_prob=0.01, num_steps=500)
    after = calibrate_noise(epsilon=3.0, delta=1e-5, sampling_prob=0.01, num_steps=500, spent=before)
    assert after > alone
    both = before.record(Event(0.01, after, 500))
    assert 2.99 <= epsilon(both, 1e-5).epsilon <= 3.0


def test_a_spent_budget_is_unreachable_and_says_so():
    before = Ledger((Event(0.5, 1.0, 100),))
    with pytest.raises(UnreachableBudget, match=r"epsilon=1 at delta=1e-05.*spent before"):
        calibrate_noise(epsilon=1.0, delta=1e-5, sampling_prob=0.01, num_steps=5, spent=before)
    with pytest.raises(UnreachableBudget):
        calibrate_batch_size(epsilon=1.0, delta=1e-5, dataset_size=100, num_steps=5, noise_multiplier=1.0, spent=before)


def test_spent_of_another_adjacency_is_refused():
    with pytest.raises(LedgerConflict):
        calibrate_noise(epsilon=1.0, delta=1e-5, sampling_prob=0.01, num_steps=5, spent=Ledger(adjacency="replace_one"))
    with pytest.raises(LedgerConflict):
        calibrate_steps(
            epsilon=1.0, delta=1e-5, sampling_prob=0.1, noise_multiplier=1.0, spent=Ledger(adjacency="zero_out")
        )


def test_a_schedule_is_scaled():
    shape = Schedule(((100, 2.0), (100, 1.0)))
    scale = calibrate_noise(epsilon=2.0, delta=1e-5, sampling_prob=0.02, num_steps=300, schedule=shape)
    noise = Schedule(tuple((steps, scale * value) for steps, value in shape.pieces))
    assert 1.995 <= epsilon(schedule_ledger(0.02, noise, 300), 1e-5).epsilon <= 2.0
    listed = [2.0] * 100 + [1.0] * 200
    assert scale == calibrate_noise(epsilon=2.0, delta=1e-5, sampling_prob=0.02, num_steps=300, schedule=listed)
    constant = calibrate_noise(epsilon=2.0, delta=1e-5, sampling_prob=0.02, num_steps=300)
    flat = calibrate_noise(epsilon=2.0, delta=1e-5, sampling_prob=0.02, num_steps=300, schedule=[2.0] * 300)
    assert flat == pytest.approx(constant / 2, rel=1e-3)


def test_general_calibration_scales_any_ledger():
    def two_phases(scale):
        return Ledger((Event(0.05, scale, 50), Event(1.0, 6 * scale, 2)))

    scale = calibrate(two_phases, epsilon=1.5, delta=1e-6)
    assert epsilon(two_phases(scale), 1e-6).epsilon <= 1.5 < epsilon(two_phases(scale * 0.999), 1e-6).epsilon


def test_prv_alone_can_calibrate():
    sigma = calibrate_noise(epsilon=1.0, delta=1e-5, sampling_prob=0.01, num_steps=1000, method="prv")
    assert sigma == pytest.approx(1.4248, rel=6e-4)
    with pytest.raises(InvalidArgument, match="delta >= 1e-09"):
        calibrate_noise(epsilon=1.0, delta=1e-12, sampling_prob=0.01, num_steps=1000, method="prv")


def test_museum_gdp_cannot_calibrate():
    with pytest.raises(InvalidArgument, match="under-reports"):
        calibrate_noise(epsilon=1.0, delta=1e-5, sampling_prob=0.01, num_steps=100, method="gdp-approximation")
    with pytest.raises(InvalidArgument, match="under-reports"):
        calibrate(lambda s: Ledger((Event(0.1, s, 1),)), epsilon=1.0, delta=1e-5, method="gdp-approximation")
    with pytest.raises(InvalidArgument, match="under-reports"):
        calibrate_batch_size(
            epsilon=1.0, delta=1e-5, dataset_size=9, num_steps=5, noise_multiplier=1.0, method="gdp-approximation"
        )


def test_largest_batch():
    size = calibrate_batch_size(epsilon=2.0, delta=1e-6, dataset_size=50000, num_steps=1000, noise_multiplier=1.0)

    def cost(batch):
        return epsilon(Ledger((Event(batch / 50000, 1.0, 1000),)), 1e-6).epsilon

    assert cost(size) <= 2.0 < cost(size + 1)


def test_a_batch_of_all_records_can_be_the_answer():
    assert calibrate_batch_size(epsilon=9.0, delta=1e-5, dataset_size=70, num_steps=1, noise_multiplier=9.0) == 70


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
