"""A disk that is full, or a folder that cannot be written: what was spent is said, nothing is lost, and the run goes on."""

from __future__ import annotations

import errno
import os

import pytest
import run_cases
import torch
from full_disk import at_most
from run_cases import start, store

import dpfunc
from dpfunc import Journal, Plan, clipping, load, make_dp_step, sampling, save, take
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.errors import CheckpointError, InvalidArgument, NotWritten

PLAN = Plan(sampling.Poisson(40, 0.3), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=4, delta=1e-3)
DATA = torch.ones(40, 2)


class Loop:
    """A loop over steps with a journal and checkpoints."""

    def __init__(self, folder):
        self.journal, self.place = Journal(folder / "journal.jsonl", PLAN), folder / "checkpoints"
        self.params = {"w": torch.zeros(1000)}
        self.dp_step = make_dp_step(
            lambda p, rows: (p["w"].sum() * rows).sum(1), PLAN, journal=self.journal, engine="loop"
        )
        self.state = self.dp_step.init(self.params, dpfunc.secure_key())

    def step(self):
        batch = take(DATA, PLAN.draw(self.state, self.state.step))
        grads, self.state, _ = self.dp_step(self.params, batch, self.state)
        self.params = {"w": self.params["w"] - grads["w"]}

    def save(self):
        save(self.place, params=self.params, state=self.state, plan=PLAN, data=DATA, journal=self.journal.path)

    def load(self):
        saved = load(self.place, params=self.params, plan=PLAN, data=DATA, journal=self.journal.path)
        self.params, self.state = dict(saved.params), saved.state


@pytest.fixture
def loop(tmp_path):
    found = Loop(tmp_path)
    found.step()
    found.save()
    return found


def epsilon(steps):
    return f"epsilon={PLAN.ledger(steps).epsilon(PLAN.delta).epsilon:.4g} at delta=0.001 is spent"


def test_a_step_that_is_not_in_the_journal_is_not_released(loop):
    path = loop.journal.file
    with at_most(path.stat().st_size + 10), pytest.raises(NotWritten) as told:
        loop.step()
    assert f"{path} could not be written: File too large. At most 2 steps were released and {epsilon(2)}" in str(
        told.value
    )
    assert "Make room, or make it writable; then resume from the newest checkpoint, with the journal." in str(
        told.value
    )
    assert journal_ledger(path) == loop.state.ledger == PLAN.ledger(1)
    loop.step()  # what was written of the line is no obstacle
    again = loop.params["w"]
    loop.load()
    loop.step()
    assert torch.equal(loop.params["w"], again)
    assert journal_ledger(path) == loop.state.ledger == PLAN.ledger(2)


@pytest.mark.parametrize("call", [1, 2])
def test_a_disk_that_is_full_when_files_are_synced(loop, monkeypatch, call):
    """The line may be there whole: then it counts, and is repeated."""
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritten, match="could not be written: No space left on device"):
        loop.step()
    monkeypatch.undo()
    assert journal_ledger(loop.journal.path) == PLAN.ledger(2)
    loop.load()
    loop.step()
    assert journal_ledger(loop.journal.path) == loop.state.ledger == PLAN.ledger(2)


@pytest.mark.parametrize("size", [100, 600, 4000, 5000])
def test_a_checkpoint_that_is_not_written_leaves_the_one_before(loop, size):
    """Whatever file of it is too long, and whoever writes that one: this library or torch."""
    loop.step()
    before = sorted(loop.place.rglob("*"))
    with at_most(size), pytest.raises(NotWritten) as told:
        loop.save()
    assert f"{loop.place} could not be written: " in str(told.value)
    assert f"At most 2 steps were released and {epsilon(2)}" in str(told.value)
    assert "\n" not in str(told.value)
    assert sorted(loop.place.rglob("*")) == before
    loop.load()
    assert (loop.state.step, loop.state.ledger) == (1, PLAN.ledger(2))


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    loop = Loop(tmp_path / "file")
    with pytest.raises(NotWritten, match=r"file could not be written: .*At most 1 steps"):
        loop.step()
    loop.place = tmp_path / "file" / "checkpoints"
    loop.journal = Journal(tmp_path / "journal.jsonl", PLAN)
    with pytest.raises(NotWritten, match=r"could not be written: Not a directory. At most 0 steps"):
        loop.save()


def test_another_error_is_not_taken_for_one_of_the_disk(loop, monkeypatch):
    monkeypatch.setattr("dpfunc.checkpoint._folder.free_name", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.save()
    assert issubclass(NotWritten, CheckpointError)
    assert not issubclass(NotWritten, InvalidArgument)


def again(values):
    """Arguments of `load` for a run without a journal."""
    return {"plan": run_cases.PLAN, "params": values, "data": run_cases.DATA, "without_journal": "new_key"}


def deep():
    values = []
    for _ in range(100_000):
        values = [values]
    return values


UNSAVED = {
    "keep 0": ({"keep": 0}, "integer keep >= 1"),
    "keep true": ({"keep": True}, "integer keep >= 1"),
    "tensors": ({"extra": {"a": torch.zeros(1)}}, "Expected extra to hold JSON values"),
    "deep values": ({"extra": {"deep": deep()}}, "Expected extra to hold JSON values"),
    "data": ({"data": 5}, r"Expected data to be a pytree of tensors.*got data of type int\.$"),
    **{name: ({name: 5}, rf"got {name} of type int\.$") for name in ("plan", "state", "params", "optimizer_state")},
}  # fmt: skip


@pytest.mark.parametrize("name", UNSAVED)
def test_what_cannot_be_saved(tmp_path, name):
    changes, message = UNSAVED[name]
    state, values, _ = start()
    with pytest.raises(InvalidArgument, match=message):
        save(tmp_path, **{"params": values, "state": state, "plan": run_cases.PLAN, "data": run_cases.DATA, **changes})
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="found none. Start a new run"):
        load(tmp_path, **again(values))


def test_names_and_values_of_the_user_may_be_odd(tmp_path):
    """Half a surrogate pair has no UTF-8."""
    state, values, optimizer = start()
    store(tmp_path, state, values, optimizer, data="mails \udcff", extra={"note": "\ud800"})
    saved = load(tmp_path, **{**again(values), "data": "mails \udcff"})
    assert saved.extra == {"note": "\ud800"}
