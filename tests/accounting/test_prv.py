"""The laws that are composed: inverse, mass, mean, divergence, each against another computation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.accounting import Ledger, epsilon
from dpfunc.accounting._losses import MEANS, loss_of, part_masses, point
from dpfunc.accounting._prv import Grid, discretize, mean_loss
from dpfunc.accounting._rdp import FEW_ORDERS, convexity_bound, loss_tail, quadrature_curve, step_curve
from dpfunc.types import Event

steps = st.tuples(st.floats(1e-4, 1.0), st.floats(0.2, 20.0), st.sampled_from(["remove", "add", "replace"]))


def test_loss_without_sampling_is_linear():
    x = np.array([-20.0, -1.0, 0.5, 2.0, 30.0])
    loss = loss_of(1.0, 0.4, x, "remove")
    assert loss == pytest.approx((x - 0.5) / 0.16, rel=1e-12)
    assert point(1.0, 0.4, loss, "remove") == pytest.approx(x)
    assert loss_of(1 - 1e-15, 0.4, x[1:], "remove") == pytest.approx((x[1:] - 0.5) / 0.16, rel=1e-6)


@given(steps, st.floats(-4.0, 4.0))
def test_point_inverts_loss(step, z):
    q, s, direction = step
    loss = loss_of(q, s, np.array([z * s]), direction)
    assert loss_of(q, s, point(q, s, loss, direction), direction) == pytest.approx(loss, rel=1e-9, abs=1e-12)


@settings(max_examples=30)
@given(steps)
def test_the_loss_of_a_step_by_plain_sums(step):
    """It rises, is the ratio of densities, its mean is KL(P, Q), and its law on a grid has this mean and all the mass."""
    q, s, direction = step
    x = np.linspace(-12 * s, 1 + 12 * s, 40_001)

    def mixture(shift):
        return (
            ((1 - q) * np.exp(-((x / s) ** 2) / 2) + q * np.exp(-(((x - shift) / s) ** 2) / 2)) / s / (2 * np.pi) ** 0.5
        )

    p, r = (mixture(mean) for mean in MEANS[direction])
    loss = loss_of(q, s, x, direction)
    near = np.abs(x) < 4 * s
    np.testing.assert_allclose(loss[near], np.log(p[near] / r[near]), rtol=1e-6, atol=1e-9)
    assert np.all(np.diff(loss) >= 0)
    divergence = float(np.sum(loss * p) * (x[1] - x[0]))
    assert mean_loss(q, s, direction, -600.0, 600.0) == pytest.approx(divergence, rel=1e-6, abs=1e-12)
    grid = Grid(5000, max(1e-4, 1.2 * float(np.abs(loss).max()) / 5000), 0.01, 1e-8)
    law = discretize(q, s, direction, grid)
    assert law.mass.sum() == pytest.approx(1.0, abs=1e-12)
    assert float(law.mass @ (grid.losses() + law.shift)) == pytest.approx(divergence, rel=1e-6, abs=1e-9)


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
    """Remove <= replace <= remove at half the noise; all below the convexity bound; rising in the order."""
    remove, replace = (np.array(step_curve(q, sigma, flag, FEW_ORDERS)) for flag in (False, True))
    halved = np.array(step_curve(q, sigma / 2, False, FEW_ORDERS))
    bound = convexity_bound(q, sigma, np.array(FEW_ORDERS))
    assert np.all(np.diff(remove) >= -1e-12)
    assert np.all(np.diff(replace) >= -1e-12)
    assert np.all(remove <= bound * (1 + 1e-9))
    assert np.all(replace <= bound * (1 + 1e-9))
    assert np.all(replace <= halved * (1 + 1e-9) + 1e-11)


@settings(max_examples=10)
@given(st.floats(1e-3, 0.9), st.floats(0.5, 5.0), st.sampled_from([1e-3, 1e-6]))
def test_tails_hold(q, sigma, prob):
    """The loss of one step exceeds the level with at most the probability, in each direction and on both sides."""
    for adjacency, directions in (("add_remove", ("remove", "add")), ("replace_one", ("replace",))):
        level = loss_tail([Event(q, sigma, 1)], adjacency, prob)
        for direction in directions:
            ends = np.array([-np.inf, *point(q, sigma, np.array([-level, level]), direction), np.inf])
            middle, ahead, _ = part_masses(sigma, ends, direction)
            assert max((1 - q) * middle[::2] + q * ahead[::2]) <= prob


def test_agrees_with_the_accountant_of_opacus():
    from opacus.accountants import PRVAccountant

    for history in (
        [(1.0, 0.01, 500)],
        [(1.0, 0.01, 500), (2.0, 0.02, 300)],
        [(1.5, 0.05, 100), (3.0, 0.1, 20), (2.0, 0.02, 7)],
    ):
        accountant = PRVAccountant()
        accountant.history = history
        ours = epsilon(Ledger(tuple(Event(q, sigma, steps) for sigma, q, steps in history)), 1e-5, "prv").epsilon
        assert ours == pytest.approx(float(accountant.get_epsilon(1e-5)), abs=3e-4)
