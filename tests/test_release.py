"""Released means: noise of the promised scale, a bounded influence of each record, and nothing that is not counted."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dpfunc
from dpfunc import state
from dpfunc.checkpoint import journal_ledger
from dpfunc.clipping.rules import SLACK
from dpfunc.errors import BudgetExhausted, InvalidArgument, LedgerConflict, StateReused
from dpfunc.types import Schedule

FACTS = {"bound": 1.0, "noise_multiplier": 2.0, "delta": 1e-5, "dataset_size": 50}


def released(values, seed=0, **changes):
    """Each release stands for one of another process: of two, the same noise is in the difference."""
    state._runs.clear()
    return dpfunc.release_mean(values, **{**FACTS, "key": dpfunc.rng.insecure_key(seed), **changes})


def test_a_key_serves_one_release():
    released(torch.ones(50))
    with pytest.raises(StateReused):
        dpfunc.release_mean(torch.zeros(50), key=dpfunc.rng.insecure_key(0), **FACTS)


def test_noise_has_the_promised_scale():
    """400 numbers of one release: their standard deviation is the promised one, and 10 % more or less are refused."""
    values = torch.zeros(50, 400)
    found = released(values)
    assert found.std == 2.0 / 50
    assert released(values, adjacency="replace_one").std == 4.0 / 50
    deviation = float(found.mean.std() / found.std)
    assert abs(deviation - 1) < 0.1  # 400 numbers: 3.5 % are one standard error
    assert abs(1.3 * deviation - 1) > 0.1
    assert abs(deviation / 1.3 - 1) > 0.1


@given(st.integers(0, 2**31), st.integers(1, 49), st.floats(0.1, 100.0))
def test_one_record_moves_the_mean_by_its_bound(seed, row, size):
    values = torch.randn(50, 3, generator=torch.Generator().manual_seed(seed)) * size
    other = values.clone()
    other[row] = -values[row] * size
    removed = torch.cat([values[:row], values[row + 1 :]])
    whole = released(values).mean
    assert (whole - released(other).mean).norm() <= 2 / 50 * (1 + 1e-5)
    assert (whole - released(removed).mean).norm() <= 1 / 50 * (1 + 1e-5)


def test_sums_are_float64():
    """A float32 sum of very many values moves in steps that are larger than one of them."""
    values = torch.rand(9999, generator=torch.Generator().manual_seed(0))
    found = dpfunc.release_mean(
        values,
        key=dpfunc.rng.insecure_key(77),
        **{**FACTS, "dataset_size": 9999, "noise_multiplier": 1e-9, "delta": 1e-9},
    )
    assert found.mean.dtype == values.dtype
    assert found.mean == (values.double().clamp(max=1 - SLACK).sum() / 9999).float()


def test_the_journal_counts_it(tmp_path):
    journal = tmp_path / "journal.jsonl"
    first = released(torch.ones(50), journal=journal)
    assert journal_ledger(journal) == first.ledger
    with pytest.raises(LedgerConflict, match="journal_ledger"):
        released(torch.ones(50), seed=1, journal=journal)
    second = released(torch.ones(50), seed=1, journal=journal, ledger=first.ledger)
    assert second.ledger.num_steps == 2
    assert journal_ledger(journal) == second.ledger


def test_what_does_not_fit_into_the_budget_is_refused_before_it_is_released():
    cost = released(torch.ones(50)).ledger.epsilon(1e-5).epsilon
    with pytest.raises(InvalidArgument, match="within its budget"):
        released(torch.ones(50), epsilon=0.9 * cost)
    spent = released(torch.ones(50), epsilon=1.01 * cost).ledger
    with pytest.raises((InvalidArgument, BudgetExhausted)):
        released(torch.ones(50), seed=1, epsilon=1.01 * cost, ledger=spent)


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (torch.ones(51), {}, "num_records"),
        (torch.tensor(1.0), {}, "one row a record"),
        (torch.ones(50, dtype=torch.int64), {}, "floating"),
        (torch.ones(50), {"bound": 0.0}, "bound"),
        (torch.ones(50), {"delta": 0.1}, "delta"),
        (torch.ones(50), {"noise_multiplier": 0.0}, "noise_multiplier"),
        (torch.ones(50), {"noise_multiplier": Schedule(((1, 1.0),))}, "noise_multiplier"),  # before it is spent
    ],
)
def test_bad_arguments_are_refused(values, changes, message):
    with pytest.raises(InvalidArgument, match=message):
        released(values, **changes)


def test_a_public_bound_on_the_number_of_records_is_the_divisor():
    assert math.isclose(float(released(torch.ones(40)).mean - released(torch.zeros(40)).mean), 40 / 50, rel_tol=1e-3)
    given = released(torch.ones(40), dataset_size=torch.tensor(50))
    assert (type(given.divided_by), type(given.std)) == (int, float)


@pytest.mark.parametrize(
    ("values", "exact"),
    [
        ([3e38, 1.0, -3e38], [1.0, 1.0, -1.0]),  # a finite value whose square is not: was an error that said so
        ([1e30, -0.5, 2.0], [1.0, -0.5, 1.0]),
        ([math.inf, math.nan, 1.0], [0.0, 0.0, 1.0]),
        ([[3e38, 3e38], [0.3, 0.4], [0.0, -2e30]], [[0.5**0.5] * 2, [0.3, 0.4], [0.0, -1.0]]),
        ([], [0.0]),  # no record: was another error
    ],
)
def test_no_record_is_an_error(values, exact):
    """The mean differs from that of the clipped rows by noise alone, and an error would be a fact about records."""
    rows = torch.tensor(values)
    found = released(rows, seed=7, noise_multiplier=1e-6, dataset_size=50)
    assert torch.allclose(found.mean, torch.tensor(exact).sum(0) / 50, atol=1e-5)
