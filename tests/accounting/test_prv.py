"""The laws that are composed: inverse, mass, mean, divergence, each against another computation."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.accounting import Ledger, epsilon
from dpfunc.accounting._losses import StepLoss
from dpfunc.accounting._prv import Grid, choose_grid, compose_laws, discretize, epsilon_at
from dpfunc.accounting._rdp import (
    FEW_ORDERS,
    convexity_bound,
    loss_tail,
    opacus_curve,
    quadrature_curve,
    rdp_epsilon,
    step_curve,
)
from dpfunc.types import Event

losses = st.builds(StepLoss, st.floats(1e-4, 1.0), st.floats(0.2, 20.0), st.sampled_from(["remove", "add", "replace"]))


def test_loss_without_sampling_is_linear():
    step = StepLoss(1.0, 0.4, "remove")
    x = np.array([-20.0, -1.0, 0.5, 2.0, 30.0])
    assert step.loss(x) == pytest.approx((x - 0.5) / 0.16, rel=1e-12)
    assert step.point(step.loss(x)) == pytest.approx(x)
    nearly = StepLoss(1 - 1e-15, 0.4, "remove")
    assert nearly.loss(x[1:]) == pytest.approx((x[1:] - 0.5) / 0.16, rel=1e-6)


@given(losses, st.floats(-4.0, 4.0))
def test_point_inverts_loss(step, z):
    x = np.array([z * step.noise_multiplier])
    loss = step.loss(x)
    back = step.loss(step.point(loss))
    assert back == pytest.approx(loss, rel=1e-9, abs=1e-12)


@given(losses)
def test_loss_rises_and_is_the_ratio_of_densities(step):
    q, s = step.sampling_prob, step.noise_multiplier
    x = np.linspace(-3 * s, 1 + 3 * s, 101)

    def mixture(shift):
        return (1 - q) * np.exp(-((x / s) ** 2) / 2) + q * np.exp(-(((x - shift) / s) ** 2) / 2)

    p, r = {
        "remove": (mixture(1.0), mixture(0.0)),
        "add": (mixture(0.0), mixture(-1.0)),
        "replace": (mixture(0.5), mixture(-0.5)),
    }[step.direction]
    assert step.loss(x) == pytest.approx(np.log(p / r), rel=1e-6, abs=1e-9)
    assert np.all(np.diff(step.loss(x)) >= 0)
    assert step.density(x) == pytest.approx(p / (s * np.sqrt(2 * np.pi)), rel=1e-9)


@given(losses)
def test_masses_are_the_integral_of_the_density(step):
    s = step.noise_multiplier
    edges = np.linspace(-9 * s, 1 + 9 * s, 40001)
    middle = (edges[1:] + edges[:-1]) / 2
    np.testing.assert_allclose(step.masses(edges), step.density(middle) * np.diff(edges), rtol=1e-5)
    assert step.masses(edges).sum() == pytest.approx(1.0, abs=1e-12)
    everything = step.masses(np.array([-np.inf, 0.0, np.inf]))
    assert everything.sum() == pytest.approx(1.0, abs=1e-15)


@given(losses)
def test_mean_is_the_divergence(step):
    """Without a cut the mean loss is KL(P, Q), here by a plain sum."""
    s = step.noise_multiplier
    x = np.linspace(-12 * s, 1 + 12 * s, 400001)
    expected = float(np.sum(step.loss(x) * step.density(x)) * (x[1] - x[0]))
    assert step.mean(-600.0, 600.0) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert step.mean(-600.0, 600.0) >= -1e-15


@settings(max_examples=15)
@given(st.floats(1e-4, 0.99), st.floats(0.1, 20.0))
def test_quadrature_agrees_with_the_series_of_opacus(q, sigma):
    orders = np.array([2.0, 3.0, 11.0, 64.0])
    fractions = np.array([1.3, 2.5, 7.7])
    assert quadrature_curve(q, sigma, orders, False) == pytest.approx(
        opacus_curve(q, sigma, orders), rel=1e-6, abs=1e-13
    )
    found = quadrature_curve(q, sigma, fractions, False)
    assert found == pytest.approx(opacus_curve(q, sigma, fractions), rel=1e-6, abs=1e-11)


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


def test_opacus_cannot_go_to_order_2048():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(opacus_curve(0.01, 1.0, np.array([2048.0])))[0]


@settings(max_examples=10)
@given(st.floats(1e-3, 0.9), st.floats(0.5, 5.0), st.sampled_from([1e-3, 1e-6]))
def test_tails_hold(q, sigma, prob):
    """The loss of one step exceeds the level with at most the probability, in each direction and on both sides."""
    for adjacency, directions in (("add_remove", ("remove", "add")), ("replace_one", ("replace",))):
        level = loss_tail([Event(q, sigma, 1)], adjacency, prob)
        for direction in directions:
            step = StepLoss(q, sigma, direction)
            below, _, above = step.masses(np.array([-np.inf, *step.point(np.array([-level, level])), np.inf]))
            assert max(below, above) <= prob


@pytest.mark.parametrize("steps", [(1, 1), (3, 2), (2, 5, 1), (40, 1)])
def test_composition_agrees_with_opacus(steps):
    from opacus.accountants.analysis.prv import compose_heterogeneous

    domain = Grid(3000, 1e-3, 0.01, 1e-8).domain()
    kinds = [StepLoss(0.1, 2.0, "remove"), StepLoss(0.3, 3.0, "remove"), StepLoss(1.0, 9.0, "remove")]
    laws = [discretize(kind, domain) for kind in kinds[: len(steps)]]
    ours, theirs = compose_laws(laws, list(steps)), compose_heterogeneous(laws, list(steps))
    np.testing.assert_allclose(ours.pmf, theirs.pmf, atol=1e-12)  # the ends are joined, not cut
    np.testing.assert_allclose(ours.domain.ts, theirs.domain.ts, atol=1e-12)


def test_agrees_with_the_accountant_of_opacus():
    from opacus.accountants import PRVAccountant

    history = [(1.0, 0.01, 500), (2.0, 0.02, 300)]
    accountant = PRVAccountant()
    accountant.history = history
    ours = epsilon(Ledger(tuple(Event(q, sigma, steps) for sigma, q, steps in history)), 1e-5, "prv").epsilon
    assert ours == pytest.approx(float(accountant.get_epsilon(1e-5)), abs=3e-4)


def test_grid_contains_what_it_must():
    events = (Event(0.01, 1.0, 1000),)
    grid = choose_grid(events, "add_remove", 1e-5, rdp_epsilon(events, "add_remove", 1e-5))
    domain = grid.domain()
    assert domain.size == 2 * grid.half + 2 <= 2**22
    assert domain.dt == pytest.approx(grid.mesh)
    assert domain.ts[grid.half] == pytest.approx(0.0, abs=1e-12)
    assert grid.eps_error == 0.01


def test_epsilon_of_a_known_law():
    """Randomised response with log odds 2: delta(epsilon) = p - e^epsilon (1 - p)."""
    p = 1 / (1 + np.exp(-2.0))
    pmf, ts = np.array([1 - p, p]), np.array([-2.0, 2.0])
    delta = p - np.exp(1.5) * (1 - p)
    assert epsilon_at(ts, pmf, float(delta)) == pytest.approx(1.5)
    assert epsilon_at(ts, pmf, float(2 * p - 1)) == pytest.approx(0.0, abs=1e-12)
    assert epsilon_at(ts, pmf, 0.9) == 0.0
