"""The cost model: the cheapest form within a budget, by shapes alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfunc.engines._cost import Kernel, matrix, summed, table

SIZES = st.integers(1, 4096)


@given(SIZES, SIZES, SIZES, st.integers(1, 64))
def test_nothing_is_formed_beyond_the_budget_but_what_is_smaller_than_its_factors(positions, p, d, num_samples):
    choice = matrix(positions, p, d).choose(num_samples, 0)
    assert choice.representation != "formed" or choice.num_bytes <= 4 * num_samples * positions * (p + d)


CHOSEN = {
    "few positions": (matrix(64, 1024, 1024), "ghost"),
    "many positions": (matrix(4096, 1024, 1024), "formed"),
    "LoRA: a narrow matrix is nearly free": (matrix(128, 8, 384), "formed"),
    "small table": (table(lookups=128, rows=16, d=64), "formed"),
    "kernel, many positions": (Kernel(1024, 1024, (16, 3, 3, 3), (1, 1), 1).costs(), "formed"),
    "kernel, few positions": (Kernel(16, 16, (512, 512, 3, 3), (1, 1), 1).costs(), "ghost"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen(name):
    costs, representation = CHOSEN[name]
    assert costs.choose(32).representation == representation


def test_large_tables_are_not_formed_and_sums_are():
    assert table(lookups=128, rows=50_000, d=64).choose(32).representation != "formed"
    assert summed(384, 128).choose(32, 0).representation == "formed"
