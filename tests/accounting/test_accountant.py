"""Epsilon: laws that hold for every ledger, extreme values, and inputs that must not reach the machinery."""

import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.accounting import ZCDP, Laplace, Ledger, epsilon
from dpfunc.accounting.accountant import MAX_KINDS, METHODS, cached_epsilon, fewer_kinds
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event

events = st.builds(Event, st.floats(1e-4, 1.0), st.floats(0.3, 20.0), st.integers(1, 2000))
cheap = st.builds(Event, st.floats(1e-3, 0.2), st.floats(0.8, 20.0), st.integers(1, 500))
deltas = st.sampled_from([1e-3, 1e-5, 1e-8, 1e-12])
adjacencies = st.sampled_from(["add_remove", "replace_one"])
GOOD = Event(0.01, 1.0, 1000)


@settings(max_examples=12)
@given(st.lists(cheap, min_size=1, max_size=3), deltas, adjacencies)
def test_auto_is_the_best_of_what_is_possible(items, delta, adjacency):
    """And it depends on the events alone, in whatever order, not on what was asked before."""
    ledger = Ledger(tuple(items), adjacency)
    found = epsilon(ledger, delta)
    assert (found.delta, found.adjacency) == (delta, adjacency)
    assert found.note
    for method in ("tilted", "rdp", "prv", "gaussian"):
        try:
            assert found.epsilon <= epsilon(ledger, delta, method).epsilon
        except InvalidArgument:
            assert method != "rdp"
    cached_epsilon.cache_clear()
    assert epsilon(Ledger(tuple(items[::-1]), adjacency), delta) == found


@given(st.lists(events, min_size=MAX_KINDS + 1, max_size=60))
def test_fewer_kinds_cost_at_least_as_much(items):
    """Noise only goes down and probability only up, step by step; the number of steps stays."""
    ledger = Ledger(tuple(items))
    rounded, note = fewer_kinds(ledger.events)
    assert len(rounded) <= MAX_KINDS
    assert sum(event.num_steps for event in rounded) == ledger.num_steps
    assert bool(note) == (len(ledger.events) > MAX_KINDS)
    for cost in (lambda event: -event.noise_multiplier, lambda event: event.sampling_prob):
        for level in {cost(event) for event in rounded}:
            before, after = (sum(e.num_steps for e in some if cost(e) <= level) for some in (ledger.events, rounded))
            assert after <= before


def test_a_long_schedule_is_tight():
    """Hundreds of kinds of steps are accounted as they are; by prv they are rounded to 32."""
    ledger = Ledger(tuple(Event(0.01, 2 - 1.2 * (i + 0.5) / 250, 4) for i in range(250)))
    found, other = epsilon(ledger, 1e-5), epsilon(ledger, 1e-5, "prv")
    assert found.method == "tilted"
    assert "rounded" not in found.note
    ends = [Event(0.01, 2 - 1.2 * (i + 0.5) / 25, 40) for i in range(25)]  # the mean of each 40 steps: a fair estimate
    fair = epsilon(Ledger(tuple(ends)), 1e-5).epsilon
    assert fair <= found.epsilon <= 1.005 * fair
    assert "250 kinds of steps rounded" in other.note
    assert found.epsilon < other.epsilon <= 1.06 * fair


def test_museum_gdp_under_reports_and_says_so():
    run = Ledger((Event(0.032, 0.8, 96),))
    limit = epsilon(run, 1e-5, "gdp-approximation")
    assert limit.epsilon < 0.7 * epsilon(run, 1e-5).epsilon
    assert limit.method == "gdp-approximation"
    assert "NOT a bound" in limit.note
    worst = Ledger((Event(1e-4, 0.5, 1),))
    assert epsilon(worst, 1e-10, "gdp-approximation").epsilon < 1.94 / 500  # 1.94 is the truth
    assert epsilon(worst, 1e-10).epsilon >= 1.94


@pytest.mark.parametrize("delta", [1, 1.0, 2, -1e-5, math.nan, math.inf, True, "1e-5", None])
@pytest.mark.parametrize("method", METHODS)
def test_bad_deltas_are_refused(delta, method):
    with pytest.raises(InvalidArgument, match="delta"):
        epsilon(Ledger((GOOD,)), delta, method)


def test_delta_zero_has_an_answer():
    """No finite epsilon where losses have no bound; and the largest loss where they have one."""
    plain, full = Ledger((GOOD,)), Ledger((Event(1.0, 1.0, 1),))
    assert [epsilon(plain, 0.0, method).epsilon for method in ("auto", "tilted", "rdp")] == [math.inf] * 3
    assert [epsilon(full, 0, method).epsilon for method in ("auto", "gaussian")] == [math.inf] * 2
    assert epsilon(Ledger(), 0.0).epsilon == 0
    assert epsilon(Ledger((Laplace(1.0, 0.5, 3),)), 0.0).epsilon == 6.0


def test_a_step_without_records_costs_nothing():
    assert Ledger((Event(0.0, 1.0, 5),)).law == ()
    for method in METHODS:
        assert epsilon(Ledger((Event(0.0, 1.0, 5), Event(0, 0.0, 2))), 1e-5, method).epsilon == 0
    both = Ledger((Event(0.0, 1.0, 5), GOOD))
    assert epsilon(both, 1e-5) == epsilon(Ledger((GOOD,)), 1e-5)
    assert Ledger.from_json(both.to_json()) == both


def test_a_method_says_which_laws_it_takes():
    """The error names the law and a method that takes it; that one answers."""
    renyi, losses = Ledger((ZCDP(1, rho=0.1),)), Ledger((Laplace(1.0, 0.01, 1),))
    for ledger, kind, refusing, answering in (
        (renyi, "a Renyi curve", ("tilted", "prv", "gaussian", "gdp-approximation"), ("rdp", "auto")),
        (losses, "a law of losses", ("prv", "gaussian", "gdp-approximation"), ("tilted", "rdp", "auto")),
    ):
        for method in refusing:
            with pytest.raises(InvalidArgument, match=f"for method '{method}', got {kind}.*Use method .*'rdp'"):
                epsilon(ledger, 1e-5, method)
        assert all(math.isfinite(epsilon(ledger, 1e-5, method).epsilon) for method in answering)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_nothing_costs_nothing(method, adjacency):
    found = epsilon(Ledger(adjacency=adjacency), 1e-5, method)
    assert found.epsilon == 0.0
    assert type(found.epsilon) is float


@pytest.mark.parametrize("method", ["auto", "tilted", "prv", "rdp"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_step_without_noise_is_no_privacy(method, adjacency):
    assert epsilon(Ledger((Event(0.5, 0.0, 1), Event(0.1, 1.0, 10)), adjacency), 1e-5, method).epsilon == math.inf
    assert epsilon(Ledger((Event(1.0, 0.0, 1),), adjacency), 1e-5).epsilon == math.inf


EXTREME = [
    (5e-324, 1.0, 1), (1e-300, 1e-300, 10), (1e-7, 1.0, 10**9), (1 - 1e-16, 1.0, 10), (0.5, 1e-160, 1), (0.5, 1e-3, 1),
    (0.5, 0.03, 100), (0.5, 1e300, 10), (1.0, 1e-200, 1), (1.0, 1e308, 1), (0.01, 1e5, 10**6), (0.01, 1.0, 10**30),
    (0.01, 1.0, 10**400), (1.0, 1.0, 10**400), (0.2, 0.3, 1000), (0.01, 20.0, 1000),
]  # fmt: skip


@pytest.mark.parametrize("event", EXTREME, ids=str)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_no_warning_leaks(event, adjacency):
    """Extreme but legal values: an answer >= 0, no NaN, no warning, no exception."""
    ledger = Ledger((Event(*event),), adjacency)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for delta in (0.5, 1e-5, 1e-9, 1e-300):
            assert 0 <= epsilon(ledger, delta).epsilon <= epsilon(ledger, delta, "rdp").epsilon * (1 + 1e-9)


UNAVAILABLE = {
    "delta >= 1e-200": (GOOD, 1e-250, "tilted"),
    "at most 1e\\+11 steps": (Event(0.01, 1.0, 10**12), 1e-5, "tilted"),
    "got inf": (Event(0.01, 1.0, 10**400), 1e-5, "tilted"),
    "noise multipliers >= 0.05": (Event(0.2, 0.01, 1), 1e-5, "tilted"),
    "of the steps without sampling": (Event(1.0, 1e-9, 1), 1e-5, "tilted"),
    "delta >= 1e-09": (GOOD, 1e-12, "prv"),
    "grid of at most": (Event(0.2, 0.5, 10**5), 1e-5, "prv"),
    "noise multipliers >= 0.02": (Event(0.2, 0.001, 1), 1e-5, "prv"),
    "sampling_prob = 1": (GOOD, 1e-5, "gaussian"),
}


@pytest.mark.parametrize("words", UNAVAILABLE)
def test_a_method_says_why_it_refuses_and_auto_takes_renyi(words):
    event, delta, method = UNAVAILABLE[words]
    ledger = Ledger((event, Event(0.5, 3.0, 1)))
    with pytest.raises(InvalidArgument, match=words):
        epsilon(ledger, delta, method)
    if method == "tilted":
        found = epsilon(ledger, delta)
        assert found.method == "rdp"
        assert "no tilted: Expected" in found.note


@pytest.mark.parametrize("method", ["gdp", "PRV", "", None, "pld"])
def test_what_is_no_question_is_refused(method):
    with pytest.raises(InvalidArgument, match="method"):
        epsilon(Ledger(), 1e-5, method)
    with pytest.raises(InvalidArgument, match="Ledger"):
        epsilon((GOOD,), 1e-5)
    with pytest.raises(InvalidArgument, match="adjacency"):
        epsilon(Ledger((GOOD,), "replace_one"), 1e-5, "gdp-approximation")
