"""Laws that hold for every ledger, whatever the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.accounting import Guarantee, Ledger, epsilon
from dpfunc.accounting.accountant import MAX_KINDS, fewer_kinds
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event

probs = st.floats(1e-4, 1.0)
sigmas = st.floats(0.3, 20.0)
steps = st.integers(1, 2000)
events = st.builds(Event, probs, sigmas, steps)
cheap = st.builds(Event, st.floats(1e-3, 0.2), st.floats(0.8, 20.0), st.integers(1, 500))
deltas = st.sampled_from([1e-3, 1e-5, 1e-8, 1e-12])
adjacencies = st.sampled_from(["add_remove", "replace_one"])
factors = st.floats(1.01, 5.0)
ROUND = 1 + 1e-9


def renyi(*items, delta, adjacency="add_remove"):
    return epsilon(Ledger(items, adjacency), delta, "rdp").epsilon


@given(events, factors, deltas, adjacencies)
def test_renyi_rises_with_probability_and_steps_and_falls_with_noise_and_delta(event, factor, delta, adjacency):
    q, sigma, count = event.sampling_prob, event.noise_multiplier, event.num_steps
    base = renyi(event, delta=delta, adjacency=adjacency)
    assert base >= 0
    assert base <= ROUND * renyi(Event(min(1.0, q * factor), sigma, count), delta=delta, adjacency=adjacency)
    assert base <= ROUND * renyi(Event(q, sigma / factor, count), delta=delta, adjacency=adjacency)
    assert base <= ROUND * renyi(Event(q, sigma, int(count * factor) + 1), delta=delta, adjacency=adjacency)
    assert base <= ROUND * renyi(event, delta=delta / factor, adjacency=adjacency)
    assert base <= ROUND * renyi(event, Event(0.5, 9.0, 3), delta=delta, adjacency=adjacency)


@settings(max_examples=10)
@given(st.builds(Event, st.floats(1e-3, 0.3), st.floats(0.6, 5.0), steps), st.floats(1.05, 3.0), adjacencies)
def test_auto_is_monotone_up_to_its_error(event, factor, adjacency):
    def cost(q, sigma, count):
        return epsilon(Ledger((Event(q, sigma, count),), adjacency), 1e-5).epsilon

    q, sigma, count = event.sampling_prob, event.noise_multiplier, event.num_steps
    base = cost(q, sigma, count)
    for larger in (cost(q * factor, sigma, count), cost(q, sigma / factor, count), cost(q, sigma, int(count * factor))):
        assert base <= larger * 1.021 + 1e-4


@settings(max_examples=12)
@given(st.lists(cheap, min_size=1, max_size=3), deltas, adjacencies)
def test_auto_is_the_best_of_what_is_possible(items, delta, adjacency):
    ledger = Ledger(tuple(items), adjacency)
    found = epsilon(ledger, delta)
    assert found.delta == delta
    assert found.adjacency == adjacency
    assert found.note
    for method in ("tilted", "rdp", "prv", "gaussian"):
        try:
            assert found.epsilon <= epsilon(ledger, delta, method).epsilon
        except InvalidArgument:
            assert method != "rdp"


@settings(max_examples=10)
@given(st.lists(cheap, min_size=2, max_size=3), st.permutations([0, 1, 2]))
def test_order_changes_nothing(items, order):
    shuffled = [items[i] for i in order if i < len(items)]
    assert epsilon(Ledger(tuple(items)), 1e-5) == epsilon(Ledger(tuple(shuffled)), 1e-5)


@settings(max_examples=5)
@given(st.lists(cheap, min_size=1, max_size=2))
def test_a_pure_function(items):
    from dpfunc.accounting.accountant import cached_epsilon

    ledger = Ledger(tuple(items))
    first = epsilon(ledger, 1e-5)
    cached_epsilon.cache_clear()
    assert epsilon(ledger, 1e-5) == first


@given(st.lists(events, min_size=MAX_KINDS + 1, max_size=60))
def test_fewer_kinds_cost_at_least_as_much(items):
    """Noise only goes down and probability only up, step by step; the number of steps stays."""
    ledger = Ledger(tuple(items))
    rounded, note = fewer_kinds(ledger.events)
    assert len(rounded) <= MAX_KINDS
    assert sum(event.num_steps for event in rounded) == ledger.num_steps
    assert bool(note) == (len(ledger.events) > MAX_KINDS)
    for level in sorted({event.noise_multiplier for event in rounded}):
        noisier = sum(e.num_steps for e in ledger.events if e.noise_multiplier >= level)
        assert sum(e.num_steps for e in rounded if e.noise_multiplier >= level) <= noisier
    for level in sorted({event.sampling_prob for event in rounded}):
        rarer = sum(e.num_steps for e in ledger.events if e.sampling_prob <= level)
        assert sum(e.num_steps for e in rounded if e.sampling_prob <= level) <= rarer


def test_a_long_schedule_is_tight():
    """A thousand kinds of steps are accounted as they are."""

    def ledger(scale):
        return Ledger(tuple(Event(0.01, scale * (2 - 1.2 * i / 1000), 1) for i in range(1000)))

    found = epsilon(ledger(1.0), 1e-5)
    assert found.method == "tilted"
    assert "rounded" not in found.note
    ends = [Event(0.01, 2 - 1.2 * (i + 0.5) / 25, 40) for i in range(25)]  # the mean of each 40 steps: a fair estimate
    fair = epsilon(Ledger(tuple(ends)), 1e-5).epsilon
    assert fair <= found.epsilon <= 1.005 * fair
    other = epsilon(ledger(1.0), 1e-5, "prv")  # rounds them to 32 kinds
    assert "1000 kinds of steps rounded" in other.note
    assert found.epsilon < other.epsilon <= 1.06 * fair


def test_guarantee_reads_well():
    found = epsilon(Ledger((Event(0.01, 1.0, 1000),)), 1e-5)
    assert float(found) == found.epsilon
    assert str(found).startswith("(epsilon=1.828")
    assert "delta=1e-05)-DP under add_remove, by tilted" in str(found)
    assert isinstance(found, Guarantee)
    assert type(found.epsilon) is float


def test_museum_gdp_under_reports_and_says_so():
    """1000 records, batches of 32, 3 epochs, sigma 0.8."""
    run = Ledger((Event(0.032, 0.8, 96),))
    limit = epsilon(run, 1e-5, "gdp-approximation")
    assert limit.epsilon < 0.7 * epsilon(run, 1e-5).epsilon
    assert limit.method == "gdp-approximation"
    assert "NOT a bound" in limit.note
    worst = Ledger((Event(1e-4, 0.5, 1),))
    assert epsilon(worst, 1e-10, "gdp-approximation").epsilon < 1.94 / 500  # 1.94 is the truth
    assert epsilon(worst, 1e-10).epsilon >= 1.94
    with pytest.raises(InvalidArgument):
        epsilon(Ledger((Event(0.01, 1.0, 10),), "replace_one"), 1e-5, "gdp-approximation")
