"""The cost model: the cheapest form within a budget, by shapes alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpfunc.engines.cost import Costs, Kernel, matrix, summed, table
from dpfunc.engines.per_sample import Outer

SIZES = st.integers(1, 4096)


@given(SIZES, SIZES, SIZES, st.integers(1, 64))
def test_no_representation_of_a_matrix_is_cheaper_than_the_chosen_one(positions, p, d, num_samples):
    costs = matrix(positions, p, d)
    choice = costs.choose(num_samples)
    kept = costs.choose(num_samples, 0)
    measured = num_samples * (costs.product + min(costs.ghost, costs.dropped))
    assert choice.operations <= measured
    assert kept.representation == "formed" or kept.operations == measured
    assert costs.choose(num_samples) == choice


@given(SIZES, SIZES, SIZES, st.integers(1, 64))
def test_nothing_is_formed_beyond_the_budget_but_what_is_smaller_than_its_factors(positions, p, d, num_samples):
    choice = matrix(positions, p, d).choose(num_samples, 0)
    assert choice.representation != "formed" or choice.num_bytes <= 4 * num_samples * positions * (p + d)


def test_the_ghost_norm_is_for_few_positions():
    chosen = [matrix(positions, 1024, 1024).choose(16) for positions in (1, 64, 4096)]
    assert [choice.representation for choice in chosen] == ["ghost", "ghost", "formed"]
    assert matrix(128, 8, 384).choose(16).representation == "formed"  # LoRA: a narrow matrix is nearly free


def test_large_tables_are_not_formed():
    assert table(lookups=128, rows=50_000, d=64).choose(32).representation != "formed"
    assert table(lookups=128, rows=16, d=64).choose(32).representation == "formed"


def test_sums_are_formed():
    assert summed(384, 128).choose(32, 0).representation == "formed"


def test_kernels_with_many_positions_are_formed():
    shapes = [(1024, (16, 3, 3, 3)), (16, (512, 512, 3, 3))]
    chosen = [Kernel(positions, positions, shape, (1, 1), 1).costs().choose(32) for positions, shape in shapes]
    assert [choice.representation for choice in chosen] == ["formed", "ghost"]


def test_bytes_are_those_that_are_kept():
    costs = Costs(product=10, ghost=10**9, numbers=6, factors=5)
    assert costs.choose(4).num_bytes == 4 * 4 * 6
    assert costs.choose(4, 4 * 4 * 6 - 1).num_bytes == 4 * 4 * 5
    assert math.isclose(costs.choose(8).operations, 2 * costs.choose(4).operations)


@pytest.mark.parametrize(("positions", "formed"), [(2, False), (200, True)])
def test_norms_of_factors_are_taken_as_the_model_says(monkeypatch, positions, formed):
    called = []
    monkeypatch.setattr(
        Outer, "_measured", staticmethod(lambda a, b: called.append("formed") or (torch.ones(len(a)),) * 2)
    )
    monkeypatch.setattr(
        Outer,
        "_ghost",
        lambda self, a, b: (
            called.append("ghost") or (torch.full((len(a),), 1e9), torch.ones(len(a)), torch.zeros(len(a)))
        ),
    )
    Outer(torch.randn(3, positions, 64), torch.randn(3, positions, 64), (64, 64)).sq_norms()
    assert called == ["formed" if formed else "ghost"]
