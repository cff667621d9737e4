"""Scripts that are click commands, run in this process: a process of its own imports for longer than most of them run."""

from __future__ import annotations

import dataclasses
import functools
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner, Result
from safetensors.torch import load_file

from dpfunc.accounting import Ledger
from dpfunc.accounting.record import Record
from dpfunc.checkpoint.journal import journal_ledger


@functools.cache
def names(path: Path) -> SimpleNamespace:
    """The names of a script, of which the functions can be tested."""
    return SimpleNamespace(**runpy.run_path(str(path)))


def ran(path: Path, *arguments: object) -> Result:
    """Exit code and output of a script; an exception that a user would see as a traceback is raised."""
    result = CliRunner().invoke(names(path).main, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def smoke_run(path: Path, folder: Path) -> tuple[Path, str]:
    """A short run in a process of its own: what tests resume, they do not have in memory. Its folder and output."""
    command = [sys.executable, str(path), "--smoke", "--insecure-seed", "5", "--out", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return folder, result.stdout


def written(folder: Path, steps: int) -> tuple[object, ...]:
    """The results of a run, whose files agree; the order of a safetensors header is not one of them."""
    adapter = {name: value.tolist() for name, value in load_file(folder / "adapter.safetensors").items()}
    record = Record.from_json((folder / "privacy_accounting.json").read_text())
    ledger = Ledger.from_json((folder / "ledger.json").read_text())
    assert record.epsilon == ledger.epsilon(record.delta).epsilon <= record.target_epsilon
    assert record.global_step == ledger.num_steps == steps
    assert journal_ledger(folder / "journal.jsonl") == ledger
    return adapter, ledger, dataclasses.replace(record, date="")
