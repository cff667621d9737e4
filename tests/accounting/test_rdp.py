"""Renyi differential privacy: published figures, and curves against those of Opacus and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.accounting import Ledger, epsilon
from dpfunc.accounting._rdp import FEW_ORDERS, convexity_bound, quadrature_curve, step_curve
from dpfunc.types import Event


@pytest.mark.parametrize(
    ("published", "q", "sigma", "steps"),
    [(2.92, 256 / 60000, 1.12, 14063), (9.74, 256 / 60000, 0.6, 7032), (1.20, 256 / 60000, 1.2, 2344),
     (6.86, 0.004, 0.7, 11250), (2.91, 0.004, 1.1, 15000), (1.16, 0.004, 1.3, 3750), (0.71, 0.004, 1.3, 250)],
)  # fmt: skip
def test_published_figures_are_reproduced_and_improved(published, q, sigma, steps):
    """The figures of 2019-2021 were R(a) + log(1/delta) / (a - 1) over these orders, at delta = 1e-5."""
    orders = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)))
    bounds = steps * np.array(step_curve(q, sigma, False, orders)) + math.log(1e5) / (np.array(orders) - 1)
    assert bounds.min() == pytest.approx(published, abs=0.015)
    assert epsilon(Ledger((Event(q, sigma, steps),)), 1e-5).epsilon < 0.9 * published


def test_renyi_orders_reach_far_enough():
    """With orders up to 63 only, Renyi can never say less than 0.1 at delta = 1e-5, whatever the noise."""
    assert epsilon(Ledger((Event(0.01, 1000.0, 1),)), 1e-5, "rdp").epsilon < 0.006


@settings(max_examples=15)
@given(st.floats(1e-4, 0.99), st.floats(0.1, 20.0))
def test_quadrature_agrees_with_the_series_of_opacus(q, sigma):
    from opacus.accountants.analysis.rdp import compute_rdp

    for orders, error in (((2.0, 3.0, 11.0, 64.0), 1e-13), ((1.3, 2.5, 7.7), 1e-11)):
        found = quadrature_curve(q, sigma, np.array(orders), False)
        theirs = [float(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=order)) for order in orders]
        assert found == pytest.approx(theirs, rel=1e-6, abs=error)


@given(st.floats(1e-4, 0.99), st.floats(0.1, 20.0))
def test_renyi_curves_are_ordered(q, sigma):
    """A replaced record costs at most one removed at half the noise; all below the convexity bound; rising in the order."""
    remove, replace = (np.array(step_curve(q, sigma, flag, FEW_ORDERS)) for flag in (False, True))
    halved = np.array(step_curve(q, sigma / 2, False, FEW_ORDERS))
    bound = convexity_bound(q, sigma, np.array(FEW_ORDERS)) * (1 + 1e-9)
    for curve in (remove, replace):
        assert np.all(np.diff(curve) >= -1e-12)
        assert np.all(curve <= bound)
    assert np.all(replace <= halved * (1 + 1e-9) + 1e-11)
