"""`plan.loader` on two processes: the batches of one process, dealt out; other data sets are an error of all."""

from __future__ import annotations

import itertools

import torch
from workers import run


def test_the_loader_deals_the_draws_of_one_process():
    """Some shares are empty. Parameters, ledger and records are those of one process."""
    [(expected, ledger, numbers, _)] = run(1, "jobs:train_by_loader", False)
    found = run(2, "jobs:train_by_loader")
    for params, its_ledger, _, _ in found:
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-6, atol=1e-6)
        assert its_ledger == ledger
    shares = list(zip(*(theirs for _, _, theirs, _ in found), strict=True))
    assert [sorted(itertools.chain(*row)) for row in shares] == numbers
    assert any([] in row and any(row) for row in shares)
    noise = [set(itertools.chain(*each)) for *_, each in found]
    assert all(noise)
    assert not set.intersection(*noise)  # each process augments its records by numbers of its own


def test_a_data_set_in_another_order_is_an_error_of_all():
    """Before anything is spent; a process that cannot read its own says so, and the others do not wait for it."""
    first, second = run(2, "jobs:data_sets")
    for name in ("same", "names"):
        assert first[name] == second[name] == ("ok", "")
    for name in ("reversed", "two swapped", "other preprocessing", "other names"):
        assert first[name] == second[name], name
        kind, text = first[name]
        assert kind == "RankMismatch"
        parts = ("different data sets: [", "the same records in the same order", "data_name=", "Nothing was spent.")
        assert all(part in text for part in parts)
    assert first["shorter"][0] == "StepAborted"
    assert second["shorter"][0] == "InvalidArgument"
    assert "dataset_size=40, got fewer records. The" in second["shorter"][1]
    assert first["unreadable"][0] == "StepAborted"
    assert second["unreadable"] == ("OSError", "the file of this record is gone")


def test_a_shared_key_still_says_that_it_can_be_guessed():
    assert run(2, "jobs:shared_keys") == [("Key(hidden, guessable)", True, "Key(hidden)")] * 2
