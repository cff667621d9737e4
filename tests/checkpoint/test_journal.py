"""The records of a run fail closed: a line that is lost, changed or moved is an error, never a smaller epsilon."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import search_cases
from cases import linear_loss
from journal_cases import line, written
from record_cases import LEDGER, RECORD, record
from run_cases import DATA, PLAN, Run, start, steps

from dpfunc import Journal, Ledger, make_dp_step, take
from dpfunc._utils.validation import signed
from dpfunc.accounting import Event
from dpfunc.checkpoint.chain import head_path
from dpfunc.checkpoint.costs import read_cost, read_spent
from dpfunc.checkpoint.journal import journal_ledger, read_steps
from dpfunc.errors import CheckpointError, InvalidArgument, LedgerConflict, StateReused
from dpfunc.rng import Streams, fold_in
from dpfunc.state import allow_repeat


def test_each_step_is_synced_before_it_returns(tmp_path, monkeypatch):
    """Not only written: a power failure must not lose it either."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(stat.S_ISDIR(os.fstat(handle).st_mode)))
    journal = Journal(tmp_path / "j.jsonl", PLAN)
    state, values, optimizer = start()
    begun, line, head = [False, True], [False], [False, True]  # True: of a folder
    for expected in (begun + line + head, line + head, line + head):
        synced.clear()
        state = steps(state, values, optimizer, 1, journal)
        assert synced == expected


def test_a_journal_that_is_not_there_is_not_free(tmp_path):
    path = tmp_path / "journal.jsonl"
    for said in ("is no file", "is empty"):
        with pytest.raises(CheckpointError, match=f"Expected a journal with at least one step.*which {said}. Name"):
            journal_ledger(path)
        with pytest.raises(CheckpointError, match="at least one step"):
            read_steps(path)
        assert read_steps(path, missing="empty") == {}
        path.touch()


def test_one_step_of_two_values_is_refused(tmp_path):
    path = written(tmp_path / "same.jsonl", line(0), line(1), line(1))  # repeated after a crash
    assert journal_ledger(path).num_steps == 2
    for number, change in enumerate(({"release": "s"}, {"events": [[0.1, 5.0, 1]]})):
        path = written(tmp_path / f"{number}.jsonl", line(0), line(0, **change))
        with pytest.raises(CheckpointError, match="has step 0 of run a twice, with different values"):
            journal_ledger(path)


@pytest.mark.parametrize("kept", [3, 4])
def test_a_checkpoint_remembers_the_end_of_the_journal(tmp_path, kept):
    """Also when the journal and its head went back together, as from a backup."""
    Run(tmp_path).step()
    run = Run(tmp_path, counts=True).step(3)
    Run(tmp_path, counts=True).step()  # the last line is of another run
    run.save()
    assert run.load(later_runs="ignore").state.ledger == PLAN.ledger(4)
    lines = run.path.read_bytes().splitlines()
    run.path.unlink()
    head_path(run.path).unlink()
    written(run.path, *(json.loads(each) for each in lines[:kept]))
    assert run.counted.num_steps == kept
    with pytest.raises(CheckpointError, match="Expected at least 5 lines .* when the checkpoint was saved"):
        run.load()
    written(run.path, *(line(step) for step in range(3)))
    with pytest.raises(CheckpointError, match="Line 5 of the journal .* when the checkpoint was saved"):
        run.load()


def test_a_journal_that_was_to_come_is_missed(tmp_path):
    """A checkpoint from before the first step: steps that were taken since are not forgotten with their journal."""
    run = Run(tmp_path)
    run.save()
    assert run.load().state.charged == 0
    run.step(2)
    run.path.unlink()
    with pytest.raises(CheckpointError, match="Expected 2 lines"):
        run.load()
    head_path(run.path).unlink()
    with pytest.raises(CheckpointError, match="journal.jsonl.head beside it, as when the checkpoint was saved"):
        run.load()


def test_without_a_journal_no_noise_is_used_again(tmp_path):
    """Nobody knows what was released after the checkpoint."""
    run = Run(tmp_path).step(3, journal=None)
    run.save(journal=None)
    anew = {"journal": None, "without_journal": "new_key"}
    for options, kind, message in (
        ({"journal": None}, CheckpointError, 'nobody knows which steps were released.*without_journal="new_key"'),
        ({"without_journal": "new_key"}, InvalidArgument, "got both"),
        ({"journal": None, "without_journal": "old_key"}, InvalidArgument, "without_journal to be one of"),
    ):
        with pytest.raises(kind, match=message):
            run.load(**options)
    first = run.load(**anew).state
    with pytest.raises(CheckpointError, match='from which 1 did.*in no ledger.*pass later_runs="ignore"'):
        run.load(**anew)
    second = run.load(**anew, later_runs="ignore").state
    assert len({run.state.key.secret, first.key.secret, second.key.secret}) == 3
    assert (first.step, first.charged, first.released, first.ledger) == (3, 3, (), PLAN.ledger(3))
    assert run.step(8, journal=None, state=first).ledger == PLAN.ledger()


def test_a_run_counts_those_before_it(tmp_path):
    """A second run in the journal begins with the cost of the first, also after a kill before the first checkpoint."""
    journal = Journal(tmp_path / "journal.jsonl", PLAN)
    spent = Run(tmp_path).step(3, journal).counted
    text = journal.path.read_text()
    (event,) = spent.events
    for ledger, lacks in ((None, 3), (Ledger((dataclasses.replace(event, num_steps=2),)), 1)):
        run = Run(tmp_path, ledger=ledger)
        for known in (journal, Journal(journal.path, PLAN)):
            with pytest.raises(LedgerConflict, match=f"all steps of earlier runs in its journal .* lacks {lacks}"):
                run.step(journal=known)
    assert journal.path.read_text() == text
    for known in (journal, Journal(journal.path, PLAN)):
        run = Run(tmp_path, counts=True).step(2, known)
        assert run.ledger == run.counted
    assert run.ledger.num_steps == 7


def test_steps_without_a_journal_do_not_pass_as_those_of_other_runs(tmp_path):
    """They cost the same: only their number tells them apart."""
    Run(tmp_path).step(5)
    run = Run(tmp_path).step(5, journal=None)
    text = run.path.read_text()
    with pytest.raises(LedgerConflict, match=r"beside 5 of its own.* lacks 5.*journal_ledger\(path\)\.compose\(state"):
        run.step()
    assert run.path.read_text() == text
    again = Run(tmp_path, ledger=run.counted.compose(run.ledger)).step()  # what the message says
    assert again.ledger == again.counted
    assert again.ledger.num_steps == 11


def test_nor_when_the_run_goes_on_with_a_new_key_and_is_loaded_with_the_journal(tmp_path):
    Run(tmp_path).step(3)
    run = Run(tmp_path).step(3, journal=None)
    run.save(journal=None)
    run.save(state=run.load(journal=None, without_journal="new_key").state, journal=None)
    with pytest.raises(CheckpointError, match="what it cost is not in this ledger"):
        run.load()
    own = Journal(tmp_path / "own.jsonl", PLAN)  # a journal of its own has nothing of others
    again = run.load(journal=None, without_journal="new_key", later_runs="ignore").state
    assert run.step(journal=own, state=again).ledger == journal_ledger(own.path) == PLAN.ledger(4)


def test_a_journal_of_a_run_that_went_on_says_how_to_count_both(tmp_path):
    """The run that continued the checkpoint, with a new key and a journal, ended before it saved anything."""
    run = Run(tmp_path).step(3, journal=None)
    run.save(journal=None)
    saved = run.state
    run.step(2, state=run.load(journal=None, without_journal="new_key").state)
    with pytest.raises(CheckpointError, match=r"counts all of it: begin a new run .*journal_ledger\(path\)\)"):
        run.load()
    with pytest.raises(CheckpointError, match=r"journal if they had one: .*journal_ledger\(path\)\)"):
        run.load(journal=None, without_journal="new_key")
    assert Run(tmp_path, counts=True).step().ledger == PLAN.ledger(6)  # what both messages say
    run.step(journal=None, state=saved).save(journal=None)  # which that run does not count
    with pytest.raises(CheckpointError, match="the journal of another run, or incomplete"):
        run.load()


def test_a_run_leaves_no_step_out_of_its_journal(tmp_path):
    run = Run(tmp_path).step(journal=None).step()  # the first line says what was before
    assert run.counted.num_steps == 2
    run.step(2, journal=None)
    Run(tmp_path, counts=True).step()  # another run, whose step costs as much as one of them
    with pytest.raises(CheckpointError, match=r"step 2 of this run next .* got step 4.*plan\.events\(2, 4\)"):
        run.step()
    without = Ledger(PLAN.events(2, 4), PLAN.adjacency)
    again = Run(tmp_path, ledger=run.counted.compose(without)).step()  # what the message says
    assert again.ledger == again.counted
    assert again.ledger.num_steps == 6


def test_a_numpy_with_other_normals_repeats_no_step(tmp_path, monkeypatch):
    """Two releases of one sum would differ by noise alone, and their mean would have less of it."""
    run = Run(tmp_path).step()
    run.save()
    before = run.step().ledger
    own = Streams.opened
    monkeypatch.setattr(Streams, "opened", lambda self, key: own(self, fold_in(key, "of another version")))
    with pytest.raises(StateReused, match=r"(?s)released before, and with other values.*numpy.*Nothing was released"):
        run.resume().step()
    monkeypatch.undo()
    assert run.resume().step().ledger == before


def test_a_step_from_before_the_journal_is_not_repeated_into_it(tmp_path):
    run = Run(tmp_path)
    first = run.state
    run.step(journal=None).step(2)
    with pytest.raises(CheckpointError, match=r"Expected step 3 of this run next .* got step 0, which the run took"):
        run.step(state=allow_repeat(first))


def test_a_second_phase_that_is_begun_again_counts_both(tmp_path):
    """Its journal says what the first phase had spent, of which the costs of its own steps cannot be told apart."""
    spent = Run(tmp_path, journal="first.jsonl").step(4).counted
    Run(tmp_path, journal="second.jsonl", ledger=spent).step(3)  # and is killed
    again = Run(tmp_path, journal="second.jsonl", ledger=spent)
    with pytest.raises(LedgerConflict, match="all steps of earlier runs in its journal .* lacks 3"):
        again.step()
    assert again.counted == PLAN.ledger(4).compose(PLAN.ledger(3))
    for count in (8, 9):
        run = Run(tmp_path, journal="second.jsonl", counts=True).step()
        assert run.ledger == run.counted
        assert run.ledger.num_steps == count
    assert sum(len(steps) for steps in read_steps(run.path).values()) == 5


def test_runs_in_one_journal_are_one_after_the_other(tmp_path):
    """A run that goes on after a later one began there would not count that one's steps."""
    journal = Journal(tmp_path / "journal.jsonl", PLAN)
    first = Run(tmp_path).step(1, journal)
    first.save()
    states = (first.state, first.load().state)
    second = Run(tmp_path, counts=True).step(2)
    text = journal.path.read_text()
    for state in states:
        for known in (journal, Journal(journal.path, PLAN)):
            with pytest.raises(LedgerConflict, match="one after the other.*began before another one wrote there"):
                first.step(journal=known, state=allow_repeat(state))
    assert journal.path.read_text() == text
    assert second.step(journal=journal).ledger == second.counted == PLAN.ledger(1).compose(PLAN.ledger(3))
    loaded = first.load(later_runs="ignore").state  # they saw other records
    assert first.step(2, journal, loaded).ledger == PLAN.ledger(3)


def test_a_checkpoint_from_before_the_first_step_counts_who_came_since(tmp_path):
    """The journal has none of its steps, and so no place of its own in it."""
    Run(tmp_path).step(2)
    run = Run(tmp_path, counts=True)
    run.save()
    assert run.load().state.ledger == PLAN.ledger(2)  # it counts who came before
    Run(tmp_path, counts=True).step(5)
    with pytest.raises(CheckpointError, match="another run that began after this one"):
        run.load()
    assert run.load(later_runs="ignore").state.ledger == PLAN.ledger(2)


def test_a_step_is_repeated_whoever_wrote_since(tmp_path):
    """It is in the journal, and costs nothing more."""
    run = Run(tmp_path)
    first, kept = run.state, {name: value.detach().clone() for name, value in run.values.items()}
    run.step()
    Run(tmp_path, counts=True).step()
    again, batch = make_dp_step(linear_loss, PLAN, journal=Journal(run.path, PLAN)), next(iter(PLAN.batches(first)))
    assert again(kept, take(DATA, batch), allow_repeat(first)).state.step == 1
    assert run.counted == PLAN.ledger(1).compose(PLAN.ledger(1))


def test_a_folder_without_a_checkpoint_says_what_the_journal_has(tmp_path):
    """A run that was killed before its first checkpoint counts."""
    run = Run(tmp_path).step(2)
    with pytest.raises(CheckpointError, match="found none. Start a new run. The journal .* has 2 steps, which count"):
        run.load()
    for call in (run.load, run.save):
        with pytest.raises(InvalidArgument, match="Expected the path of a journal.*Of a Journal pass journal.path"):
            call(journal=Journal(run.path, PLAN))
    with pytest.raises(InvalidArgument, match="Expected ledger to be a dpfunc.Ledger, got ledger of type str. Read a"):
        Run(tmp_path, ledger=str(run.path))


def test_a_checkpoint_that_nobody_counts_is_refused(tmp_path):
    """Without a journal, the steps after an older state are in no file."""
    run = Run(tmp_path)
    begin = run.state
    run.step(2, journal=None)
    with pytest.raises(
        StateReused, match="Expected the newest state of the run, after 2 steps.*another run, both use one key"
    ):
        run.save(state=begin, journal=None)
    with pytest.raises(InvalidArgument, match="Expected a state of this plan"):
        run.save(plan=dataclasses.replace(PLAN, num_steps=9), journal=None)
    assert not list(tmp_path.iterdir())


def test_a_new_key_pays_again_for_what_is_drawn_anew(tmp_path):
    """A checkpoint of a resumed run that had not caught up: the steps in its ledger are not free for another key."""
    plan = dataclasses.replace(PLAN, epsilon=PLAN.guarantee().epsilon)
    run = Run(tmp_path, plan=plan)
    first = run.state
    run.step(4, journal=None)
    run.save(state=allow_repeat(first)._replace(charged=4, ledger=run.ledger), journal=None)
    found = run.load(journal=None, without_journal="new_key").state
    assert (found.step, found.charged, found.limit) == (0, 0, 4)  # 8 steps in all
    run.step(5, journal=None, state=found)
    assert (run.state.step, run.ledger) == (4, plan.ledger())


def steps_of(tmp_path, monkeypatch, what):
    """A run of six steps into a journal of a relative path; `what` happens to its folder after the fourth."""
    monkeypatch.chdir(tmp_path)
    run = Run(Path("run"))
    journal = Journal(run.path, PLAN)
    run.step(2, journal)
    shutil.copytree("run", "backup")
    run.step(2, journal)
    what(tmp_path)
    run.step(2, journal)
    return journal


def removed(folder):
    shutil.rmtree(folder / "run")


def restored_old(folder):
    removed(folder)
    shutil.copytree(folder / "backup", folder / "run")


def overwritten_with_old(folder):
    for file in (folder / "backup").iterdir():
        (folder / "run" / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize("what", [removed, restored_old, overwritten_with_old])
def test_a_journal_that_goes_back_during_a_run_is_an_error(tmp_path, monkeypatch, what):
    with pytest.raises(CheckpointError, match="Expected the lines that the journal .* had a step ago, 3 or one more"):
        steps_of(tmp_path, monkeypatch, what)


def restored_whole(folder):
    shutil.copytree(folder / "run", folder / "copy")
    removed(folder)
    shutil.copytree(folder / "copy", folder / "run")


def elsewhere(folder):
    (folder / "other").mkdir()
    os.chdir(folder / "other")


@pytest.mark.parametrize("what", [restored_whole, elsewhere])
def test_a_whole_copy_and_another_working_directory_change_nothing(tmp_path, monkeypatch, what):
    journal = steps_of(tmp_path, monkeypatch, what)
    assert journal_ledger(journal.file).num_steps == 6
    assert journal.file == tmp_path / "run" / "journal.jsonl"


# Files of earlier runs become a ledger; what cannot be read is never free


def test_a_killed_run_without_checkpoints_is_counted(tmp_path):
    assert read_spent([Run(tmp_path).step().path]) == PLAN.ledger(1)


def test_all_kinds_of_files_together(tmp_path):
    ledger = PLAN.ledger(3)
    (tmp_path / "b.json").write_text(ledger.to_json())
    (tmp_path / "c.json").write_text(
        record(ledger=ledger, epsilon=ledger.epsilon(1e-5).epsilon, accountant="tilted").to_json()
    )
    names = [written(tmp_path / "a.jsonl", line(0)), tmp_path / "b.json", str(tmp_path / "c.json")]
    assert read_spent(names).num_steps == 7
    assert read_spent(()) is read_spent(None) is None


def test_other_neighbours_do_not_add_up(tmp_path):
    names = [written(tmp_path / f"{kind}.jsonl", line(0, adjacency=kind)) for kind in ("add_remove", "zero_out")]
    with pytest.raises(LedgerConflict):
        read_spent(names)


WRITTEN = {
    "ledger.json": lambda path: path.write_text(Ledger((Event(0.01, 1.0, 1000),)).to_json()),
    "privacy_accounting.json": lambda path: path.write_text(RECORD.to_json()),
    "journal.jsonl": lambda path: written(path, line(0)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_no_flipped_bit_changes_what_is_spent(tmp_path, name):
    """It is refused, or read as the same; of each byte three bits of a ledger, of longer files one of each third byte."""
    path, refused, every = tmp_path / name, 0, 1 if name == "ledger.json" else 3
    WRITTEN[name](path)
    text, spent = path.read_bytes(), read_spent([path])
    for place, byte in list(enumerate(text))[::every]:
        for bit in (0, 1, 4) if name == "ledger.json" else (place % 5,):
            path.write_bytes(text[:place] + bytes([byte ^ 1 << bit]) + text[place + 1 :])
            try:
                assert read_spent([path]) == spent, (place, bit)
            except InvalidArgument:
                refused += 1
    assert refused > 0.8 * len(text) / every


@pytest.mark.parametrize("steps", [1, 9, 11, 100])
def test_a_record_costs_what_it_states(tmp_path, steps):
    """An edited ledger in it that has a digest of its own, and another one of the record."""
    path = tmp_path / "privacy_accounting.json"
    path.write_text(record(ledger=Ledger((Event(1.0, 5.0, steps),))).to_json())
    with pytest.raises(
        InvalidArgument, match=r"Expected a record whose epsilon is that of its ledger, .*got epsilon=2.59"
    ):
        read_spent([path])
    path.write_text(record(epsilon=RECORD.epsilon * (1 + 5e-5)).to_json())
    assert read_spent([path]) == LEDGER  # as another version of a library may round


@pytest.mark.parametrize("name", ["ledger", "record"])
def test_a_file_without_a_digest_is_refused_with_what_to_do(tmp_path, name):
    """As earlier versions wrote it; or by hand."""
    values = json.loads((LEDGER if name == "ledger" else RECORD).to_json())
    path = tmp_path / "x.json"
    path.write_text(json.dumps({key: value for key, value in values.items() if key != "digest"}))
    with pytest.raises(InvalidArgument, match="The file was changed or damaged after it was written, or by hand"):
        read_spent([path])
    path.write_text(json.dumps(signed({**values, "schema": f"{values['schema'][:-1]}1"})))
    with pytest.raises(
        InvalidArgument,
        match=r"Expected (a ledger|the record of a run .*) with schema '.*/[24]', .*/1'.*name its journal",
    ):
        read_spent([path])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", None, "which is no file"),
        ("x.jsonl", "", "which is empty"),
        ("x.jsonl", "{}\n", "cannot be read"),
        ("x.json", "{", "cannot be read"),
        ("x.json", "[]", "cannot be read"),
        ("x.json", "{}", "cannot be read"),
        ("x.json", '{"ledger": {}, "ledger": {}}', "the name 'ledger' occurs twice"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgument, match=message):
        read_spent([tmp_path / name])


def test_what_holds_a_ledger_and_is_none_is_refused(tmp_path):
    """The state of a checkpoint, which lacks the steps after it, and records before they had a schema."""
    path, inside = tmp_path / "x.json", json.loads(LEDGER.to_json())
    old = {"epsilon": 1.0, "delta": 1e-5, "global_step": 3, "ledger": inside}
    path.write_text(json.dumps(old))
    with pytest.raises(
        InvalidArgument, match=r"none of them.* or name its journal: before version 2 files had no digest"
    ):
        read_spent([path])
    for other in (signed({"schema": 1, "ledger": inside}), signed({"schema": RECORD.schema, "ledger": inside}), [3]):
        path.write_text(json.dumps(other))
        with pytest.raises(InvalidArgument):
            read_spent([path])
    path.write_text(search_cases.RECORD.to_json())
    with pytest.raises(InvalidArgument, match="the record of a search"):  # whose cost is no sum over events
        read_spent([path])
    assert read_cost(path) == search_cases.RECORD
