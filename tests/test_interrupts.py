"""Ctrl-C at any line of a step: the journal has what was released, and nothing is released that is not counted."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import as_batch, linear_loss, params, random_rows

import dpfunc
from dpfunc import Journal, Plan, clipping, make_dp_step, sampling, secure_key, take
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.errors import StateReused
from dpfunc.state import allow_repeat

FILES = {
    str(Path(dpfunc.__file__).parent / name)
    for name in ("step.py", "checkpoint/journal.py", "checkpoint/chain.py", "state.py", "_utils/locks.py")
}
POINTS = 50
PLAN = Plan(sampling.Poisson(12, 0.3), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
DATA = as_batch(random_rows(0, 12))


class Interrupting:
    """Raise KeyboardInterrupt before the line of this number, in the files of a step."""

    def __init__(self, number):
        self.number, self.count = number, 0

    def __call__(self, frame, event, _):
        return self.line if frame.f_code.co_filename in FILES else None

    def line(self, frame, event, _):
        if event == "line":
            self.count += 1
            if self.count == self.number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def run_of(folder):
    """A run after its first step, and its second batch."""
    journal, values = Journal(folder / "journal.jsonl", PLAN), params()
    dp_step = make_dp_step(linear_loss, PLAN, journal=journal, engine="loop")
    state = dp_step.init(values, secure_key())
    batches = iter(PLAN.batches(state))
    _, state, _ = dp_step(values, take(DATA, next(batches)), state)
    return dp_step, values, take(DATA, next(batches)), state, journal.path


def interrupted(call, number):
    """True if the call was interrupted; its result was never assigned."""
    before, watch = sys.gettrace(), Interrupting(number)
    sys.settrace(watch)
    try:
        call()
    except KeyboardInterrupt:
        return watch, True
    finally:
        sys.settrace(before)
    return watch, False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that are closed a little later
def test_ctrl_c_at_any_line_of_a_step(tmp_path):
    counts = []  # of lines, which some keys have more of
    for number in range(5):
        dp_step, values, batch, state, path = run_of(tmp_path / f"whole {number}")
        watch, stopped = interrupted(partial(dp_step, values, batch, state), None)
        assert not stopped
        counts.append(watch.count)
    assert min(counts) > 150
    kept = {"not taken": 0, "journalled": 0, "released": 0}
    for point in range(POINTS):
        dp_step, values, batch, state, path = run_of(tmp_path / str(point))
        stopped = interrupted(lambda dp_step=dp_step, values=values, batch=batch, state=state: dp_step(values, batch, state),
                              1 + point * min(counts) // POINTS)[1]  # fmt: skip
        assert stopped
        counted = journal_ledger(path).num_steps
        assert counted >= state.ledger.num_steps == 1, "never less than the caller's own ledger"
        try:
            again = dp_step(values, batch, state)
        except StateReused:
            assert counted == 2, "a step that is refused is in the journal"
            again = dp_step(values, batch, allow_repeat(state))  # the same values, as the journal verifies
            kept["released"] += 1
        else:
            kept["journalled" if counted == 2 else "not taken"] += 1
        assert journal_ledger(path) == again.state.ledger == PLAN.ledger(2)
        assert all(torch.isfinite(value).all() for value in again.grads.values())
    assert all(kept.values()), kept


def test_an_interrupt_before_anything_is_released_costs_nothing(tmp_path):
    """Inside of the loss: the step was not taken, and the same state goes on."""
    dp_step, values, batch, state, path = run_of(tmp_path)

    def stopping(params, rows):
        raise KeyboardInterrupt

    whole = make_dp_step(stopping, PLAN, engine="loop", journal=Journal(path, PLAN), verify_batch=False)
    with pytest.raises(KeyboardInterrupt):
        whole(values, DATA, state)  # an empty draw would not call the loss
    assert journal_ledger(path).num_steps == 1
    assert dp_step(values, batch, state).state.ledger == PLAN.ledger(2)
