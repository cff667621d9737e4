"""Renyi differential privacy: published figures, and laws that hold for every ledger."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.accounting import Ledger, epsilon
from dpfunc.types import Event


def ledger_of(*events, adjacency="add_remove"):
    return Ledger(tuple(Event(*event) for event in events), adjacency)


def old_conversion(q, sigma, steps, orders):
    """The figures of 2019-2021 were R(a) + log(1/delta) / (a - 1) over these orders, at delta = 1e-5."""
    from dpfunc.accounting._rdp import step_curve

    curve = steps * np.array(step_curve(q, sigma, False, orders))
    return float(np.min(curve + math.log(1e5) / (np.array(orders) - 1)))


@pytest.mark.parametrize(
    ("published", "q", "sigma", "steps"),
    [(2.92, 256 / 60000, 1.12, 14063), (9.74, 256 / 60000, 0.6, 7032), (1.20, 256 / 60000, 1.2, 2344),
     (6.86, 0.004, 0.7, 11250), (2.91, 0.004, 1.1, 15000), (1.16, 0.004, 1.3, 3750), (0.71, 0.004, 1.3, 250)],
)  # fmt: skip
def test_published_figures_are_reproduced_and_improved(published, q, sigma, steps):
    orders = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)))
    assert old_conversion(q, sigma, steps, orders) == pytest.approx(published, abs=0.015)
    assert epsilon(ledger_of((q, sigma, steps)), 1e-5).epsilon < 0.9 * published


def test_renyi_orders_reach_far_enough():
    """With orders up to 63 only, Renyi can never say less than 0.1 at delta = 1e-5, whatever the noise."""
    assert epsilon(ledger_of((0.01, 1000.0, 1)), 1e-5, "rdp").epsilon < 0.006


events = st.builds(Event, st.floats(1e-4, 1.0), st.floats(0.3, 20.0), st.integers(1, 2000))
deltas = st.sampled_from([1e-3, 1e-5, 1e-8, 1e-12])
adjacencies = st.sampled_from(["add_remove", "replace_one"])


def costlier(event, factor):
    """The same steps with a larger probability, less noise, and more of them."""
    q, sigma, count = event.sampling_prob, event.noise_multiplier, event.num_steps
    return (
        Event(min(1.0, q * factor), sigma, count),
        Event(q, sigma / factor, count),
        Event(q, sigma, int(count * factor) + 1),
    )


def renyi(*items, delta, adjacency="add_remove"):
    return epsilon(Ledger(items, adjacency), delta, "rdp").epsilon


@settings(max_examples=15)
@given(events, st.floats(1.01, 5.0), deltas, adjacencies)
def test_renyi_rises_with_probability_and_steps_and_falls_with_noise_and_delta(event, factor, delta, adjacency):
    base = renyi(event, delta=delta, adjacency=adjacency)
    more = [renyi(each, delta=delta, adjacency=adjacency) for each in costlier(event, factor)]
    more += [renyi(event, delta=delta / factor, adjacency=adjacency)]
    more += [renyi(event, Event(0.5, 9.0, 3), delta=delta, adjacency=adjacency)]
    assert 0 <= base <= min(more) * (1 + 1e-9)
