"""Epsilon against the privacy loss distributions of dp_accounting, whose numbers `tools/accountant_fuzz.py` wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpfunc.accounting import Ledger, epsilon
from dpfunc.types import Event

PLANS = json.loads((Path(__file__).parent / "peer_epsilons.json").read_text())


def test_random_plans_are_between_the_estimates_of_a_peer():
    """Not below the optimistic one, and at most 0.1 % above the pessimistic one."""
    found = [epsilon(Ledger((Event(q, sigma, steps),)), delta).epsilon for q, sigma, steps, delta, _, _ in PLANS]
    assert len(found) >= 150
    for value, plan in zip(found, PLANS, strict=True):
        low, high = plan[4:]
        assert low * (1 - 1e-9) <= value <= high * 1.001, plan


@pytest.mark.parametrize(("q", "sigma", "steps", "limit"), [(0.99, 15.76, 20, 1.053188), (0.5, 50.0, 20, 0.1422338)])
def test_much_noise_and_many_records_cost_no_more_in_direction_add(q, sigma, steps, limit):
    """Its largest loss, -log(1 - q), has hardly any mass, and must not count for more."""
    found = epsilon(Ledger((Event(q, sigma, steps),)), 1e-5)
    assert found.method == "tilted"
    assert limit * (1 - 1e-5) <= found.epsilon <= limit * 1.0005


@pytest.mark.parametrize(
    ("plan", "limit"),
    [((0.0158406, 0.46536, 11, 0.070997), 0.00796952), ((0.000576637, 0.47783, 12, 0.00167084), 0.00765375)],
    ids=str,
)
def test_small_epsilons_are_tight(plan, limit):
    """Where t epsilon is small, cells and the added Gaussian are made finer until nothing is gained."""
    q, sigma, steps, delta = plan
    assert limit * (1 - 1e-4) <= epsilon(Ledger((Event(q, sigma, steps),)), delta).epsilon <= limit * (1 + 5e-4)
