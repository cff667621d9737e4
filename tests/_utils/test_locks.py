"""A folder has one process; a killed one leaves nothing that is in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpfunc._utils.locks import LOCK_FILE, abandoned, in_use, only_process
from dpfunc.checkpoint.chain import locked
from dpfunc.errors import InvalidArgument

HOLD = """
import sys, time
from pathlib import Path
from dpfunc._utils.locks import in_use, only_process
with {kind}(Path({folder!r})):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds a folder, in one of the two ways."""
    started = []

    def start(kind, folder):
        code = HOLD.format(kind=kind, folder=str(folder))
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_one_process_has_a_folder(tmp_path, other):
    folder = tmp_path / "a" / "run"
    process = other("only_process", folder)
    with (
        pytest.raises(InvalidArgument, match=f"got process {process.pid}, which trains there now"),
        only_process(folder),
    ):
        raise AssertionError("two of them")
    assert folder.exists()
    process.communicate(b"")
    assert process.returncode == 0
    assert not list(tmp_path.iterdir()), "what it made, and was empty, is gone"
    with only_process(folder), only_process(folder):  # in a block of the same process
        pass


def test_a_killed_process_has_nothing(tmp_path, other):
    process = other("only_process", tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / LOCK_FILE).exists()
    with only_process(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"
    assert not list(tmp_path.iterdir())


def test_many_processes_take_turns(tmp_path):
    """None has the folder together with another, whoever removes the file when."""
    code = """
import sys
from pathlib import Path
from dpfunc.errors import InvalidArgument
from dpfunc._utils.locks import only_process
folder, number = Path(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
while number < 40:
    try:
        with only_process(folder / "run"):
            (folder / "inside").mkdir()   # an error if another one is inside
            (folder / "inside").rmdir()
            number += 1
    except InvalidArgument:
        pass
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    many = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    for process in many:
        assert process.stdout.readline() == b"ready\n"
    for process in many:
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in many:
        process.communicate(timeout=120)
    assert [process.returncode for process in many] == [0, 0, 0]


def test_a_folder_of_a_process_that_ended_is_abandoned(tmp_path, other):
    process = other("in_use", tmp_path)
    assert not abandoned(tmp_path)
    process.kill()
    process.wait()
    assert abandoned(tmp_path)
    with in_use(tmp_path):
        assert not abandoned(tmp_path)
    assert not abandoned(tmp_path / "missing")


def test_locks_of_windows(tmp_path, monkeypatch):
    """With a stand-in of its module: one byte is locked that no file has, and the position stays."""
    calls, taken = [], [True]

    def locking(handle, mode, size):
        calls.append((os.lseek(handle, 0, os.SEEK_CUR) == 2**40, mode, size))
        if taken and taken.pop():
            raise OSError(13, "Permission denied")

    module = type(sys)("msvcrt")
    module.locking, module.LK_NBLCK = locking, 2
    monkeypatch.setitem(sys.modules, "msvcrt", module)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with locked(tmp_path / "journal.jsonl") as file:
        file.write(b"line\n")
        file.flush()
    assert calls == [(True, 2, 1), (True, 2, 1)]
    assert Path(tmp_path / "journal.jsonl").read_bytes() == b"line\n"
