"""Epsilon against known values, and against two computations of the truth that share no code with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from accounting_oracle import (
    Undecided,
    agreed_delta,
    delta_bracket,
    delta_of_gaussian,
    epsilon_by_inversion,
    epsilon_of_one_step,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpfunc.accounting import Ledger, epsilon
from dpfunc.types import Event

ABOVE = 0.011  # the error of prv at epsilon > 0.5, and a tenth
TIGHT = 1.05e-4  # relative: the error of tilted, and the digits of the truth


def ledger_of(*events, adjacency="add_remove"):
    return Ledger(tuple(Event(*event) for event in events), adjacency)


MIXED = ((0.001, 0.8, 1000), (0.1, 4.0, 50), (0.01, 1.2, 500))
# events, delta, truth, method of auto
REFERENCE = {
    "q=.01 T=1000": ([(0.01, 1.0, 1000)], 1e-5, 1.8282367, "tilted"),
    "delta 1e-30": ([(0.01, 1.0, 1000)], 1e-30, 9.3418956, "tilted"),
    "ten million steps": ([(1e-4, 1.0, 10**7)], 1e-5, 1.6196342, "tilted"),
    "no privacy left": ([(0.2, 0.5, 10**5)], 1e-10, 18368.764, "tilted"),
    "no sampling": ([(1.0, 5.0, 10)], 1e-5, 2.5943784, "gaussian"),
    "two kinds": ([(0.01, 1.0, 500), (0.02, 2.0, 300)], 1e-5, 1.50225, "tilted"),
    "two kinds, 1e-8": ([(0.01, 1.0, 500), (0.02, 2.0, 300)], 1e-8, 2.29267, "tilted"),
    "three kinds": (MIXED, 1e-5, 1.18141, "tilted"),
    "one step": ([(0.01, 1.0, 1)], 1e-5, 0.1994504, "tilted"),
    "one step, little noise": ([(1e-4, 0.3, 1)], 1e-5, 0.5900464, "tilted"),
}


@pytest.mark.parametrize(("events", "delta", "truth", "method"), REFERENCE.values(), ids=REFERENCE)
def test_reference_table(events, delta, truth, method):
    found = epsilon(ledger_of(*events), delta)
    assert found.method == method
    assert truth - 5e-6 * truth <= found.epsilon <= truth * (1 + TIGHT)


@pytest.mark.parametrize("name", ["q=.01 T=1000", "two kinds", "three kinds"])
@pytest.mark.parametrize(("method", "above"), [("tilted", TIGHT), ("prv", 0.01), ("rdp", 0.35)])
def test_every_method_is_an_upper_bound(name, method, above):
    events, delta, truth, _ = REFERENCE[name]
    assert truth * (1 - 5e-6) <= epsilon(ledger_of(*events), delta, method).epsilon <= truth * (1 + above)


# noise multipliers relative to 2 C; values of a privacy loss distribution of another library, which is pessimistic
REPLACE_ONE = {
    "T=1000": ((0.01, 0.5, 1000), 2.843),
    "MNIST": ((256 / 60000, 0.55, 14062), 4.222),
    "CIFAR": ((4096 / 50000, 3.0, 1125), 3.951),
    "small q": ((0.0016, 0.4, 1875), 0.812),
}


@pytest.mark.parametrize(("event", "published"), REPLACE_ONE.values(), ids=REPLACE_ONE)
def test_replace_one(event, published):
    found = epsilon(ledger_of(event, adjacency="replace_one"), 1e-5)
    truth = epsilon_by_inversion([event], 1e-5, "replace", guess=published)
    assert found.method == "tilted"
    assert truth == pytest.approx(published, abs=1e-3)
    assert truth <= found.epsilon <= truth * (1 + TIGHT)
    numerical = epsilon(ledger_of(event, adjacency="replace_one"), 1e-5, "prv").epsilon
    assert truth <= numerical <= truth + ABOVE
    renyi = epsilon(ledger_of(event, adjacency="replace_one"), 1e-5, "rdp").epsilon
    assert found.epsilon <= renyi <= 2 * found.epsilon


def test_replace_one_costs_more_than_add_remove_and_less_than_half_the_noise():
    """At noise of the same standard deviation: sigma relative to 2 C is half of sigma relative to C."""
    add_remove = epsilon(ledger_of((0.01, 1.0, 1000)), 1e-5).epsilon
    replace_one = epsilon(ledger_of((0.01, 0.5, 1000), adjacency="replace_one"), 1e-5).epsilon
    halved = epsilon(ledger_of((0.01, 0.5, 1000)), 1e-5).epsilon
    assert add_remove < replace_one < halved


def test_zero_out_costs_what_add_remove_costs():
    events = [(0.01, 1.0, 500), (0.02, 2.0, 300)]
    zero_out = epsilon(ledger_of(*events, adjacency="zero_out"), 1e-5)
    assert zero_out.epsilon == epsilon(ledger_of(*events), 1e-5).epsilon
    assert zero_out.adjacency == "zero_out"


def test_replace_one_without_sampling_is_the_gaussian_mechanism():
    for sigma, steps in ((5.0, 10), (0.7, 1)):
        found = epsilon(ledger_of((1.0, sigma, steps), adjacency="replace_one"), 1e-6)
        assert found.method == "gaussian"
        assert delta_of_gaussian(found.epsilon, math.sqrt(steps) / sigma) == pytest.approx(1e-6, rel=1e-6)


def test_prv_of_no_sampling_agrees_with_the_exact_formula():
    """One route through the FFT, one through the closed form."""
    ledger = ledger_of((1.0, 5.0, 10))
    exact, composed = epsilon(ledger, 1e-5, "gaussian").epsilon, epsilon(ledger, 1e-5, "prv").epsilon
    assert exact <= composed <= exact + ABOVE


def test_sampling_mixed_with_no_sampling():
    events = [(0.01, 1.0, 500), (1.0, 8.0, 3), (1.0, 10.0, 2)]
    truth = epsilon_by_inversion([(0.01, 1.0, 500), (1.0, (3 / 64 + 2 / 100) ** -0.5, 1)], 1e-5)
    assert truth <= epsilon(ledger_of(*events), 1e-5, "prv").epsilon <= truth + ABOVE
    assert truth <= epsilon(ledger_of(*events), 1e-5).epsilon <= truth * (1 + TIGHT)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8, 1e-12, 1e-100])
@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 20.0])
def test_gaussian_is_exact(mu, delta):
    found = epsilon(ledger_of((1.0, 1 / mu, 1)), delta, "gaussian").epsilon
    if delta >= 1e-12 and found > 0:
        assert delta_of_gaussian(found, mu) <= delta * (1 + 1e-9)
        assert delta_of_gaussian(found * (1 - 1e-6), mu) > delta
    assert 0 <= found <= mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))


steps_of_any_kind = st.tuples(st.floats(1e-3, 0.2), st.floats(0.7, 6.0), st.integers(100, 1500))


@settings(max_examples=15)
@given(
    st.lists(steps_of_any_kind, min_size=1, max_size=3),
    st.sampled_from([1e-4, 1e-5, 1e-7, 1e-9]),
    st.sampled_from(["add_remove", "replace_one"]),
    st.sampled_from(["auto", "prv"]),
)
def test_never_below_the_truth(events, delta, adjacency, method):
    found = epsilon(ledger_of(*events, adjacency=adjacency), delta, method)
    assume(0.05 <= found.epsilon <= 20)
    for direction in ["replace"] if adjacency == "replace_one" else ["add", "remove"]:
        try:
            at_claim = agreed_delta(found.epsilon, events, direction)
            error = min(0.01, 0.02 * epsilon(ledger_of(*events, adjacency=adjacency), delta, "rdp").epsilon)
            below = agreed_delta(found.epsilon - 1.1 * error, events, direction)
        except Undecided:
            assume(False)
        assert at_claim <= delta * (1 + 1e-6)
    # in the dearer direction it is not far above: the grid's error, and a little delta
    assert below > delta * (1 - 0.002)


FEW_STEPS = [
    [(5e-4, 0.47, 177), (9e-4, 7.6, 50)],
    [(0.01, 1.0, 30)],
    [(0.001, 0.4, 5), (0.3, 3.0, 2)],
    [(0.9, 2.0, 4)],
]


@pytest.mark.parametrize("events", FEW_STEPS, ids=str)
@pytest.mark.parametrize("delta", [1e-4, 1e-7])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_few_steps_against_rounded_losses(events, delta, adjacency):
    """Losses rounded down and up bracket the truth where the inversion cannot tell."""
    found = epsilon(ledger_of(*events, adjacency=adjacency), delta)
    direction = "replace" if adjacency == "replace_one" else "remove"
    low, _ = delta_bracket(found.epsilon, events, direction)
    _, high = delta_bracket(max(0.0, found.epsilon - ABOVE), events, direction)
    assert low <= delta
    assert high >= delta


@settings(max_examples=12)
@given(st.floats(1e-4, 0.9), st.floats(0.4, 5.0), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_one_step_against_the_closed_form(q, sigma, delta):
    found = epsilon(ledger_of((q, sigma, 1)), delta)
    tv = q * math.erf(1 / sigma / 8**0.5)
    truth = 0.0 if tv <= delta else epsilon_of_one_step(q, sigma, delta)
    assert truth <= found.epsilon <= truth + ABOVE


def old_conversion(q, sigma, steps, orders):
    """The figures of 2019-2021 were R(a) + log(1/delta) / (a - 1) over these orders, at delta = 1e-5."""
    from dpfunc.accounting.rdp import step_curve

    curve = steps * np.array(step_curve(q, sigma, False, orders))
    return float(np.min(curve + math.log(1e5) / (np.array(orders) - 1)))


@pytest.mark.parametrize(
    ("published", "q", "sigma", "steps"),
    [
        (2.92, 256 / 60000, 1.12, 14063),
        (9.74, 256 / 60000, 0.6, 7032),
        (1.20, 256 / 60000, 1.2, 2344),
        (6.86, 0.004, 0.7, 45 * 250),
        (2.91, 0.004, 1.1, 60 * 250),
        (1.16, 0.004, 1.3, 15 * 250),
        (0.71, 0.004, 1.3, 250),
    ],
)
def test_published_figures_are_reproduced_and_improved(published, q, sigma, steps):
    orders = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)))
    assert old_conversion(q, sigma, steps, orders) == pytest.approx(published, abs=0.015)
    assert epsilon(ledger_of((q, sigma, steps)), 1e-5).epsilon < 0.9 * published


def test_museum_closed_form_epsilon():
    """1000 records, 3 epochs of 32 batches of 32, sigma 0.8: a formula that circulates says 2.19."""
    found = epsilon(ledger_of((0.032, 0.8, 96)), 1e-5)
    assert found.epsilon == pytest.approx(3.83, abs=0.02)


def test_renyi_orders_reach_far_enough():
    """With orders up to 63 only, Renyi can never say less than 0.1 at delta = 1e-5, whatever the noise."""
    assert epsilon(ledger_of((0.01, 1000.0, 1)), 1e-5, "rdp").epsilon < 0.006
