"""Numerical composition: tails that hold, and the figures of Opacus."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.accounting import Ledger, epsilon
from dpfunc.accounting._losses import MEANS, loss_of, part_masses, point
from dpfunc.accounting._prv import Grid, discretize
from dpfunc.accounting._rdp import loss_tail
from dpfunc.types import Event


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


@pytest.mark.parametrize("direction", MEANS)
@pytest.mark.parametrize(("q", "sigma"), [(0.01, 0.8), (0.3, 2.0), (1.0, 3.0)])
def test_the_law_on_a_grid_has_the_mean_of_the_loss(q, sigma, direction):
    """Which is KL(P, Q), here by a plain sum: with another mean, the error of the grid would add up over the steps."""
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 40_001)
    parts = [np.exp(-(((x - mean) / sigma) ** 2) / 2) for mean in (0.0, MEANS[direction][0])]
    density = ((1 - q) * parts[0] + q * parts[1]) / sigma / (2 * np.pi) ** 0.5
    loss = loss_of(q, sigma, x, direction)
    grid = Grid(200, 1.2 * float(np.abs(loss).max()) / 200, 0.01, 1e-8)
    mass, shift = discretize(q, sigma, direction, grid)
    assert mass.sum() == pytest.approx(1.0, abs=1e-12)
    divergence = float(np.sum(loss * density) * (x[1] - x[0]))
    assert float(mass @ grid.losses()) + shift == pytest.approx(divergence, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "history",
    [[(1.0, 0.01, 500)], [(1.0, 0.01, 500), (2.0, 0.02, 300)], [(1.5, 0.05, 100), (3.0, 0.1, 20), (2.0, 0.02, 7)]],
)
def test_agrees_with_the_accountant_of_opacus(history):
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = history
    ours = epsilon(Ledger(tuple(Event(q, sigma, steps) for sigma, q, steps in history)), 1e-5, "prv").epsilon
    assert ours == pytest.approx(float(accountant.get_epsilon(1e-5)), abs=3e-4)
