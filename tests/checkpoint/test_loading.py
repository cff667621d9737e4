"""A run of one process that is saved and loaded: bit-identical on resume, and epsilon never shrinks."""

from __future__ import annotations

import pytest
import torch
from run_cases import DATA, PLAN, start, steps, store

from dpfunc import Event, Journal, Ledger, load
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.errors import CheckpointError


def test_resume_is_bit_identical(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", PLAN)
    state, values, optimizer = start()
    state = steps(state, values, optimizer, 3, journal)
    store(tmp_path / "c", state, values, optimizer, journal=journal.path)
    state = steps(state, values, optimizer, 5, journal)

    fresh = {name: torch.zeros_like(p).requires_grad_() for name, p in values.items()}
    saved = load(tmp_path / "c", plan=PLAN, params=fresh, data=DATA, journal=journal.path)
    with torch.no_grad():
        for name, p in fresh.items():
            p.copy_(saved.params[name])
    other = torch.optim.Adam(fresh.values(), lr=0.1)
    other.load_state_dict(dict(saved.optimizer_state))
    resumed = steps(saved.state, fresh, other, 5, journal)
    assert all(torch.equal(values[name], fresh[name]) for name in values)
    assert resumed == state._replace(journal=str(journal.path), journal_lines=8)


def test_a_resumed_run_goes_on_with_its_journal(tmp_path):
    """Steps that it does not have would be released again by the next resumption, with the same noise."""
    journal = Journal(tmp_path / "journal.jsonl", PLAN)
    state, values, optimizer = start()
    state = steps(state, values, optimizer, 3, journal)
    store(tmp_path / "c", state, values, optimizer, journal=journal.path)
    saved = load(tmp_path / "c", plan=PLAN, params=values, data=DATA, journal=journal.path)
    for other in (None, Journal(tmp_path / "jurnal.jsonl", PLAN)):
        with pytest.raises(CheckpointError, match="Expected the journal of the resumed run"):
            steps(saved.state, values, optimizer, 1, other)
    (tmp_path / "link").symlink_to(tmp_path)
    after = steps(saved.state, values, optimizer, 1, Journal(tmp_path / "link" / "journal.jsonl", PLAN))
    assert after.step == saved.state.step + 1
    kept = steps(after, values, optimizer, 1, lambda state: None)  # a function of the caller's
    assert kept.journal == saved.state.journal


def test_epsilon_never_shrinks(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", PLAN)
    state, values, optimizer = start()
    state = steps(state, values, optimizer, 2, journal)
    store(tmp_path / "c", state, values, optimizer)
    state = steps(state, values, optimizer, 4, journal)  # lost in the crash, but released
    saved = load(tmp_path / "c", plan=PLAN, params=values, data=DATA, journal=journal.path)
    assert (saved.state.step, saved.state.charged) == (2, 6)
    assert saved.state.ledger == state.ledger == journal_ledger(journal.path)
    resumed = steps(saved.state, values, optimizer, 5, journal)  # four repeated at no cost, one new
    assert resumed.ledger == Ledger((Event(0.3, 1.0, 7),)) == journal_ledger(journal.path)
