"""Noise is used again only where sums are the same: any order of steps, saves, crashes and changes of the layout."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest
import run_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc import Ledger, make_dp_step, sampling
from dpfunc.accounting.record import GUESSABLE
from dpfunc.checkpoint import make_record, saving
from dpfunc.checkpoint._resume_policy import NOTES, known_notes, layout
from dpfunc.checkpoint.folder import all_checkpoints
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.errors import CheckpointError, LedgerConflict
from dpfunc.rng import fingerprint

PLAN = dataclasses.replace(run_cases.PLAN, num_steps=30)


class Run(run_cases.Run):
    """A run that can be saved, crashed and resumed in layouts that are only said to differ."""

    def __init__(self, folder, plan=PLAN, size=1):
        folder = Path(folder)
        super().__init__(folder, counts=(folder / "journal.jsonl").exists(), plan=plan)
        self.size, self.released = size, []  # (run, step, layout, value)

    def step(self, count=1):
        for _ in range(count):
            key, step = fingerprint(self.state.key), self.state.step
            super().step()
            self.released.append((key, step, self.size, self.values["head.weight"].grad))

    def laid_out(self, action, changes):
        def said(params, ranks):
            return {**layout(params, ranks), "data processes": self.size}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "layout", said)
            return action(**changes)

    def save(self, **changes):
        return self.laid_out(super().save, changes)

    def load(self, size, **changes):
        self.size = size
        self.state = self.laid_out(super().load, changes).state

    def back(self):
        """Somebody moves all checkpoints away but the oldest."""
        for path in all_checkpoints(self.folder / "c")[1:]:
            shutil.rmtree(path)

    def check(self):
        """No noise on two sums that may differ; and everything in the journal is in the ledger, once."""
        seen = {}
        for key, step, size, value in self.released:
            before = seen.setdefault((key, step), (size, value))
            assert before[0] == size
            assert torch.equal(before[1], value)
        assert self.ledger == (journal_ledger(self.path) if self.released else Ledger())


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["step", "save", "load", "back"]), st.integers(1, 3)), min_size=2, max_size=10
)


@settings(max_examples=12)
@given(OPERATIONS)
def test_any_history_keeps_both_promises(operations):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.save()
        for name, number in [*operations, ("load", 1), ("step", 1)]:
            if name == "step":
                run.step(min(number, run.state.limit - run.state.step))
            elif name == "save":
                run.save(keep=number)
            else:
                if name == "back":  # somebody goes back to the oldest checkpoint there is
                    run.back()
                run.load(number, recharge=True)
            if name != "save":
                run.check()


def test_nothing_beyond_the_checkpoint(tmp_path):
    """Another layout goes on with the same key; then that layout is the one that can be repeated."""
    run = Run(tmp_path)
    run.step(2)
    run.save()
    key = run.state.key
    run.load(2)
    assert run.state.key == key
    run.step(2)
    with pytest.raises(CheckpointError, match="saved 2, now 1"):
        run.load(1)
    run.load(2)
    assert (run.state.step, run.state.charged) == (2, 4)
    run.step(3)
    run.check()
    assert run.ledger == PLAN.ledger(5)


def test_steps_are_charged_again_each_time(tmp_path):
    run = Run(tmp_path)
    run.step(1)
    run.save()
    key = run.state.key
    run.step(3)
    run.load(2, recharge=True)
    assert run.state.key != key
    assert (run.state.step, run.state.charged, run.ledger) == (1, 1, PLAN.ledger(4))
    run.step(2)
    run.load(3, recharge=True)  # nothing was saved since
    assert run.ledger == PLAN.ledger(6)
    run.step(1)
    run.load(1)  # as at first: repeats, and knows of what the others released
    assert run.ledger == PLAN.ledger(7)
    run.load(1)  # nothing was saved since: it has to be counted again
    assert (run.state.key, run.state.charged, run.ledger) == (key, 4, PLAN.ledger(7))
    run.step(4)
    run.save()
    run.load(1)
    assert run.ledger == PLAN.ledger(8)  # nothing is counted twice
    run.check()
    assert [note.parent is None for note in known_notes(run.folder / "c" / NOTES, 0)] == [False, False, True, True]


def test_who_asks_draws_anew_what_could_be_repeated(tmp_path):
    """E.g. after a change of the loss, with which the journal refuses the same noise."""
    run = Run(tmp_path)
    run.step(1)
    run.save()
    key = run.state.key
    run.load(1, recharge=True)
    assert run.state.key == key  # there is nothing beyond the checkpoint
    run.step(2)
    run.load(1, recharge=True)
    assert run.state.key != key
    assert (run.state.step, run.state.charged, run.ledger) == (1, 1, PLAN.ledger(3))
    run.step(1)
    assert run.ledger == PLAN.ledger(4)
    run.check()


def test_the_budget_covers_what_is_drawn_again(tmp_path):
    plan = dataclasses.replace(PLAN, num_steps=10)
    plan = dataclasses.replace(plan, epsilon=plan.guarantee().epsilon * 1.0001)
    run = Run(tmp_path, plan)
    run.step(2)
    run.save()
    run.step(4)
    run.load(2, recharge=True)
    assert run.state.limit == 6  # six were taken: four are left
    run.step(4)
    assert run.ledger == plan.ledger(10)
    assert run.state.step == run.state.limit


@pytest.mark.parametrize("size", [1, 2])
def test_without_its_journal_a_run_takes_a_new_key(tmp_path, size):
    """In its own layout too: nobody knows what was released after the checkpoint. The folder stays that of the run."""
    run = Run(tmp_path)
    run.step(2)
    run.save()
    run.step(1)
    with pytest.raises(CheckpointError, match=r"Pass journal="):
        run.load(size, journal=None)
    run.load(size, journal=None, without_journal="new_key")
    assert (run.state.step, run.ledger) == (2, PLAN.ledger(2))
    with pytest.raises(LedgerConflict, match="beside 2 of its own that are not there under its key, got .* lacks 3"):
        run.step(1)  # into the journal, which has what nobody had counted, and the two under the former key
    run.load(size, recharge=True)
    run.step(1)
    assert (run.state.step, run.ledger) == (3, PLAN.ledger(4))
    run.check()


NEW_KEY = [{"recharge": True}, {"journal": None, "without_journal": "new_key"}]


@pytest.mark.parametrize("way", NEW_KEY, ids=str)
def test_of_two_loads_at_one_moment_one_goes_on(tmp_path, monkeypatch, way):
    """Each takes a key of its own, and counts what it knew of when it decided."""
    run = Run(tmp_path)
    run.step(2)
    run.save()
    run.step(1)
    read, other = saving.read_tensors, []

    def meanwhile(*arguments):
        if not other:
            other.append(None)
            run.load(2, **way)
        return read(*arguments)

    monkeypatch.setattr(saving, "read_tensors", meanwhile)
    with pytest.raises(CheckpointError, match=r"with 0 notes, as a moment ago, got 1: another process has resumed"):
        run.load(2, **way)
    assert len(known_notes(run.folder / "c" / NOTES, 0)) == 1


@pytest.mark.parametrize("way", NEW_KEY, ids=str)
def test_a_key_that_others_know_stays_known(tmp_path, way):
    """The record of the run is about all of its steps: those with the first key, too, whose noise can be subtracted."""
    run = Run(tmp_path)
    run.state = run.state._replace(key=dataclasses.replace(run.state.key, guessable=True))
    first = run.state.key
    run.step(2)
    run.save()
    run.step()
    run.load(2, **way)
    assert run.state.key != first
    assert make_record(make_dp_step(run_cases.linear_loss, PLAN), run.state, unit="one row").noise_key == GUESSABLE


def test_the_journal_of_another_run_is_refused(tmp_path):
    run = Run(tmp_path)
    run.step(2)
    run.save()
    with pytest.raises(CheckpointError, match="lost.jsonl.head beside it, as when the checkpoint was saved"):
        run.load(1, journal=tmp_path / "lost.jsonl")
    run.save(journal=None)
    with pytest.raises(CheckpointError, match="at least one step, got .*lost.jsonl, which is no file"):
        run.load(1, journal=tmp_path / "lost.jsonl")
    stranger = Run(tmp_path / "stranger")
    stranger.step(2)
    with pytest.raises(CheckpointError, match="Expected the journal to have step 1 of this run"):
        run.load(1, journal=stranger.path)
    run.step(1)
    run.load(2, recharge=True)
    run.save()
    run.load(2)  # of the new run nothing is in the journal yet
    run.step(1)
    run.save()
    run.path.write_text("\n".join(run.path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(CheckpointError, match="Expected 4 lines in the journal .* got 3"):
        run.load(2)


def test_notes_that_were_lost_are_not_read_as_never_resumed(tmp_path):
    """Layout 2 and a new key are in the notes only: without them layout 1 would repeat what 2 released."""
    run = Run(tmp_path)
    notes = run.folder / "c" / NOTES
    run.step(2)
    run.save()
    assert notes.read_bytes() == b""
    notes.unlink()
    with pytest.raises(CheckpointError, match="with at least 0 notes.*no such file"):
        run.load(1)
    notes.touch()
    run.step(2)
    run.load(2, recharge=True)
    run.step(1)
    run.save()
    kept = notes.read_bytes()
    assert kept.count(b"\n") == 1
    for lost in (None, b"", kept[:-1]):
        notes.unlink()
        if lost is not None:
            notes.write_bytes(lost)
        with pytest.raises(CheckpointError, match="with at least 1 notes.*restore it"):
            run.load(2)
        with pytest.raises(CheckpointError, match="with at least 1 notes.*restore it"):
            run.save()
        notes.touch()
    # A checkpoint of before there was a note: the journal has a run that nobody explains.
    run.back()
    notes.write_bytes(b"")
    with pytest.raises(CheckpointError, match="another run that began after this one"):
        run.load(1)
    notes.write_bytes(kept)
    run.load(1)
    run.check()


def test_earlier_runs_in_the_journal_are_counted_from_the_beginning(tmp_path):
    """They were there when this run was planned; one that began later is not in its ledger."""
    earlier = Run(tmp_path)
    earlier.step(2)
    run = Run(tmp_path)
    run.step(1)
    run.save()
    run.load(1)
    assert run.ledger == PLAN.ledger(3)
    later = Run(tmp_path)
    later.step(1)
    with pytest.raises(CheckpointError, match="another run that began after this one"):
        run.load(1)
    run.load(1, later_runs="ignore")
    assert run.ledger == PLAN.ledger(3)


def test_an_epoch_is_not_drawn_anew_from_its_middle(tmp_path):
    plan = dataclasses.replace(PLAN, sampler=sampling.Shuffled(60, 20), adjacency="zero_out", num_steps=9)
    run = Run(tmp_path, plan)
    run.step(2)
    run.save()
    run.step(2)
    with pytest.raises(CheckpointError, match="as an epoch of shuffled steps is"):
        run.load(2, recharge=True)
    run.load(1)
    run.step(1)
    run.save()
    run.step(1)
    run.load(2, recharge=True)
    run.step(6)
    run.check()
    assert run.ledger == Ledger(plan.events(0, 6), "zero_out").compose(Ledger(plan.events(3, 9), "zero_out"))


def test_notes_that_cannot_be_read_are_an_error(tmp_path):
    run = Run(tmp_path)
    run.save()
    (run.folder / "c" / NOTES).write_text('{"run": 1}\n')
    with pytest.raises(CheckpointError, match="cannot be read"):
        run.load(1)
    (run.folder / "c" / NOTES).write_text('{"run": "torn')
    run.load(1)
