"""Calibration is the inverse of epsilon, from the safe side."""

from __future__ import annotations

import math
from functools import partial

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

noise_for = partial(calibrate_noise, delta=1e-5)
steps_for = partial(calibrate_steps, delta=1e-5)
batch_for = partial(calibrate_batch_size, delta=1e-5, dataset_size=100, num_steps=5, noise_multiplier=1.0)


def cost(*events, delta=1e-5, **options):
    return epsilon(Ledger(tuple(Event(*event) for event in events), **options), delta).epsilon


@settings(max_examples=8)
@given(st.floats(0.3, 12.0), st.floats(0.002, 1.0), st.integers(1, 1000), st.sampled_from(["auto", "rdp"]),
       st.sampled_from(["add_remove", "replace_one"]))  # fmt: skip
def test_calibrated_noise_meets_the_target_and_less_does_not(target, q, steps, method, adjacency):
    sigma = noise_for(epsilon=target, sampling_prob=q, num_steps=steps, method=method, adjacency=adjacency)
    exact, less = (
        epsilon(Ledger((Event(q, noise, steps),), adjacency), 1e-5, method).epsilon
        for noise in (sigma, sigma * (1 - 4e-4))
    )
    assert exact <= target < less


def test_many_kinds_take_few_evaluations():
    """Each evaluation composes all that was spent, so their number is the time."""
    spent = Ledger(tuple(Event(0.01 + i * 1e-4, 1.0 + i / 100, 5) for i in range(100)))

    def evaluations(calibrate_one):
        cached_epsilon.cache_clear()
        return calibrate_one(epsilon=3.0, spent=spent, sampling_prob=0.01), cached_epsilon.cache_info().misses

    sigma, of_noise = evaluations(partial(noise_for, num_steps=1000))
    steps, of_steps = evaluations(partial(steps_for, noise_multiplier=1.0))
    assert max(of_noise, of_steps) <= 5
    assert epsilon(spent.record(Event(0.01, sigma, 1000)), 1e-5).epsilon <= 3.0
    assert epsilon(spent.record(Event(0.01, sigma * (1 - 4e-4), 1000)), 1e-5).epsilon > 3.0
    assert epsilon(spent.record(Event(0.01, 1.0, steps)), 1e-5).epsilon <= 3.0


@pytest.mark.parametrize("target", [1e-3, 500.0, 1e9])
def test_extreme_targets(target):
    sigma = noise_for(epsilon=target, sampling_prob=0.01, num_steps=50)
    assert cost((0.01, sigma, 50)) <= target
    assert target < 1e9 or 2**-10 <= sigma <= 2**-9  # the least noise is a floor


MUCH = Ledger((Event(0.5, 1.0, 100),))
NOISE = partial(noise_for, epsilon=1.0, sampling_prob=0.01, num_steps=5)
STEPS = partial(steps_for, epsilon=1.0, sampling_prob=0.01, noise_multiplier=1.0)
REFUSED = {
    "noise, spent": (NOISE, {"spent": MUCH}, UnreachableBudget, "epsilon=1 at delta=1e-05.*spent before"),
    "batch, spent": (batch_for, {"epsilon": 1.0, "spent": MUCH}, UnreachableBudget, "a batch of one record"),
    "steps, spent": (STEPS, {"spent": MUCH}, UnreachableBudget, "is spent"),
    "noise of another adjacency": (NOISE, {"spent": Ledger(adjacency="replace_one")}, LedgerConflict, "replace_one"),
    "steps of another adjacency": (STEPS, {"spent": Ledger(adjacency="zero_out")}, LedgerConflict, "zero_out"),
    "steps without noise": (STEPS, {"noise_multiplier": 0.0}, InvalidArgument, "noise_multiplier"),
    "prv": (NOISE, {"delta": 1e-12, "method": "prv"}, InvalidArgument, "delta >= 1e-09"),
    **{
        f"{name}={value}": (NOISE, {name: value}, InvalidArgument, name.removeprefix("num_"))
        for name, values in {
            "epsilon": (0.0, -1.0, math.inf), "delta": (0.0, 1.0), "sampling_prob": (0.0, 1.5), "num_steps": (0, 1.5),
            "schedule": ([1.0, 2.0], [1.0] * 4 + [0.0]), "adjacency": ("swap",), "method": ("gdp",),
        }.items()
        for value in values
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name):
    call, change, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call(**change)


def test_a_schedule_is_scaled():
    shape = Schedule(((100, 2.0), (100, 1.0)))
    call = partial(noise_for, epsilon=2.0, sampling_prob=0.02, num_steps=300)
    scale = call(schedule=shape)
    noise = Schedule(tuple((steps, scale * value) for steps, value in shape.pieces))
    assert 1.995 <= epsilon(schedule_ledger(0.02, noise, 300), 1e-5).epsilon <= 2.0
    assert scale == call(schedule=[2.0] * 100 + [1.0] * 200)
    assert call(schedule=[2.0] * 300) == pytest.approx(call() / 2, rel=1e-3)


def test_prv_alone_can_calibrate():
    sigma = noise_for(epsilon=1.0, sampling_prob=0.01, num_steps=1000, method="prv")
    assert sigma == pytest.approx(1.4248, rel=6e-4)


GDP = {"delta": 1e-5, "epsilon": 1.0, "method": "gdp-approximation"}


@pytest.mark.parametrize(
    "call",
    [partial(noise_for, sampling_prob=0.01, num_steps=100), partial(calibrate, lambda s: Ledger((Event(0.1, s, 1),))),
     batch_for, partial(affordable_steps, lambda k: Ledger(), limit=9)],
)  # fmt: skip
def test_museum_gdp_cannot_calibrate(call):
    with pytest.raises(InvalidArgument, match="under-reports"):
        call(**GDP)


def test_largest_batch():
    size = calibrate_batch_size(epsilon=2.0, delta=1e-6, dataset_size=50000, num_steps=1000, noise_multiplier=1.0)
    assert cost((size / 50000, 1.0, 1000), delta=1e-6) <= 2.0 < cost(((size + 1) / 50000, 1.0, 1000), delta=1e-6)


@settings(max_examples=4)
@given(st.floats(0.5, 6.0), st.floats(0.002, 0.5), st.floats(0.8, 4.0), st.sampled_from(["auto", "rdp"]))
def test_one_step_more_is_too_much(target, q, sigma, method):
    def after(steps):
        return Ledger((Event(q, sigma, steps),)) if steps else Ledger()

    steps = affordable_steps(after, epsilon=target, delta=1e-5, limit=3000, method=method)
    assert epsilon(after(steps), 1e-5, method).epsilon <= target
    assert steps == 3000 or epsilon(after(steps + 1), 1e-5, method).epsilon > target


@pytest.mark.parametrize(("target", "limit", "steps"), [(2.6, 4, 4), (2.6, 0, 0), (2.6, 100, 7), (0.1, 100, 0)])
def test_limit_and_nothing(target, limit, steps):
    after = lambda count: Ledger((Event(1.0, 5.0, 3 + count),))
    assert affordable_steps(after, epsilon=target, delta=1e-5, limit=limit) == steps
    with pytest.raises(InvalidArgument):
        affordable_steps(after, epsilon=target, delta=1e-5, limit=-1)


def test_remaining_counts_steps_and_not_epsilon():
    spent = Ledger((Event(0.01, 1.0, 1000),))
    left = remaining(spent, epsilon=2.0, delta=1e-5, event=Event(0.01, 1.0, 1))
    assert left.num_steps == 202
    assert left.epsilon_spent == epsilon(spent, 1e-5).epsilon
    assert left.epsilon_left == pytest.approx(2.0 - left.epsilon_spent)
    with pytest.raises(UnreachableBudget):  # subtracting epsilons would have stopped the run far too early
        steps_for(epsilon=left.epsilon_left, sampling_prob=0.01, noise_multiplier=1.0)
    over = remaining(MUCH, epsilon=1.0, delta=1e-5, event=Event(0.01, 1.0, 1))
    assert over[0] == over[2] == 0
    assert over.epsilon_spent > 1.0
    for change in ({"event": Event(0.1, 1.0, 5)}, {"epsilon": 0.0}):
        with pytest.raises(InvalidArgument):
            remaining(Ledger(), **{"epsilon": 1.0, "delta": 1e-5, "event": Event(0.1, 1.0, 1), **change})
