"""A write-ahead ledger: each step is on disk before its gradients are seen, so that a crash loses no accounting."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dpfunc.accounting import Ledger
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import fingerprint
from dpfunc.state import StepState
from dpfunc.types import Adjacency, Event


class Taken(NamedTuple):
    """A step that was taken: what it cost, and a digest of what it released."""

    adjacency: Adjacency
    events: tuple[Event, ...]
    release: str


@dataclass
class Seen:
    """How far a journal was read, and what each step in it released."""

    inode: int = 0
    offset: int = 0
    releases: dict[tuple[str, int], str] = field(default_factory=dict)

    def read(self, file: BinaryIO, path: Path) -> None:
        """Read the lines that are new, or all of another file."""
        inode = os.fstat(file.fileno()).st_ino
        if inode != self.inode or file.seek(0, os.SEEK_END) < self.offset:
            self.inode, self.offset, self.releases = inode, 0, {}
        file.seek(self.offset)
        complete = file.read().rpartition(b"\n")[0]
        for run, step, taken in _lines(complete, path):
            self.releases.setdefault((run, step), taken.release)
        self.offset += len(complete) + 1 if complete else 0


@dataclass(frozen=True)
class Journal:
    """A file that gets one line for each step, on disk before the step returns; for `make_dp_step(..., journal=...)`.

    Args:
        path: the file; made with its folders when missing, appended to otherwise. One process of a run writes it.
        plan: the plan of the run.

    A line that was cut off by a crash is a step whose gradients nobody saw; it is removed before the next one.
    It holds public facts only: step numbers, events, a digest of what was released, and a fingerprint of the run's key.

    Raises:
        CheckpointError: when a step is written, if the file has that step of the run with another release.

    Guarantees:
        a process killed at any moment has journalled every step it released
        (tests/test_checkpoint.py::test_kill_loses_no_accounting); no step is released twice with other values, by
        whatever processes (tests/test_released_once.py::test_a_key_begins_one_run, test_a_step_is_released_once).

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

    path: Path | str
    plan: Plan
    _seen: Seen = field(default_factory=Seen, repr=False, compare=False)

    @property
    def file(self) -> Path:
        """The path of the file."""
        return Path(self.path)

    def __call__(self, after: StepState) -> None:
        """Append the step that leads to `after`, and wait until it is on disk."""
        step = after.step - 1
        events = [[e.sampling_prob, e.noise_multiplier, e.num_steps] for e in self.plan.events(step, step + 1)]
        run, release = fingerprint(after.key), dict(after.released).get(step, "")
        line = {
            "run": run, "step": step, "adjacency": self.plan.adjacency, "events": events, "release": release
        }  # fmt: skip
        append_line(self.file, json.dumps(line), partial(self._check, run, step, release))

    def _check(self, run: str, step: int, release: str, file: BinaryIO) -> None:
        """No other release of this step is in the file, whoever wrote it."""
        self._seen.read(file, self.file)
        if self._seen.releases.get((run, step), release) != release:
            raise CheckpointError(
                f"The journal {self.path} has step {step} of this run, which released other values: the same noise "
                "would be used twice. Resume the run from its checkpoint, with journal= and nothing changed, or take a "
                "new key from dpfunc.secure_key(). Nothing was released."
            )


def append_line(path: Path, line: str, check: Callable[[BinaryIO], None] | None = None) -> None:
    """Append a line and sync it; an incomplete last line is cut off first.

    Args:
        path: of the file. line: without its end. check: looks at the file while no other process may write it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        if check is not None:
            check(file)
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


def read_steps(path: Path | str) -> dict[str, dict[int, Taken]]:
    """What each run in a journal has taken: run -> step -> `Taken`. A repeated step counts once.

    Raises:
        CheckpointError: a complete line that cannot be read.
    """
    runs: dict[str, dict[int, Taken]] = {}
    path = Path(path)
    if not path.exists():
        return runs
    for run, step, taken in _lines(path.read_bytes().rpartition(b"\n")[0], path):
        runs.setdefault(run, {}).setdefault(step, taken)
    return runs


def _lines(complete: bytes, path: Path) -> Iterator[tuple[str, int, Taken]]:
    """(run, step, what it took) of each line."""
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            values = json.loads(line)
            events = tuple(Event(q, sigma, steps) for q, sigma, steps in values["events"])
            yield values["run"], int(values["step"]), Taken(values["adjacency"], events, str(values["release"]))
        except KeyError as error:
            raise CheckpointError(f"Line {number} of the journal {path} cannot be read: it lacks {error}.") from error
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"Line {number} of the journal {path} cannot be read: {error}.") from error


def journal_ledger(path: Path | str) -> Ledger:
    """All that the runs in a journal have spent, even when no checkpoint is left.

    Raises:
        LedgerConflict: runs of different adjacency.
        CheckpointError: a line that cannot be read.
    """
    ledgers = [Ledger(taken.events, taken.adjacency) for run in read_steps(path).values() for taken in run.values()]
    return Ledger() if not ledgers else ledgers[0].compose(*ledgers[1:])
