"""Checkpoints of one process, and the journal: atomic, bit-identical on resume, and epsilon never shrinks."""

from __future__ import annotations

import collections
import enum
import json
import os
import pickle
import shutil
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import linear_loss, params
from noise_cases import remembering
from run_cases import DATA, PLAN, folders, start, steps, store

import dpfunc
from dpfunc import clipping, sampling
from dpfunc._utils.locks import in_use
from dpfunc.accounting import Ledger
from dpfunc.batches import take
from dpfunc.checkpoint import load, save, saving
from dpfunc.checkpoint.chain import head_path
from dpfunc.checkpoint.folder import sha256
from dpfunc.checkpoint.journal import Journal, journal_ledger, read_steps
from dpfunc.errors import BudgetExhausted, CheckpointError, InvalidArgument, StateReused
from dpfunc.plan import Plan
from dpfunc.state import replay
from dpfunc.step import DPStep, make_dp_step
from dpfunc.types import Event


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
    again = steps(saved.state, fresh, other, 5, journal)
    assert all(torch.equal(values[name], fresh[name]) for name in values)
    assert again == state._replace(journal=str(journal.path), journal_lines=8)


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
    assert saved.state.step == 2
    assert saved.state.charged == 6
    assert saved.state.ledger == state.ledger == journal_ledger(journal.path)
    resumed = steps(saved.state, values, optimizer, 5, journal)  # four repeated at no cost, one new
    assert resumed.ledger == Ledger((Event(0.3, 1.0, 7),))
    assert journal_ledger(journal.path) == resumed.ledger


def same(found, expected):
    pairs = zip(found["previous"].items(), expected["previous"].items(), strict=True)
    return found["steps"] == expected["steps"] and all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)


def test_noise_with_a_state_is_resumed_bit_for_bit(tmp_path, monkeypatch):
    """The noise of each step depends on that of the one before, also of the one before the checkpoint."""
    monkeypatch.setattr(DPStep, "_mechanism", lambda self, step: remembering(self.plan.noise_multiplier))
    journal = Journal(tmp_path / "journal.jsonl", PLAN)
    state, values, optimizer = start()
    assert state.noise_state["steps"] == 0
    state = steps(state, values, optimizer, 3, journal)
    path = store(tmp_path / "c", state, values, optimizer, journal=journal.path)
    assert all(file.stat().st_mode & 0o077 == 0 for file in path.iterdir())
    before = state.noise_state
    assert "noise_state=hidden" in repr(state)
    state = steps(state, values, optimizer, 5, journal)
    options = {"plan": PLAN, "params": values, "data": DATA}
    saved = load(tmp_path / "c", journal=journal.path, **options)
    assert same(saved.state.noise_state, before)
    with torch.no_grad():
        for name, p in values.items():
            p.copy_(saved.params[name])
    forgotten = saved.state._replace(noise_state=start()[0].noise_state)
    with pytest.raises(StateReused, match="with other values"):
        steps(forgotten, {n: p.clone() for n, p in values.items()}, optimizer, 1, journal)
    optimizer.load_state_dict(dict(saved.optimizer_state))
    again = steps(saved.state, values, optimizer, 5, journal)
    assert (again.ledger, again.step) == (state.ledger, 8)
    assert same(again.noise_state, state.noise_state)
    with pytest.raises(CheckpointError, match="its noise is correlated over steps"):
        load(tmp_path / "c", without_journal="new_key", **options)
    with pytest.raises(InvalidArgument, match="Expected noise_state to have tensors.*type builtin_function"):
        store(tmp_path / "c", state._replace(noise_state=[len]), values, optimizer)


def test_states_of_all_kinds_come_back_as_they_were(tmp_path):
    kinds = [
        collections.Counter({3: 2}), collections.OrderedDict(b=1, a=2), (1, (2.5, None)), {1, 2}, torch.Size([2, 3]), 1 - 2j,
        b"\xff", torch.bfloat16, torch.device("cpu"), float("inf"), -0.0, True, {(0, "x"): [{}]},
    ]  # fmt: skip
    tensors = (torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16))
    state, values, optimizer = start()
    store(tmp_path, state, values, optimizer, optimizer_state={"kinds": kinds, 3: tensors})
    found = load(tmp_path, **again(values)).optimizer_state
    assert list(found) == ["kinds", 3]
    assert repr(found["kinds"]) == repr(kinds)
    assert [type(value) for value in found["kinds"]] == [type(value) for value in kinds]
    assert type(found[3]) is tuple
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found[3], tensors, strict=True))


@pytest.mark.parametrize("lost", ["missing", "missing with its head", "empty", "short"])
def test_a_journal_that_lacks_steps_is_refused(tmp_path, lost):
    """It cannot say what was released after the checkpoint."""
    journal = Journal(tmp_path / "journal.jsonl", PLAN)
    state, values, optimizer = start()
    store(tmp_path / "c", state, values, optimizer, journal=journal.path)
    assert load(tmp_path / "c", plan=PLAN, params=values, data=DATA, journal=journal.path).state.step == 0
    state = steps(state, values, optimizer, 3, journal)
    store(tmp_path / "c", state, values, optimizer)
    lines = journal.path.read_text().splitlines(keepends=True)
    journal.path.unlink()
    if not lost.startswith("missing"):
        journal.path.write_text("" if lost == "empty" else "".join(lines[:2]))
    if lost == "missing with its head":
        head_path(journal.path).unlink()
    messages = {
        "missing": "Expected 3 lines in the journal .* got 0: line 1",
        "missing with its head": "Expected a journal with at least one step, got .*, which is no file",
        "empty": "Expected 3 lines in the journal .* got 0: line 1",
        "short": "Expected 3 lines in the journal .* got 2: line 3",
    }
    with pytest.raises(CheckpointError, match=messages[lost]):
        load(tmp_path / "c", plan=PLAN, params=values, data=DATA, journal=journal.path)


def test_budget_holds_after_resume(tmp_path):
    state, values, optimizer = start()
    state = steps(state, values, optimizer, 8)
    store(tmp_path, state, values, optimizer)
    saved = load(tmp_path, **again(values))
    with pytest.raises(BudgetExhausted):
        make_dp_step(linear_loss, PLAN, verify_batch=False)(values, take(DATA, torch.arange(3)), saved.state)


def changed_data():
    data = {name: value.clone() for name, value in DATA.items()}
    data["head.weight"][59, 3] += 1e-3
    return data


def again(values):
    """Arguments of `load` for a run without a journal."""
    return {"plan": PLAN, "params": values, "data": DATA, "without_journal": "new_key"}


REFUSALS = {
    "plan": (
        {"plan": Plan(sampling.Poisson(60, 0.3), clipping.Flat(1.0), noise_multiplier=0.9, num_steps=8, delta=1e-3)},
        r"another plan: plan.noise_multiplier: saved 1.0, now 0.9",
    ),
    "sampler": (
        {"plan": Plan(sampling.Poisson(60, 0.2), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=8, delta=1e-3)},
        r"plan.sampler.sampling_prob: saved 0.3, now 0.2",
    ),
    "data": ({"data": changed_data()}, r"another data set"),
    "fewer data": ({"data": take(DATA, torch.arange(59))}, r"another data set"),
    "parameters": (
        {"params": {**params(), "head.weight": torch.zeros(5)}},
        r"another parameter set: head.weight: saved float32 \(4,\), now float32 \(5,\)",
    ),
    "missing parameter": ({"params": {"head.weight": torch.zeros(4)}}, r"body.a.bias: saved float32 \(3,\), now absent"),
    "dtype": ({"params": params(torch.float64)}, r"saved float32 \(3,\), now float64 \(3,\)"),
    "optimizer": ({"optimizer_state": {"state": {}, "param_groups": []}}, "Expected optimizer_state to have"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_another_run_is_refused_with_the_difference(tmp_path, name):
    state, values, optimizer = start()
    store(tmp_path, steps(state, values, optimizer, 1), values, optimizer)
    changes, message = REFUSALS[name]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, **{"plan": PLAN, "params": values, "data": DATA, "without_journal": "new_key", **changes})


@pytest.mark.parametrize("later", [0, 4])
def test_the_directory_of_another_run_is_refused(tmp_path, later):
    """The next load could resume that run, and a save would remove it; nothing is written or removed."""
    state, values, optimizer = start()
    kept = store(tmp_path, steps(state, values, optimizer, 3), values, optimizer)
    other, values, optimizer = start()
    other = steps(other, values, optimizer, later)
    with pytest.raises(CheckpointError, match="found step-00000003.000 of another run"):
        store(tmp_path, other, values, optimizer)
    assert folders(tmp_path) == [kept]


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_saved_last_is_there(tmp_path, keep):
    """Also when a step is saved again and again, and earlier names are free again."""
    state, values, optimizer = start()
    for number in range(6):
        path = store(tmp_path, state, values, optimizer, keep=keep, extra={"number": number})
        saved = load(tmp_path, **again(values))
        assert saved.path == path
        assert saved.extra == {"number": number}
    assert len(folders(tmp_path)) == keep


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_went_back_is_loaded_where_it_went(tmp_path, keep):
    """The last save counts, not the highest step."""
    first, values, optimizer = start()
    later = steps(first, values, optimizer, 3)
    store(tmp_path, later, values, optimizer, keep=keep)
    path = store(tmp_path, replay(first), values, optimizer, keep=keep)
    saved = load(tmp_path, **again(values))
    assert (saved.path, saved.state.step) == (path, 0)
    assert len(folders(tmp_path)) == keep


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": 0}, "integer keep >= 1"),
        ({"keep": True}, "integer keep >= 1"),
        ({"optimizer_state": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, "Expected the result of optimizer.state_dict"),
        ({"extra": {"a": torch.zeros(1)}}, "Expected extra to hold JSON values"),
        ({"data": 5}, "Expected data to be a pytree of tensors"),
    ],
)
def test_what_cannot_be_saved(tmp_path, changes, message):
    state, values, optimizer = start()
    with pytest.raises(InvalidArgument, match=message):
        store(tmp_path, state, values, optimizer, **changes)
    assert not list(tmp_path.iterdir())


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="found none. Start a new run"):
        load(tmp_path, plan=PLAN, params=params(), data=DATA, without_journal="new_key")


def test_unfinished_saves_are_ignored_and_old_ones_removed(tmp_path):
    state, values, optimizer = start()
    paths = []
    for _ in range(4):
        state = steps(state, values, optimizer, 1)
        paths.append(store(tmp_path, state, values, optimizer, keep=2))
    assert [path.exists() for path in paths] == [False, False, True, True]
    (tmp_path / ".saving-abc").mkdir()
    (tmp_path / "step-00000099.000").mkdir()  # no manifest: never finished
    assert load(tmp_path, **again(values)).path == paths[-1]


def test_nothing_is_overwritten(tmp_path):
    """A step that is saved again gets another name, also when its older checkpoint is removed."""
    state, values, optimizer = start()
    first = store(tmp_path, state, values, optimizer)
    before = {file.name: file.read_bytes() for file in first.iterdir()}
    second = store(tmp_path, state, values, optimizer)
    assert second != first
    assert {file.name: file.read_bytes() for file in first.iterdir()} == before
    assert load(tmp_path, **again(values)).path == second
    third = store(tmp_path, state, values, optimizer, keep=1)
    assert third not in (first, second)
    assert folders(tmp_path) == [third]


def test_the_key_is_for_the_owner_only(tmp_path):
    state, values, optimizer = start()
    path = store(tmp_path, state, values, optimizer)
    assert all(file.stat().st_mode & 0o077 == 0 for file in (path, *path.iterdir()))
    secret = state.key.secret
    content = {file.name: file.read_bytes() for file in path.iterdir()}
    assert [n for n, text in content.items() if secret in text or secret.hex().encode() in text] == ["state.json"]


def test_failed_save_leaves_nothing_behind(tmp_path):
    state, values, optimizer = start()
    with pytest.raises(AttributeError):
        store(tmp_path, state, {**values, "late": object()}, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_line_is_removed(tmp_path):
    journal = Journal(tmp_path / "j.jsonl", PLAN)
    state, values, optimizer = start()
    state = steps(state, values, optimizer, 2, journal)
    with open(journal.path, "a") as file:
        file.write('{"run": "x", "ste')
    assert journal_ledger(journal.path).num_steps == 2
    state = steps(state, values, optimizer, 1, journal)
    assert journal_ledger(journal.path).num_steps == 3
    assert len(journal.path.read_text().splitlines()) == 3


def test_each_step_is_synced_before_it_returns(tmp_path, monkeypatch):
    """Not only written: a power failure must not lose it either."""
    synced = []
    kind = {True: "folder", False: "file"}
    monkeypatch.setattr(
        "dpfunc.checkpoint.chain.os.fsync", lambda handle: synced.append(kind[stat.S_ISDIR(os.fstat(handle).st_mode)])
    )
    journal = Journal(tmp_path / "j.jsonl", PLAN)
    state, values, optimizer = start()
    begun, line, head = ["file", "folder"], ["file"], ["file", "folder"]
    for expected in (begun + line + head, line + head, line + head):
        synced.clear()
        state = steps(state, values, optimizer, 1, journal)
        assert synced == expected


def test_unreadable_line_is_an_error(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_text("{}\n")
    with pytest.raises(CheckpointError, match="Line 1 of the journal"):
        read_steps(path)


def test_journal_of_several_runs_adds_up(tmp_path):
    journal = Journal(tmp_path / "j.jsonl", PLAN)
    for number in range(2):
        state, values, optimizer = start(journal_ledger(journal.path) if number else None)
        steps(state, values, optimizer, 3, journal)
    assert journal_ledger(journal.path).num_steps == 6


def killed(action, calls, number):
    """Run an action in a fork that kills itself before the call of this number; True if it came to that."""
    child = os.fork()
    if child == 0:
        count = [0]

        def counting(real):
            def call(*args, **kwargs):
                count[0] += 1
                if count[0] > number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in calls:
            setattr(os, name, counting(getattr(os, name)))
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def in_order(monkeypatch, reverse):
    """Directories are listed in an order of ours, as a file system may."""
    real = os.scandir

    class Listed(list):
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    def scandir(path="."):
        with real(path) as entries:
            return Listed(sorted(entries, key=lambda entry: entry.name, reverse=reverse))

    monkeypatch.setattr(os, "scandir", scandir)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("number", range(6))
def test_a_kill_while_an_old_checkpoint_is_removed(tmp_path, monkeypatch, number, reverse):
    """Neither a later save nor a load meets the rest of it, whatever file went first."""
    in_order(monkeypatch, reverse)
    state, values, optimizer = start()
    store(tmp_path, state, values, optimizer, keep=1)
    assert killed(
        lambda: store(tmp_path, state, values, optimizer, keep=1, extra={"n": 2}), ("unlink", "rmdir"), number
    )
    saved = load(tmp_path, **again(values))
    assert saved.extra == {"n": 2}
    last = store(tmp_path, state, values, optimizer, keep=1)
    assert folders(tmp_path) == [last], "what the kill left is swept"


FILES = ["state.json", "plan.json", "manifest.json", ".metadata", "__0_0.distcp", "part-0.json"]


@pytest.mark.parametrize("lost", FILES)
def test_half_a_checkpoint_is_passed_over(tmp_path, caplog, lost):
    """Somebody lost a file of it; the journal has its steps, so nothing is lost with it. The next save removes it."""
    state, values, optimizer = start()
    whole = store(tmp_path, state, values, optimizer)
    half = store(tmp_path, state, values, optimizer)
    (half / lost).unlink()
    assert load(tmp_path, **again(values)).path == whole
    assert f"{half} is not complete and is passed over" in caplog.text
    last = store(tmp_path, state, values, optimizer)
    assert last.name > half.name
    assert folders(tmp_path) == [whole, last]
    for path in folders(tmp_path):
        (path / lost).unlink()
    with pytest.raises(CheckpointError, match="found none. What is there is not complete: step-00000000.000, step-"):
        load(tmp_path, **again(values))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["changed", "short"])
def test_damage_is_found(tmp_path, name, damage):
    state, values, optimizer = start()
    file = store(tmp_path, state, values, optimizer) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "changed" else content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="changed after it was saved|What is there is not complete"):
        load(tmp_path, **again(values))


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("evil", [Evil(), {"x": Path("y").exists}])
def test_pickles_are_not_executed(tmp_path, evil):
    state, values, optimizer = start()
    path = store(tmp_path, state, values, optimizer)
    (path / ".metadata").write_bytes(pickle.dumps(evil))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest[".metadata"] = sha256(path / ".metadata")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="Expected a description of tensors"):
        load(tmp_path, **again(values))


def killed_at(action, change):
    """Run an action in a fork, after a change of the fork with which it kills itself somewhere; check that it did."""
    child = os.fork()
    if not child:
        change()
        action()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_kill_while_the_list_of_files_is_written(tmp_path):
    """It is complete or absent: half of it would stop all that comes later."""
    state, values, optimizer = start()
    old = store(tmp_path, state, values, optimizer)

    def change():
        real = os.fsync

        def fsync(handle):
            if Path(os.readlink(f"/proc/self/fd/{handle}")).name.startswith("manifest.json"):
                os.ftruncate(handle, 5)  # what a kill leaves of a write
                os.kill(os.getpid(), signal.SIGKILL)
            real(handle)

        os.fsync = fsync

    killed_at(lambda: store(tmp_path, state, values, optimizer), change)
    assert load(tmp_path, **again(values)).path == old
    last = store(tmp_path, state, values, optimizer, keep=1)
    assert folders(tmp_path) == [last]


def test_a_kill_before_the_name_is_changed(tmp_path):
    """All is on disk under a name that nothing reads: the old one is the newest, and the next save removes the other."""
    state, values, optimizer = start()
    store(tmp_path, state, values, optimizer)

    def change():
        saving.free_name = lambda parent, step: os.kill(os.getpid(), signal.SIGKILL)

    killed_at(lambda: store(tmp_path, state, values, optimizer, extra={"number": 1}), change)
    assert len(list(tmp_path.glob("*/manifest.json"))) == 2
    assert load(tmp_path, **again(values)).extra == {}
    last = store(tmp_path, state, values, optimizer, keep=1)
    assert folders(tmp_path) == [last]


@pytest.mark.parametrize("number", [1, 4, 8])
def test_what_killed_saves_left_is_swept(tmp_path, number):
    """It can hold the key of a run, also of another one; what another process writes now stays."""
    state, values, optimizer = start()
    assert killed(lambda: store(tmp_path, state, values, optimizer), ("fsync", "rename"), number)
    (left,) = tmp_path.glob(".saving-*")
    other, values, optimizer = start()
    busy = tmp_path / ".saving-busy"
    busy.mkdir()
    with in_use(busy):
        saved = store(tmp_path, other, values, optimizer)
    assert not left.exists()
    assert folders(tmp_path) == sorted([busy, saved])


class Mode(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    LOW = 1


UNREADABLE = {
    "rate of numpy": ({"param_groups": [{"lr": np.float64(0.1)}]}, r"\['param_groups'\]\[0\]\['lr'\] of type numpy.float64. Convert it: float\(x\)"),
    "number of numpy": ({"step": np.int64(3)}, r"optimizer_state\['step'\] of type numpy.int64. Convert it: float\(x\) or int\(x\)"),
    "array of numpy": ({"m": np.ones(2)}, r"numpy.ndarray. .*torch.from_numpy"),
    "deque": ({"losses": collections.deque([1.0])}, r"optimizer_state\['losses'\] of type collections.deque. Convert it with list"),
    "enum": ({"mode": Mode.FAST}, r"optimizer_state\['mode'\] of type .*test_one_process.Mode. Store its .value"),
    "number that is an enum": ({"level": Level.LOW}, r"test_one_process.Level. Store its .value"),
    "path": ({"where": Path("x")}, r"optimizer_state\['where'\] of type pathlib"),
    "function": ({"rate": lambda step: 0.1}, r"optimizer_state\['rate'\] of type function"),
    "key of numpy": ({np.int64(3): 1}, r"a key of optimizer_state of type numpy.int64"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_optimizer_state_that_cannot_be_read_is_refused_when_it_is_saved(tmp_path, name):
    content, message = UNREADABLE[name]
    state, values, optimizer = start()
    with pytest.raises(InvalidArgument, match=message):
        store(tmp_path, state, values, optimizer, optimizer_state={"good": torch.ones(2), **content})
    assert not list(tmp_path.iterdir())


def test_schedules_with_rates_of_numpy(tmp_path):
    """A schedule computed with numpy is refused when it is saved; converted, it can be read."""
    state, values, optimizer = start()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(0.5) ** step)
    both = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    with pytest.raises(InvalidArgument, match=r"numpy.float64. Convert it: float\(x\)"):
        store(tmp_path, state, values, optimizer, optimizer_state=both)
    optimizer = torch.optim.Adam(values.values(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(np.float64(0.5) ** step))
    both = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    store(tmp_path, state, values, optimizer, optimizer_state=both)
    found = load(tmp_path, **again(values)).optimizer_state
    assert found["schedule"]["_last_lr"] == schedule.state_dict()["_last_lr"]


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "Adafactor", "LBFGS", "RMSprop", "NAdam"])
def test_states_of_the_optimizers_of_torch(tmp_path, kind):
    state, values, _ = start()
    values = {name: p for name, p in values.items() if p.ndim}
    optimizer = getattr(torch.optim, kind)(values.values(), lr=0.1)
    for p in values.values():
        p.grad = torch.ones_like(p)
    optimizer.step(lambda: torch.zeros(()))
    store(tmp_path, state, values, optimizer)
    saved = load(tmp_path, **again(values))
    assert str(saved.optimizer_state) == str(optimizer.state_dict())


DAMAGED = {
    "truncated list": ("manifest.json", '{"plan.json": "ab', "manifest.json cannot be read: Unterminated"),
    "empty list": ("manifest.json", "{}", "manifest.json was changed after it was saved"),
    "list": ("manifest.json", "[1]", "manifest.json was changed after it was saved"),
    "numbers": ("manifest.json", '{"state.json": 1, "plan.json": 2}', "manifest.json was changed"),
    "elsewhere": ("manifest.json", '{"state.json": "", "plan.json": "", "../x": ""}', "manifest.json was changed"),
    "no parameters": ("manifest.json", None, "manifest.json was changed after it was saved: it is no list"),
    "deep list": ("manifest.json", "[" * 100_000, "manifest.json cannot be read: its values are nested too deeply"),
    "no text": ("manifest.json", "\udcff", "manifest.json cannot be read: "),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_list_of_files_says_so(tmp_path, name):
    file, text, message = DAMAGED[name]
    state, values, optimizer = start()
    path = store(tmp_path, state, values, optimizer)
    if text is None:
        known = json.loads((path / file).read_text())
        text = json.dumps({n: d for n, d in known.items() if n != ".metadata"})
    (path / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=f"{message}.*"):
        load(tmp_path, **again(values))


@pytest.mark.parametrize("stray", ["step-x", "step-00000003.backup", "step-9", "step-00000001.000.old", "step-."])
def test_stray_folders_are_left_alone(tmp_path, stray):
    state, values, optimizer = start()
    shutil.copytree(store(tmp_path, state, values, optimizer), tmp_path / stray)
    last = [store(tmp_path, state, values, optimizer, keep=1) for _ in range(3)][-1]
    assert load(tmp_path, **again(values)).path == last
    assert folders(tmp_path) == sorted([tmp_path / stray, last])


def test_a_state_without_a_key_says_so(tmp_path):
    state, values, optimizer = start()
    path = store(tmp_path, state, values, optimizer)
    for text in ("{}", "[]", '{"key": "zz"}', '{"key": "00"}'):
        (path / "state.json").write_text(text)
        with pytest.raises(
            CheckpointError, match="has no key of a run, or no number of notes. Restore it; or move the folder"
        ):
            store(tmp_path, state, values, optimizer)


def test_names_and_values_of_the_user_may_be_odd(tmp_path):
    """Half a surrogate pair has no UTF-8, and deep values have no end."""
    state, values, optimizer = start()
    store(tmp_path, state, values, optimizer, data="mails \udcff", extra={"note": "\ud800"})
    saved = load(tmp_path, plan=PLAN, params=values, data="mails \udcff", without_journal="new_key")
    assert saved.extra == {"note": "\ud800"}
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidArgument, match="Expected extra to hold JSON values"):
        store(tmp_path, state, values, optimizer, data="mails \udcff", extra={"deep": deep})


def test_public_names_are_the_same_functions():
    assert dpfunc.save is save
    assert dpfunc.load is load
