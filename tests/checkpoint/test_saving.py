"""Saved and loaded by one process: bit-identical on resume, epsilon never shrinks, and a disk that is full loses nothing."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch
from cases import params
from full_disk import at_most
from run_cases import DATA, PLAN, Run, start, store

from dpfunc import Journal, Ledger, Plan, clipping, load, rng, sampling, save, take
from dpfunc.accounting import Event
from dpfunc.accounting.accountant import upper
from dpfunc.errors import CheckpointError, InvalidArgument, NotWritten

AGAIN = {"plan": PLAN, "data": DATA, "without_journal": "new_key"}


def test_resume_is_bit_identical(tmp_path):
    run = Run(tmp_path).step(3)
    run.save()
    run.step(5)
    again = Run(tmp_path).resume().step(5)
    assert all(torch.equal(value, again.values[name]) for name, value in run.values.items())
    assert again.state == run.state._replace(journal=str(run.path), journal_lines=8)


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


@pytest.mark.parametrize("saved", [0, 3])
@pytest.mark.parametrize("first", ["the copy", "the run"])
def test_a_copy_does_not_go_on_beside_its_run(tmp_path, caplog, saved, first):
    """Both would use the noise of one key, whichever goes on first. A run that was moved goes on, with a warning."""
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run").step(saved)
    run.save()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    run.step(first == "the run")
    copy = Run(tmp_path / "copy")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="a copy of a run that can still go on"):
            copy.load()
    assert "Go on in one place only" not in caplog.text
    assert run.load().state.step == saved
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert Run(tmp_path / "link").load().state.step == saved
    assert "Go on in one place only" not in caplog.text
    (tmp_path / "run").rename(tmp_path / "away")
    assert copy.load().state.step == saved
    assert "on another machine, of which nothing is seen" in caplog.text


def test_another_run_in_the_old_place_is_no_original(tmp_path):
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run").step(3)
    run.save()
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    Run(tmp_path / "run").step(1)
    assert Run(tmp_path / "moved").load().state.step == 3


def test_epsilon_never_shrinks(tmp_path):
    run = Run(tmp_path).step(2)
    run.save(journal=None)
    run.step(4)  # lost in the crash, but released
    state = run.load().state
    assert (state.step, state.charged) == (2, 6)
    assert state.ledger == run.ledger == run.counted
    run.step(5, state=state)  # four repeated at no cost, one new
    assert run.ledger == Ledger((Event(0.3, 1.0, 7),)) == run.counted


# A disk that is full, or a folder that cannot be written


@pytest.fixture
def run(tmp_path):
    """One step, saved, and the journal that its steps are written to."""
    found = Run(tmp_path).step()
    found.save()
    return found


def spent(count):
    return f"epsilon={upper(PLAN.ledger(count).epsilon(PLAN.delta).epsilon, 4)} at delta=0.001 is spent"


def test_a_step_that_is_not_in_the_journal_is_not_released(run):
    journal = Journal(run.path, PLAN)
    with at_most(run.path.stat().st_size + 10), pytest.raises(NotWritten) as told:
        run.step(journal=journal)
    for words in (
        f"{run.path} could not be written: File too large. At most 2 steps were released and {spent(2)}",
        "Make room, or make it writable; then resume from the newest checkpoint, with the journal.",
    ):
        assert words in str(told.value)
    assert run.counted == run.ledger == PLAN.ledger(1)
    again = run.step(journal=journal).copies()  # what was written of the line is no obstacle
    run.resume().step()
    assert all(torch.equal(run.values[name], value) for name, value in again.items())
    assert run.counted == run.ledger == PLAN.ledger(2)


@pytest.mark.parametrize("call", [1, 2])
def test_a_disk_that_is_full_when_files_are_synced(run, monkeypatch, call):
    """The line may be there whole: then it counts, and is repeated."""
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NotWritten, match="could not be written: No space left on device"):
            run.step()
    assert run.counted == PLAN.ledger(2)
    assert run.resume().step().ledger == run.counted == PLAN.ledger(2)


@pytest.mark.parametrize("size", [100, 60_000])
def test_a_checkpoint_that_is_not_written_leaves_the_one_before(run, size):
    """Whatever file of it is too long, and whoever writes that one: torch, or this library the larger one."""
    place = run.folder / "c"
    run.step()
    before = sorted(place.rglob("*"))
    with at_most(size), pytest.raises(NotWritten) as told:
        run.save(extra={"long": "x" * 100_000})
    assert f"{place} could not be written: " in str(told.value)
    assert f"At most 2 steps were released and {spent(2)}" in str(told.value)
    assert "\n" not in str(told.value)
    assert sorted(place.rglob("*")) == before
    run.resume()
    assert (run.state.step, run.ledger) == (1, PLAN.ledger(2))


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    run = Run(tmp_path / "file")
    with pytest.raises(NotWritten, match=r"file could not be written: .*At most 1 steps"):
        run.step()
    with pytest.raises(NotWritten, match=r"could not be written: Not a directory. At most 0 steps"):
        run.save(journal=tmp_path / "journal.jsonl")


def test_another_error_is_not_taken_for_one_of_the_disk(run, monkeypatch):
    monkeypatch.setattr("dpfunc.checkpoint.folder.free_name", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.save()
    assert issubclass(NotWritten, CheckpointError)
    assert not issubclass(NotWritten, InvalidArgument)


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


@pytest.mark.parametrize(("changes", "message"), UNSAVED.values(), ids=UNSAVED)
def test_what_cannot_be_saved(tmp_path, changes, message):
    state, values, _ = start()
    with pytest.raises(InvalidArgument, match=message):
        save(tmp_path, **{"params": values, "state": state, "plan": PLAN, "data": DATA, **changes})
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="found none. Start a new run"):
        load(tmp_path, params=values, **AGAIN)


def test_names_and_values_of_the_user_may_be_odd(tmp_path):
    """Half a surrogate pair has no UTF-8."""
    state, values, optimizer = start()
    store(tmp_path, state, values, optimizer, data="mails \udcff", extra={"note": "\ud800"})
    saved = load(tmp_path, params=values, **{**AGAIN, "data": "mails \udcff"})
    assert saved.extra == {"note": "\ud800"}


def other_plan(sampling_prob, noise_multiplier):
    return {"plan": Plan(sampling.Poisson(60, sampling_prob), clipping.Flat(1.0), noise_multiplier, 8, 1e-3)}


def changed_data():
    data = {name: value.clone() for name, value in DATA.items()}
    data["head.weight"][59, 3] += 1e-3
    return data


REFUSALS = {
    "plan": (other_plan(0.3, 0.9), r"another plan: plan.noise_multiplier: saved 1.0, now 0.9"),
    "sampler": (other_plan(0.2, 1.0), r"plan.sampler.sampling_prob: saved 0.3, now 0.2"),
    "data": ({"data": changed_data()}, r"another data set"),
    "fewer data": ({"data": take(DATA, torch.arange(59))}, r"another data set"),
    "parameters": (
        {"params": {**params(), "head.weight": torch.zeros(5)}},
        r"another parameter set: head.weight: saved float32 \(4,\), now float32 \(5,\)",
    ),
    "missing parameter": (
        {"params": {"head.weight": torch.zeros(4)}},
        r"body.a.bias: saved float32 \(3,\), now absent",
    ),
    "dtype": ({"params": params(torch.float64)}, r"saved float32 \(3,\), now float64 \(3,\)"),
    "optimizer": ({"optimizer_state": {"state": {}, "param_groups": []}}, "Expected optimizer_state to have"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSALS.values(), ids=REFUSALS)
def test_another_run_is_refused_with_the_difference(tmp_path, changes, message):
    run = Run(tmp_path).step(journal=None)
    run.save(journal=None)
    with pytest.raises(CheckpointError, match=message):
        run.load(**{"journal": None, "without_journal": "new_key", **changes})


def test_a_numpy_that_draws_other_numbers_resumes_nothing(tmp_path, monkeypatch):
    """An epoch would go on in another order, and correlated noise with other numbers than those that are out."""
    run = Run(tmp_path).step()
    run.save()
    monkeypatch.setattr(rng, "stream", lambda key, own=rng.stream: own(rng.fold_in(key, "of another version")))
    with pytest.raises(CheckpointError, match="belongs to another numpy: its batches and noise would be others"):
        run.load()
    monkeypatch.undo()
    assert run.load().state.step == 1
