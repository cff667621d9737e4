"""A run of one process that is saved and loaded: bit-identical on resume, and epsilon never shrinks."""

from __future__ import annotations

import pytest
import torch
from run_cases import PLAN, Run, steps

from dpfunc import Event, Journal, Ledger
from dpfunc.errors import CheckpointError


def test_resume_is_bit_identical(tmp_path):
    run = Run(tmp_path).step(3)
    run.save()
    run.step(5)
    fresh = {name: torch.zeros_like(p).requires_grad_() for name, p in run.values.items()}
    saved = run.load(params=fresh)
    with torch.no_grad():
        for name, p in fresh.items():
            p.copy_(saved.params[name])
    other = torch.optim.Adam(fresh.values(), lr=0.1)
    other.load_state_dict(dict(saved.optimizer_state))
    resumed = steps(saved.state, fresh, other, 5, Journal(run.path, PLAN))
    assert all(torch.equal(value, fresh[name]) for name, value in run.values.items())
    assert resumed == run.state._replace(journal=str(run.path), journal_lines=8)


def test_a_resumed_run_goes_on_with_its_journal(tmp_path):
    """Steps that it does not have would be released again by the next resumption, with the same noise."""
    run = Run(tmp_path).step(3)
    run.save()
    state = run.load().state
    for other in (None, Journal(tmp_path / "jurnal.jsonl", PLAN)):
        with pytest.raises(CheckpointError, match="Expected the journal of the resumed run"):
            run.step(journal=other, state=state)
    (tmp_path / "link").symlink_to(tmp_path)
    run.step(journal=Journal(tmp_path / "link" / "journal.jsonl", PLAN), state=state)
    assert run.state.step == state.step + 1
    assert run.step(journal=lambda state: None).state.journal == state.journal  # a function of the caller's


def test_epsilon_never_shrinks(tmp_path):
    run = Run(tmp_path).step(2)
    run.save(journal=None)
    run.step(4)  # lost in the crash, but released
    state = run.load().state
    assert (state.step, state.charged) == (2, 6)
    assert state.ledger == run.ledger == run.counted
    run.step(5, state=state)  # four repeated at no cost, one new
    assert run.ledger == Ledger((Event(0.3, 1.0, 7),)) == run.counted
