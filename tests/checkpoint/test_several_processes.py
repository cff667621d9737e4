"""Checkpoints of several processes: any other number goes on as one would have, and no crash loses accounting."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_jobs
import pytest
import torch
from checkpoint_jobs import PLAN, read, start, train
from jobs import data, params
from run_cases import folders
from workers import outcomes, run

from dpfunc import Ledger, load, state
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.errors import CheckpointError


def close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


@pytest.fixture(autouse=True)
def another_process():
    """What one process of a test released is not known to the next one."""
    state._runs.clear()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(tmp_path_factory.mktemp("one"), "alone", 8)


def moved(folder):
    """The folder in another place: a copy would not go on beside the run itself."""
    return folder.rename(folder.with_name(f"{folder.name}-moved"))


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory):
    """Four steps of four processes that hold parts of all parameters (of one, the fourth process holds nothing)."""
    folder = tmp_path_factory.mktemp("four")
    run(4, "checkpoint_jobs:train", folder, "rows", 4, False, 4)
    return moved(folder)


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """Six steps of two processes, saved after three; and what each released."""
    folder = tmp_path_factory.mktemp("two")
    found = run(2, "checkpoint_jobs:train", folder, "rows", 6, False, 3)
    return moved(folder), found


def copied(source, target):
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


@pytest.mark.parametrize(("size", "kind"), [(1, "alone"), (2, "replicas"), (3, "rows"), (4, "rows")])
def test_saved_by_four_and_loaded_by_any(saved_by_four, uninterrupted, tmp_path, size, kind):
    """Parts become other parts, or whole; four noisy steps of Adam later all is as it would have been."""
    folder = copied(saved_by_four, tmp_path)
    job = (folder, kind, 8, True)
    found = [train(*job)] if kind == "alone" else run(size, "checkpoint_jobs:train", *job)
    for values, ledger, first, _ in found:
        close(values, uninterrupted[0])
        assert (ledger, first) == (uninterrupted[1], (4, 4))
    assert journal_ledger(folder / "journal.jsonl").to_json() == uninterrupted[1]


def test_the_state_of_noise_is_laid_out_anew(tmp_path):
    """Saved in parts by two, loaded by one: the noise of the last step is what it was."""
    expected = checkpoint_jobs.train_remembering(tmp_path / "one", "alone", 8)
    state._runs.clear()
    run(2, "checkpoint_jobs:train_remembering", tmp_path, "rows", 4, False, 4)
    found = checkpoint_jobs.train_remembering(tmp_path, "alone", 8, True)
    close(found[0], expected[0])
    assert found[1:3] == (expected[1], (4, 4))


@pytest.mark.parametrize("kind", ["grid", "hybrid"])
def test_two_dimensions(saved_by_four, tmp_path, kind):
    """Four processes as two by two: everything comes back as its parameter is sharded, moments too."""
    folder = copied(saved_by_four, tmp_path)
    values, moment, _ = read(copied(folder, tmp_path / "alone"), "alone")
    for theirs, its_moment, alike in run(4, "checkpoint_jobs:read", folder, kind):
        assert alike
        assert torch.equal(its_moment, moment)
        assert all(torch.equal(theirs[name], value) for name, value in values.items())


def test_parts_of_fsdp_and_tensor_parallelism_together(tmp_path):
    assert run(4, "checkpoint_jobs:strided", tmp_path) == [True] * 4
    expected = {name: p for name, p in params().items() if name.startswith("in.")}
    options = {"params": expected, "plan": PLAN, "data": "d", "journal": tmp_path / "journal.jsonl"}
    found = load(tmp_path, **options).params
    assert all(torch.equal(found[name], p) for name, p in expected.items())


def test_the_same_layout_repeats_bit_for_bit(cut_off, tmp_path):
    """Steps after the checkpoint are repeated, not paid again."""
    folder, first = cut_off
    again = run(2, "checkpoint_jobs:train", copied(folder, tmp_path), "rows", 8, True)
    for (_, _, _, released), (_, ledger, at, repeated) in zip(first, again, strict=True):
        assert at == (3, 6)
        assert all(torch.equal(a, b) for a, b in zip(released[3:], repeated[:3], strict=True))
        assert ledger == PLAN.ledger().to_json()


def test_parts_of_all_processes_are_repeated(cut_off, tmp_path):
    """The digest of a release is that of all parts: what only the second process holds is seen by the first."""
    copied(cut_off[0], tmp_path)
    before = journal_ledger(tmp_path / "journal.jsonl")
    assert run(2, "checkpoint_jobs:odd_part", tmp_path) == [("StateReused", 1)] * 2
    assert journal_ledger(tmp_path / "journal.jsonl") == before


def test_other_layouts_pay_again(cut_off, tmp_path):
    """Two processes released more than they saved: one process gets new noise for those steps, and pays."""
    copied(cut_off[0], tmp_path)
    first = cut_off[1][0]
    with pytest.raises(CheckpointError, match=r"data processes: saved 2, now 1.*Steps 3 to 5.*recharge=True"):
        train(tmp_path, "alone", 8, True)
    _, ledger, at, drawn = train(tmp_path, "alone", 8, True, recharge=True)
    assert at == (3, 3)
    assert (
        Ledger.from_json(ledger) == PLAN.ledger(6).compose(PLAN.ledger(5)) == journal_ledger(tmp_path / "journal.jsonl")
    )
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(first[3][3:], drawn, strict=False))


def test_the_script_of_the_guide_runs(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "guides" / "sharded_checkpoints.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert [first for first, _, _ in run(2, "checkpoint_jobs:guide", code, tmp_path, 12)] == [0, 0]
    found = run(2, "checkpoint_jobs:guide", code, tmp_path, 99)
    for first, ledger, values in found:
        assert first == 10
        assert Ledger.from_json(ledger).num_steps == 20
        assert all(torch.equal(value, found[0][2][name]) for name, value in values.items())


ERRORS = [("tensors", 1, "fails"), ("part", 1, "fails"), ("part", 0, "fails"), ("commit", 0, "fails"), ("rename", 0, "fails")]  # fmt: skip


def newest(folder):
    values, ranks, _ = start("alone")
    options = {"plan": PLAN, "data": data(), "params": values, "ranks": ranks, "journal": folder / "journal.jsonl"}
    return load(folder / "c", **options)


def test_an_error_while_saving(tmp_path):
    """All processes hear of it, the old checkpoint stays the newest, and nothing is left behind."""
    found = run(2, "checkpoint_jobs:trouble_while_saving", tmp_path, ERRORS)
    for (moment, rank, _), *errors in zip(ERRORS, *found, strict=True):
        assert "no space left" in errors[rank], moment
        assert errors[1 - rank].startswith(("CheckpointError: ", "NotWritten: ")), moment
    assert newest(tmp_path).extra == {"number": 0}
    assert [path.name for path in folders(tmp_path / "c")] == ["step-00000000.000"]


@pytest.mark.parametrize("what", ["parameter", "copy", "moment", "step", "plan", "unsupported"])
def test_processes_that_differ_save_nothing(tmp_path, what):
    found = run(2, "checkpoint_jobs:differing", tmp_path, what)
    kinds = [text.partition(":")[0] for text in found]
    named = {"parameter": "params/in.bias", "copy": "params/in.bias", "moment": "optimizer_state/0"}
    if what in ("unsupported", "plan"):  # of another plan than the state is
        assert kinds == ["CheckpointError", "InvalidArgument"]
    else:
        assert kinds == ["RankMismatch", "RankMismatch"]
        assert all(f"disagree about {named.get(what, 'state.json')}" in text for text in found)
    assert not (tmp_path / "c").exists()


def test_what_one_process_refuses_all_refuse(saved_by_four, tmp_path):
    folder = copied(saved_by_four, tmp_path)
    found = run(2, "checkpoint_jobs:refused", folder, "rows", {"data": {"x": torch.zeros(3)}})
    assert found[0].startswith(
        "CheckpointError: No checkpoint was loaded: another process failed; its own error says why."
    )
    assert "Its error: process 1: CheckpointError" in found[0]
    assert "belongs to another data set" in found[1]
    file = next((folder / "c").glob("step-*/__3_0.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    found = run(2, "checkpoint_jobs:refused", folder, "replicas", {})
    assert all("is missing or was changed" in text for text in found)
    assert sorted("another process failed" in text for text in found) == [False, True]
    assert all(text.startswith("CheckpointError") for text in found)


def test_parts_without_ranks_are_refused(tmp_path):
    """One process would write, or read, its own parts only."""
    for errors in run(2, "checkpoint_jobs:without_ranks", tmp_path):
        assert all(error.startswith("InvalidArgument: Expected ranks with tensors") for error in errors)
    assert not (tmp_path / "c").exists()


SCRIPT = Path(checkpoint_jobs.__file__)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run of two processes of which nothing is left but its files, and how many steps were seen."""
    place = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(place), str(rank), "2"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        for _ in range(3):
            assert children[0].stdout.readline().strip().isdigit()
        time.sleep(0.002)
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
    seen = 3 + len(children[0].communicate()[0].splitlines())
    children[1].communicate()
    assert journal_ledger(place / "journal.jsonl").num_steps >= seen
    return moved(place), seen


@pytest.mark.parametrize("again", [2, 1])
def test_kill_loses_no_accounting(killed, tmp_path, again):
    """kill -9 of all processes in the middle of a run; then as many as before repeat, or fewer pay again."""
    copied(killed[0], tmp_path)
    spent = journal_ledger(tmp_path / "journal.jsonl")
    if again == 2:
        for _, ledger, (_, charged), _ in run(2, "checkpoint_jobs:train", tmp_path, "rows", 8, True):
            assert charged >= killed[1]
            assert ledger == PLAN.ledger().to_json()
    else:
        (_, ledger, (step, _), _) = train(tmp_path, "alone", 8, True, recharge=True)
        assert Ledger.from_json(ledger) == spent.compose(Ledger(PLAN.events(step, 8), PLAN.adjacency))
        assert Ledger.from_json(ledger).num_steps >= 8
    assert journal_ledger(tmp_path / "journal.jsonl").to_json() == ledger


def test_a_crash_while_saving(tmp_path):
    """kill -9 of one process is an error of the other, and the old checkpoint stays the newest. (Last: ends workers.)"""
    alive, dead = outcomes(2, "checkpoint_jobs:trouble_while_saving", tmp_path, [("tensors", 1, "killed")])
    assert dead.died
    assert alive.error or "Error" in alive.value[0]
    assert newest(tmp_path).extra == {"number": 0}
    (left,) = folders(tmp_path / "c")  # process 0 cleaned up
    assert left.name == "step-00000000.000"
