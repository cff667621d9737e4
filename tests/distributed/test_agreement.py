"""Processes that do not mean the same thing do not take a step: all raise, nothing is spent."""

from __future__ import annotations

import pytest
import torch
from jobs import loss_fn, plan
from workers import outcomes, run

from dpfunc._utils.digests import checksum
from dpfunc.errors import InvalidArgument
from dpfunc.step import make_dp_step

DISAGREEMENTS = {
    "key": ({"seed": 4}, "about run", "shared_key"),
    "noise": ({"noise_multiplier": 1.0000001}, "about run", "Plan, key, ledger"),
    "reduction": ({"reduction": "sum"}, "about run", "settings differ"),
    "engine": ({"engine": "vmap"}, "about run", "engine"),
    "torch": ({"versions": {"torch": "2.12.1"}}, "about run", "versions of dpfunc or torch"),
    "dpfunc": ({"versions": {"dpfunc": "0.0.1"}}, "about run", "versions of dpfunc or torch"),
    "step": ({"step": 1}, "about step", "All processes take every step"),
    "one ulp": ({"ulp": True}, "about params", "at least one bit"),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_disagreement_is_an_error_of_all(name):
    trouble, what, advice = DISAGREEMENTS[name]
    found = [outcome.value for outcome in outcomes(2, "jobs:one_step_of", trouble)]
    for kind, text, _, spent, written, _ in found:
        assert kind == "RankMismatch"
        assert what in text
        assert advice in text
        assert "Nothing was spent" in text
        assert (spent, written) == (0, [])


@pytest.mark.parametrize("whole", [True, False])
def test_a_sum_that_is_not_finite_is_an_error_of_all(whole):
    own, other = (outcome.value for outcome in outcomes(2, "jobs:spoiled_sums", whole))
    assert f"got NaN or inf in {'v' if whole else 'w'}. A sample" in own
    assert f"got NaN or inf in {'v' if whole else 'the part of another process'}. A sample" in other


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64]
)
def test_a_checksum_sees_one_bit(dtype):
    tensor = torch.ones(1000).to(dtype)
    changed = tensor.clone()
    view = changed.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[changed.element_size()])
    view[517] ^= 1
    assert checksum([("w", tensor)]) == checksum([("w", tensor.clone())])
    moved = torch.arange(1000).to(dtype)
    assert checksum([("w", moved)]) != checksum([("w", moved.flip(0))])
    others = [[("w", changed)], [("v", tensor)], [("w", tensor.reshape(10, 100))], [("w", tensor), ("v", tensor)]]
    assert len({checksum(each) for each in [[("w", tensor)], *others]}) == 5


def test_a_checksum_of_few_bytes_sees_each_of_them():
    """What is left after whole words counts as a word, too: bytes that are added up would often agree."""
    values = torch.randn(2000, 1, generator=torch.Generator().manual_seed(0))
    assert len({checksum([("w", value)]) for value in values}) == len(values.unique())
    assert checksum([("w", torch.tensor([1, 2, 3], dtype=torch.uint8))]) != checksum(
        [("w", torch.tensor([3, 2, 1], dtype=torch.uint8))]
    )


def test_a_checksum_sees_two_signs_and_two_rows():
    """Changes that a plain sum of words would not see."""
    rows = torch.randn(64, 8, dtype=torch.float64)
    signs, order = rows.clone(), rows.flip(0)
    signs[3] = -signs[3]
    assert len({checksum([("x", each)]) for each in (rows, signs, order, rows + 0.0)}) == 3


ROWS, COLUMNS = 6, 4095  # as words of 8 bytes are summed


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 7), (1, 4000)), ((1, 7), (4, 7)), ((0, 0), (5, 4094)), ((2, 8), (6, 3)), ((6, 1), (6, 3))],
)
def test_a_checksum_of_many_words_sees_where_they_are(first, second):
    """Two words that change places, or that change by as much as each other: in a row, in a column, in neither, in no whole row."""
    words = torch.arange(ROWS * COLUMNS + 9) ** 3
    one, other = (row * COLUMNS + column for row, column in (first, second))
    exchanged, balanced, flipped = words.clone(), words.clone(), words.clone()
    exchanged[[one, other]] = words[[other, one]]
    balanced[one] += 1
    balanced[other] -= 1
    flipped[[one, other]] ^= -(2**63)
    assert len({checksum([("x", each)]) for each in (words, exchanged, balanced, flipped)}) == 4


@pytest.mark.parametrize("count", [COLUMNS, ROWS * COLUMNS, (ROWS + 1) * COLUMNS, 2**16])
def test_a_checksum_sees_that_all_signs_changed(count):
    values = torch.randn(count, dtype=torch.float64)
    half = torch.cat([-values[: count // 2], values[count // 2 :]])
    assert len({checksum([("x", each)]) for each in (values, -values, half)}) == 3


def test_parameters_on_a_part_of_the_processes_are_refused():
    """Each part would release a sum of its own with the same noise: the difference would have none."""
    for kind, text in run(2, "jobs:part_of_the_mesh"):
        assert kind == "InvalidArgument"
        assert "release sums of their own with the same noise" in text


def test_several_processes_need_ranks():
    for text in run(2, "jobs:no_ranks"):
        assert "the process group has 2 processes" in text


def test_a_shared_key_still_says_that_it_can_be_guessed():
    assert run(2, "jobs:shared_keys") == [("Key(hidden, guessable)", True, "Key(hidden)")] * 2


def test_all_pass_a_journal_or_none():
    for kind, text in run(2, "jobs:half_a_journal"):
        assert kind == "RankMismatch"
        assert "all pass a journal" in text


def test_a_bad_dummy_is_found_before_it_is_needed():
    for kind, text in run(2, "jobs:bad_dummy"):
        assert kind == "InvalidArgument"
        assert "Expected dummy to be a batch of one row" in text


def test_ranks_are_ranks():
    with pytest.raises(InvalidArgument, match="Expected ranks made by dpfunc.distributed.data_parallel"):
        make_dp_step(loss_fn, plan(), ranks=2)
