"""Laws of losses in cells: no mass is lost, losses only spread, and what is beyond the last cell counts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfunc.accounting._tilted import discrete_laws, one_step_delta
from dpfunc.accounting._tilted_aim import make_aim, sampled_losses
from dpfunc.accounting._tilted_law import TiltedUnavailable, atoms, conserved
from dpfunc.accounting._tilted_sum import compose

directions = st.sampled_from(["remove", "add", "replace"])


@given(st.floats(0.06, 8.0), st.integers(60, 200), directions)
def test_cells_keep_both_masses(sigma, number, direction):
    """What the cells hold, plus the tails that are not in them, is 1 under both laws; and losses only spread."""
    x = np.linspace(-9.5 * sigma, 1 + 9.5 * sigma, number)
    q = 0.1
    found = atoms(q, sigma, x, direction)  # which checks both sums
    assert found.mass.min() >= 0
    assert found.mass.sum() + found.infinite == pytest.approx(1.0, abs=1e-12)
    for value in (0.0, 0.01, 0.3):
        delta = float(np.sum(found.mass * np.maximum(-np.expm1(value - found.loss), 0.0))) + found.infinite
        assert delta >= one_step_delta(q, sigma, direction, value) * (1 - 1e-9)


def test_lost_mass_is_refused():
    with pytest.raises(TiltedUnavailable, match="sum to 1"):
        conserved(1.0, 1 - 1e-9)


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
def test_what_is_beyond_the_last_cell_counts(direction):
    found = atoms(0.1, 1.0, np.linspace(-9.5, 2.0, 200), direction)
    assert found.mass.sum() + found.infinite == pytest.approx(1.0, abs=1e-12)
    assert found.infinite > 1e-3
    base = sampled_losses([(0.01, 1.0, 1000)], "remove", 1e-5)
    aim = make_aim(base, 1.83, 7.5, 6.5, math.log(1e-5))
    laws = discrete_laws(base, aim)
    cut = [dataclasses.replace(law, infinite=3e-9) for law in laws]
    found, more = (compose(some, base, aim, 1e-5, 0.0)[0] for some in (laws, cut))
    assert more == pytest.approx(found - math.log(0.7) / 7.5, rel=0.01)
