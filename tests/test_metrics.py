"""Released tables of counts: noise of the promised scale, one record changes them by one, and shares made of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc import release_mean, state
from dpfunc.accounting import Ledger
from dpfunc.checkpoint import journal_ledger
from dpfunc.errors import BudgetExhausted, InvalidArgument
from dpfunc.metrics import ReleasedCounts, release_counts, shares
from dpfunc.rng import insecure_key
from dpfunc.types import Event

FACTS = {"noise_multiplier": 2.0, "delta": 1e-5, "dataset_size": 60}


def released(cells, shape, seed=0, **changes):
    """Each stands for a release of another process: of two, the same noise is in the difference."""
    state._runs.clear()
    return release_counts(cells, shape=shape, **{**FACTS, "key": insecure_key(seed), **changes})


def cells_of(seed, count, shape):
    random = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(side, (count,), generator=random) for side in shape], 1)


@pytest.mark.parametrize(("adjacency", "std"), [("add_remove", 2.0), ("replace_one", 4.0)])
def test_noise_of_counts_has_the_promised_scale(adjacency, std):
    """900 cells of one release, without a record in most: a scale that is 15 % off is refused, on both sides."""
    cells = torch.zeros(60, 2, dtype=torch.long)
    found = released(cells, (30, 30), adjacency=adjacency)
    assert found.std == std
    noise = found.counts.flatten()[1:]
    assert abs(float(noise.std() / std) - 1) < 0.1  # one standard error is 2.4 %
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(899)
    for wrong in (0.85, 1.15):
        assert abs(float(noise.std() / (wrong * std)) - 1) > 0.1


@given(st.integers(0, 2**31), st.integers(0, 49), st.integers(1, 4), st.integers(1, 5))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_one_record_changes_the_table_by_one(seed, row, rows, columns):
    cells = cells_of(seed, 50, (rows, columns))
    whole = released(cells, (rows, columns)).counts
    removed = released(torch.cat([cells[:row], cells[row + 1 :]]), (rows, columns)).counts
    change = whole - removed
    place = tuple(cells[row].tolist())
    assert float(change[place]) == pytest.approx(1, abs=1e-3)
    assert float(change.norm()) == pytest.approx(1, abs=1e-3)


def test_counts_are_those_of_the_records():
    """The noise of a seed is the same without records; the difference is the table."""
    cells = cells_of(5, 60, (3, 2, 4))
    difference = released(cells, (3, 2, 4)).counts - released(cells[:0], (3, 2, 4)).counts
    expected = torch.zeros(3, 2, 4)
    for place in cells.tolist():
        expected[tuple(place)] += 1
    assert torch.allclose(difference, expected, atol=1e-3)


def test_a_table_costs_what_one_number_costs(tmp_path):
    journal = tmp_path / "journal.jsonl"
    before = Ledger((Event(0.1, 3.0, 5),))
    found = released(cells_of(0, 60, (5, 2)), (5, 2), journal=journal, ledger=before)
    assert found.ledger == before.record(Event(1.0, 2.0, 1)) == journal_ledger(journal)
    state._runs.clear()
    one = release_mean(torch.ones(60), bound=1.0, **FACTS, key=insecure_key(1))
    assert one.ledger.epsilon(1e-5) == released(cells_of(0, 60, (5, 2)), (5, 2)).ledger.epsilon(1e-5)
    with pytest.raises((InvalidArgument, BudgetExhausted)):
        released(cells_of(0, 60, (5, 2)), (5, 2), epsilon=0.5)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (torch.tensor([[0, 2]]), "outside of it"),
        (torch.tensor([[-1, 0]]), "outside of it"),
        (torch.tensor([0, 1]), "a place in the table"),
        (torch.tensor([[0.0, 1.0]]), "a place in the table"),
        (torch.tensor([[0]] * 7), r"a place in the table.*got shape of a record=\(1,\)"),  # without their number
        (torch.zeros(9, 2, dtype=torch.complex64), "a place in the table"),
        ([[0, 1]], "a place in the table"),
    ],
)
def test_places_outside_of_the_table_are_refused(cells, message, tmp_path):
    with pytest.raises(InvalidArgument, match=message):
        released(cells, (2, 2), journal=tmp_path / "journal.jsonl")
    assert not (tmp_path / "journal.jsonl").exists()


def table(counts, std=1e-6):
    return ReleasedCounts(torch.as_tensor(counts).float(), std, Ledger())


def test_shares_are_recall_and_roc():
    """Against counts by hand: recall of three classes, and the rates of a score at each threshold."""
    random = torch.Generator().manual_seed(0)
    labels, predictions = (torch.randint(3, (500,), generator=random) for _ in range(2))
    counts = torch.zeros(3, 2)
    for label, prediction in zip(labels, predictions, strict=True):
        counts[label, int(label == prediction)] += 1
    expected = torch.stack([(predictions[labels == c] == c).float().mean() for c in range(3)])
    assert torch.allclose(shares(table(counts)).share[:, 0], expected)
    scores, positive = torch.rand(500, generator=random), torch.randint(2, (500,), generator=random)
    thresholds = torch.tensor([0.2, 0.5, 0.9])
    counts = torch.zeros(2, 4)
    for place in zip(positive.tolist(), torch.bucketize(scores, thresholds).tolist(), strict=True):
        counts[place] += 1
    expected = torch.stack([(scores[positive == sign, None] > thresholds).float().mean(0) for sign in (0, 1)])
    assert torch.allclose(shares(table(counts)).share, expected)


def test_the_std_of_a_share_is_that_of_many_releases():
    """2,000 tables with noise: the spread of their shares is the std that each says, within 10 % on both sides."""
    counts, std = torch.tensor([[300.0, 100.0, 80.0, 20.0]]), 8.0
    noise = torch.randn(2000, 1, 4, generator=torch.Generator().manual_seed(1)) * std
    many = shares(table((counts + noise)[:, 0], std))
    spread, said = many.share.std(0), many.std.mean(0)
    assert torch.all((spread / said - 1).abs() < 0.1)
    assert torch.allclose(many.share.mean(0), torch.tensor([0.4, 0.2, 0.04]), atol=0.01)
    assert not torch.any((spread / (1.25 * said) - 1).abs() < 0.1)


def test_a_row_that_noise_hides_has_no_share():
    found = shares(table([[3.0, 4.0], [300.0, 400.0], [-2.0, 1.0]], std=2.0))
    assert found.share.isnan().flatten().tolist() == found.std.isnan().flatten().tolist() == [True, False, True]
    assert torch.all(shares(table([[-3.0, 90.0], [90.0, -3.0]])).share == torch.tensor([[1.0], [0.0]]))
    for wrong in (torch.ones(3), torch.ones(3, 1)):
        with pytest.raises(InvalidArgument, match="C >= 2"):
            shares(table(wrong))
