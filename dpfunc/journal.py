"""A write-ahead ledger: each step is on disk before its gradients are seen, so that a crash loses no accounting."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dpfunc.accounting import Ledger
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import fingerprint
from dpfunc.state import StepState
from dpfunc.types import Adjacency, Event


@dataclass(frozen=True)
class Journal:
    """A file that gets one line for each step, on disk before the step returns; for `make_dp_step(..., journal=...)`.

    Args:
        path: the file; made with its folders when missing, appended to otherwise. One process writes it.
        plan: the plan of the run.

    A line that was cut off by a crash is a step whose gradients nobody saw; it is removed before the next one.
    It holds public facts only: step numbers, events, a digest of what was released, and a fingerprint of the run's key.

    Guarantees:
        a process killed at any moment has journalled every step it released
        (tests/test_checkpoint.py::test_kill_loses_no_accounting).

    >>> import tempfile
    >>> import torch
    >>> from dpfunc import clipping, sampling
    >>> from dpfunc.rng import secure_key
    >>> from dpfunc.step import make_dp_step
    >>> plan = Plan(sampling.Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> loss_fn, params = lambda params, batch: (params["w"] * batch).sum(1), {"w": torch.zeros(2)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Journal(Path(folder) / "journal.jsonl", plan)
    ...     result = make_dp_step(loss_fn, plan, journal=journal)(params, torch.ones(10, 2))
    ...     journal_ledger(journal.path)
    Ledger(1 steps, add_remove: (q=0.1, sigma=1) x 1)
    """

    path: Path
    plan: Plan

    def __call__(self, after: StepState) -> None:
        """Append the step that leads to `after`, and wait until it is on disk."""
        step = after.step - 1
        events = [[e.sampling_prob, e.noise_multiplier, e.num_steps] for e in self.plan.events(step, step + 1)]
        run, release = fingerprint(after.key), dict(after.released).get(step, "")
        line = {
            "run": run, "step": step, "adjacency": self.plan.adjacency, "events": events, "release": release
        }  # fmt: skip
        if step == 0:  # a run begins: its key must not have begun another
            self._check_new(run, release)
        append_line(self.path, json.dumps(line))

    def _check_new(self, run: str, release: str) -> None:
        taken = read_steps(self.path).get(run, {})
        if 0 in taken and taken[0].release != release:
            raise CheckpointError(
                f"The journal {self.path} has a run with this key, whose first step released other values: the same "
                "noise would be used twice. Take a new key from dpfunc.secure_key(), or resume the run. Nothing was "
                "released."
            )


def append_line(path: Path, line: str) -> None:
    """Append a line and sync it; an incomplete last line is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with open(path, "a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make new and renamed entries of a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Taken(NamedTuple):
    """A step that was taken: what it cost, and a digest of what it released."""

    adjacency: Adjacency
    events: tuple[Event, ...]
    release: str


def read_steps(path: Path) -> dict[str, dict[int, Taken]]:
    """What each run in a journal has taken: run -> step -> `Taken`. A repeated step counts once.

    Raises:
        CheckpointError: a complete line that cannot be read.
    """
    runs: dict[str, dict[int, Taken]] = {}
    if not path.exists():
        return runs
    complete = path.read_bytes().rpartition(b"\n")[0]
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            values = json.loads(line)
            events = tuple(Event(q, sigma, steps) for q, sigma, steps in values["events"])
            taken = Taken(values["adjacency"], events, str(values["release"]))
            runs.setdefault(values["run"], {}).setdefault(int(values["step"]), taken)
        except KeyError as error:
            raise CheckpointError(f"Line {number} of the journal {path} cannot be read: it lacks {error}.") from error
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"Line {number} of the journal {path} cannot be read: {error}.") from error
    return runs


def journal_ledger(path: Path) -> Ledger:
    """All that the runs in a journal have spent, even when no checkpoint is left.

    Raises:
        LedgerConflict: runs of different adjacency.
        CheckpointError: a line that cannot be read.
    """
    ledgers = [Ledger(taken.events, taken.adjacency) for run in read_steps(path).values() for taken in run.values()]
    return Ledger() if not ledgers else ledgers[0].compose(*ledgers[1:])
