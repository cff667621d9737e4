"""The directory of a run's checkpoints: nothing is overwritten, kills do no harm, and what is damaged says so."""

from __future__ import annotations

import itertools
import os
import shutil
import stat

import pytest
from kills import forked
from run_cases import DATA, PLAN, folders, rewrite, start, steps, store

from dpfunc import load
from dpfunc._utils.locks import in_use, lock
from dpfunc.checkpoint import folder, saving
from dpfunc.errors import CheckpointError
from dpfunc.state import allow_repeat


class Place:
    """A directory, and a run before its first step that is saved there again and again."""

    def __init__(self, path):
        self.path, (self.state, self.values, self.optimizer) = path, start()

    def save(self, **changes):
        return store(self.path, **{"state": self.state, "values": self.values, "optimizer": self.optimizer, **changes})

    def load(self):
        return load(self.path, plan=PLAN, params=self.values, data=DATA, without_journal="new_key", later_runs="ignore")

    def folders(self):
        return folders(self.path)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.mark.parametrize("later", [0, 4])
def test_the_directory_of_another_run_is_refused(place, later):
    """The next load could resume that run, and a save would remove it; nothing is written or removed."""
    kept = place.save(state=steps(place.state, place.values, place.optimizer, 3))
    other, values, optimizer = start()
    with pytest.raises(CheckpointError, match="found step-00000003.000 of another run"):
        place.save(state=steps(other, values, optimizer, later), values=values)
    assert place.folders() == [kept]


def test_two_runs_begin_in_one_directory_at_one_moment(place, monkeypatch):
    """Neither has seen the other when its save began: the second one to end is refused, and removes nothing."""
    other, values, optimizer = start()
    real, kept = saving._list_own_files, []

    def meanwhile(work, group):
        monkeypatch.undo()
        kept.append(place.save())
        real(work, group)

    monkeypatch.setattr(saving, "_list_own_files", meanwhile)
    with pytest.raises(CheckpointError, match="found step-00000000.000 of another run"):
        place.save(state=other, values=values, optimizer=optimizer, keep=1)
    assert place.folders() == kept
    assert folder.newest_key(place.path) == place.state.key


def test_one_process_at_a_time_adds_a_checkpoint(place, monkeypatch):
    """From the look at what is there to the removal of what is old."""
    found, free = [], folder.free_name

    def named(parent, step):
        with open(parent / "resumed.jsonl", "rb") as file:
            found.append(lock(file.fileno(), wait=False))
        return free(parent, step)

    monkeypatch.setattr(folder, "free_name", named)
    place.save()
    assert found == [False]


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_saved_last_is_there(place, keep):
    """Also when a step is saved again and again, and earlier names are free again; the last save counts, not the step."""
    for number in range(6):
        path = place.save(keep=keep, extra={"number": number})
        saved = place.load()
        assert saved.path == path
        assert saved.extra == {"number": number}
    place.save(state=steps(place.state, place.values, place.optimizer, 3), keep=keep)
    path = place.save(state=allow_repeat(place.state), keep=keep)
    assert (place.load().path, place.load().state.step) == (path, 0)
    assert len(place.folders()) == keep


def test_nothing_is_overwritten(place):
    """A step that is saved again gets another name, also when its older checkpoint is removed."""
    first = place.save()
    before = {file.name: file.read_bytes() for file in first.iterdir()}
    second = place.save()
    assert second != first
    assert {file.name: file.read_bytes() for file in first.iterdir()} == before
    third = place.save(keep=1)
    assert third not in (first, second)
    assert place.folders() == [third]


def test_the_key_is_for_the_owner_only(place):
    path = place.save()
    assert all(file.stat().st_mode & 0o077 == 0 for file in (path, *path.iterdir()))
    secret, content = place.state.key.secret, {file.name: file.read_bytes() for file in path.iterdir()}
    assert [n for n, text in content.items() if secret in text or secret.hex().encode() in text] == ["state.json"]


def test_a_kill_while_an_old_checkpoint_is_removed(place):
    """Or at any other change of a file in a save: what a load finds is whole, and the next save removes the rest."""
    place.save(keep=1)
    for number in itertools.count(1):
        before = place.load().extra
        done = forked(lambda told, n=number: place.save(keep=1, extra={"n": n}) and None, number, seed=number)
        assert done.error == ""
        assert place.load().extra in (before, {"n": number})
        if not done.killed:
            break
        last = place.save(keep=1, extra=place.load().extra)
        assert place.folders() == [last], "what the kill left is swept"
    assert number > 40
    assert place.load().extra == {"n": number}


def test_what_killed_saves_left_is_swept(place):
    """It can hold the key of a run, also of another one; what another process writes now stays."""
    assert forked(lambda told: place.save() and None, 8).killed
    (left,) = place.path.glob(".saving-*")
    other, values, optimizer = start()
    busy = place.path / ".saving-busy"
    busy.mkdir()
    with in_use(busy):
        saved = place.save(state=other, values=values, optimizer=optimizer)
    assert not left.exists()
    assert place.folders() == sorted([busy, saved])


FILES = ["state.json", "plan.json", "manifest.json", ".metadata", "__0_0.distcp", "part-0.json"]


@pytest.mark.parametrize("lost", FILES)
def test_half_a_checkpoint_is_passed_over(place, caplog, lost):
    """Somebody lost a file of it; the journal has its steps, so nothing is lost with it. The next save removes it."""
    whole, half = place.save(), place.save()
    (half / lost).unlink()
    assert place.load().path == whole
    assert f"{half} is not complete and is passed over" in caplog.text
    last = place.save()
    assert last.name > half.name
    assert place.folders() == [whole, last]
    for path in place.folders():
        (path / lost).unlink()
    with pytest.raises(CheckpointError, match="found none. What is there is not complete: step-00000000.000, step-"):
        place.load()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["changed", "short"])
def test_damage_is_found(place, name, damage):
    file = place.save() / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "changed" else content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="changed after it was saved|What is there is not complete"):
        place.load()


LISTS = {
    "truncated list": ('{"plan.json": "ab', "was changed after it was saved: it cannot be read: Unterminated"),
    "empty list": ("{}", "was changed after it was saved"),
    "list": ("[1]", "was changed after it was saved"),
    "numbers": ('{"state.json": 1, "plan.json": 2}', "was changed"),
    "elsewhere": ('{"state.json": "", "plan.json": "", "../x": ""}', "was changed"),
    "no parameters": ('{"state.json": "", "plan.json": ""}', "was changed after it was saved: it is no list"),
    "deep list": ("[" * 100_000, "was changed after it was saved: it cannot be read: its values are nested too deeply"),
    "no text": ("\udcff", "was changed after it was saved: it cannot be read: "),
}


@pytest.mark.parametrize(("text", "message"), LISTS.values(), ids=LISTS)
def test_a_damaged_list_of_files_says_so(place, text, message):
    (place.save() / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=f"manifest.json {message}"):
        place.load()


@pytest.mark.parametrize("text", ["{}", "[]", '{"key": "zz"}', '{"key": "00"}'])
def test_a_state_without_a_key_says_so(place, text):
    (place.save() / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="has no key of a run, or no number of notes. Restore it; or move the"):
        place.save()


@pytest.mark.parametrize(("file", "name"), [("state.json", "charged"), ("plan.json", "delta")])
def test_a_name_that_occurs_twice_is_refused(place, file, name):
    """Readers would differ in which of the values counts; a manifest that fits does not help."""
    path = place.save()
    changed = (path / file).read_text().replace(f'"{name}":', f'"{name}": 0,\n "{name}":', 1)
    rewrite(path, file, changed.encode())
    with pytest.raises(CheckpointError, match=f"{file} .*: it cannot be read: the name '{name}' occurs twice"):
        place.load()


@pytest.mark.parametrize("stray", ["step-x", "step-00000003.backup", "step-9", "step-00000001.000.old", "step-."])
def test_stray_folders_are_left_alone(place, stray):
    shutil.copytree(place.save(), place.path / stray)
    last = [place.save(keep=1) for _ in range(3)][-1]
    assert place.load().path == last
    assert place.folders() == sorted([place.path / stray, last])


def test_folders_are_synced(place, monkeypatch):
    """Not only files: a power failure must not lose the name of a checkpoint either."""
    synced, real = [], os.fsync

    def fsync(handle):
        synced.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    place.save()
    assert synced[-1]
    assert sum(synced) >= 2
