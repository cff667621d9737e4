"""A write-ahead ledger: each step is on disk before its gradients are returned, so that a crash loses no accounting.

May import: its folder, step and below. Privacy depends on it: yes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

from dpfunc._utils.files import sha256
from dpfunc._utils.validation import checked, refuse, wrong_type
from dpfunc.accounting import Ledger, compose
from dpfunc.accounting.ledger import from_values, to_values
from dpfunc.accounting.record import UNKNOWN
from dpfunc.checkpoint import chain
from dpfunc.checkpoint.not_written import writing
from dpfunc.errors import CheckpointError, LedgerConflict
from dpfunc.types import Adjacency, Event

if TYPE_CHECKING:  # `dpfunc ledger show` reads journals, and must not wait for torch
    from dpfunc.plan import Plan
    from dpfunc.state import StepState


_NOTHING = "Nothing was released and nothing was spent."
_LEDGER = "dpfunc.checkpoint.journal_ledger(path)"


class Taken(NamedTuple):
    """A step that was taken: what it cost, and a digest of what it released."""

    adjacency: Adjacency
    events: tuple[Event, ...]
    release: str
    before: tuple[Event, ...] = ()  # of a run's first step: what its ledger had beside the steps in the journal


@dataclass
class _ReadLines:
    """Position up to which a `Journal` has read its file, which stays the truth, and the steps of each run there."""

    at: chain.Position = field(default_factory=chain.Position)
    runs: dict[str, dict[int, Taken]] = field(default_factory=dict)
    last: str = ""  # the run that wrote the last line

    def read(self, file: BinaryIO, path: Path) -> None:
        """Read the new lines, or all lines of another file, and compare the end with the `.head` file."""
        # the file that was read before, and not shorter now
        same = os.fstat(file.fileno()).st_ino == self.at.inode and file.seek(0, os.SEEK_END) >= self.at.offset
        position, lines = chain.follow(file, path, self.at if same else chain.Position())
        known = self.at.end
        # a copy that was put in its place has at least what was read
        if not same and known.lines and known not in (end for end, _ in lines):
            raise CheckpointError(
                f"Expected the lines that the journal {path} had a step ago, {known.lines} or one more, got another "
                f"file of {len(lines)} in its place: it was removed, restored from an old copy, or belongs to another "
                f"run. {chain.RESTORE} Nothing was released by this step."
            )
        runs, last = (self.runs, self.last) if same else ({}, "")
        last = _add_lines(lines, path, runs) or last
        self.runs, self.last = runs, last
        self.at = position  # at the end: after an interrupt the same lines are read again


@dataclass(frozen=True)
@checked({"path": lambda name, value: Path(value).absolute()})  # wherever the process goes
class Journal:
    """A file that gets one line for each step, on disk before the step returns; for `make_dp_step(..., journal=...)`.

    Args:
        path: the file; made with its folders when missing, appended to otherwise. One process of a run writes it.
        plan: the plan of the run.

    It holds public facts only: step numbers, events, a digest of what was released, and a fingerprint of the run's key.
    A small file beside it (`.head`) says which line is the last: copy and move the two files as a pair. Runs on the
    same records may share one journal, one after the other: each begins with the cost of those before it,
    `dp_step.init(params, key, journal_ledger(path))`.

    Raises:
        NotWritten: when a step cannot be written. Nothing of it was released.
        CheckpointError: the file has that step of the run with another release, or lines are missing or were changed.
        LedgerConflict: the ledger of a run, at its first step, lacks steps of the runs in the file.

    Guarantees:
        a process killed at any moment has journalled every step it released
        (tests/checkpoint/test_several_processes.py::test_kill_loses_no_accounting); no step is released twice with
        other values, by whatever processes (tests/test_state.py::test_a_key_begins_one_run,
        test_a_step_is_released_once); runs in one journal count each other
        (tests/checkpoint/test_journal.py::test_a_run_counts_those_before_it); no line is lost or changed unseen
        (tests/checkpoint/test_chain.py::test_a_lost_or_changed_line_is_detected).

    >>> import dpfunc, tempfile, torch
    >>> poisson, flat = dpfunc.sampling.Poisson(100, 0.1), dpfunc.clipping.Flat(1.0)
    >>> plan = dpfunc.Plan(poisson, flat, noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> loss_fn, params = lambda params, batch: (params["w"] * batch).sum(1), {"w": torch.zeros(2)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Journal(Path(folder) / "journal.jsonl", plan)
    ...     dp_step = dpfunc.make_dp_step(loss_fn, plan, journal=journal)
    ...     state = dp_step.init(params, dpfunc.secure_key())
    ...     result = dp_step(params, torch.ones(100, 2)[next(iter(plan.batches(state)))], state)
    ...     journal_ledger(journal.path)
    Ledger(1 steps, add_remove: (q=0.1, sigma=1) x 1)
    """

    path: Path | str
    plan: Plan
    _known: _ReadLines = field(default_factory=_ReadLines, repr=False, compare=False)

    @property
    def file(self) -> Path:
        """Path of the file, the same wherever the process goes."""
        return Path(self.path)

    def __call__(self, after: StepState) -> None:
        """Append the step that leads to `after`, and wait until it is on disk."""
        from dpfunc.rng import fingerprint
        from dpfunc.state import step_events

        step, run = after.step - 1, fingerprint(after.key)
        events = step_events(self.plan, after, step, after.step)
        taken = Taken(self.plan.adjacency, events, dict(after.released).get(step, ""))
        with writing(self.file, after.ledger, self.plan), chain.locked(self.file) as file:
            self._known.read(file, self.file)
            runs = self._known.runs
            values: dict[str, Any] = {
                "run": run, "step": step, "adjacency": taken.adjacency, "events": _written(events),
                "release": taken.release,
            }  # fmt: skip
            if run in runs:
                self._check(run, step, taken.release)
            else:
                if not after.journal:  # `load` has compared the ledger of a resumed run
                    all_own = taken._replace(events=step_events(self.plan, after, 0, after.step))
                    check_counted(self.file, {**runs, run: {step: all_own}}, after.ledger, unjournalled=step)
                before = after.ledger.beyond(steps_ledger([*runs.values(), {step: taken}]))
                values |= {"before": _written(before.events), "code": _code()}
            # a repeated step costs nothing, whatever was written since; a run that begins was compared above
            written = step in runs.get(run, {}) or (run not in runs and not after.journal)
            others = not after.journal or self._known.at.end.lines > after.journal_lines
            if self._known.last != run and others and not written:  # since its last step, or since `load` compared them
                raise LedgerConflict(
                    f"Expected the runs in the journal {self.file} one after the other, got a step of a run that began "
                    "before another one wrote there: its ledger does not count that one. Begin a new run that counts "
                    f"both, ledger={_LEDGER}, an argument of dp_step.init and of DPTrainer. If they saw other records, "
                    'resume this one, dpfunc.load(..., journal=path, later_runs="ignore"), and give the other a '
                    f"journal of its own. {_NOTHING}"
                )
            chain.append_chained(file, self.file, self._known.at, values)

    def _check(self, run: str, step: int, release: str) -> None:
        """Check that the file has the steps before this one, and no other release of it, whichever process wrote it."""
        known = self._known.runs[run]
        after = max(known) + 1
        next_one = f"Expected step {after} of this run next in the journal {self.file}, got step {step}"
        refuse(
            (step in known and known[step].release != release, CheckpointError(
                f"The journal {self.path} has step {step} of this run, which released other values: the same noise "
                "would be used twice. Resume the run from its checkpoint, with journal= and nothing changed, or "
                "take a new key from dpfunc.secure_key(). Nothing was released.")),
            (step > after, CheckpointError(
                f"{next_one}: steps {after} to {step - 1} were taken without the journal, whose ledger does not count "
                "them. Go on as a new run that counts both, dp_step.init(params, dpfunc.secure_key(), ledger=ledger) "
                "with ledger = dpfunc.checkpoint.journal_ledger(path).compose("
                f"dpfunc.Ledger(plan.events({after}, {step}), plan.adjacency)). {_NOTHING}")),
            (step < after and step not in known, CheckpointError(
                f"{next_one}, which the run took before its first line there: whether it would be repeated with the "
                "same values cannot be known. Resume the run from its newest checkpoint, dpfunc.load(..., "
                "journal=path); or begin a new one with ledger=dpfunc.checkpoint.journal_ledger(path), to which "
                ".compose(dpfunc.Ledger(plan.events(a, b), plan.adjacency)) adds steps a to b - 1 where later ones "
                f"were taken without the journal. {_NOTHING}")),
        )  # fmt: skip


def _code() -> str:
    """SHA-256 of the script that this process runs, by which a result of `dpfunc verify` is known as one of it."""
    file = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
    return "" if file is None or not Path(file).is_file() else sha256(Path(file))


def check_counted(
    path: Path | str, runs: Mapping[str, Mapping[int, Taken]], ledger: Ledger, *, unjournalled: int = 0
) -> None:
    """Check that the ledger of a run that begins has all steps of its journal, beside those before its first line."""
    if not runs:
        return
    wanted = whole_ledger(runs.values())
    lacks = ledger.lacks(wanted)
    if not lacks and ledger.adjacency == wanted.adjacency:
        return
    found = f"one that lacks {lacks}" if lacks else f"adjacency {ledger.adjacency!r}"
    beside = f", beside {unjournalled} of its own that are not there under its key" if unjournalled else ""
    advice = (
        "If its steps are there under a former key, resume the run with its journal, dpfunc.load(..., journal=path): a "
        f"sum counts them twice. If not, begin with ledger={_LEDGER}.compose(state.ledger)"
        if unjournalled
        else f"Costs on the same records add up: begin with ledger={_LEDGER}, an argument of dp_step.init and of "
        "DPTrainer; or go on with the earlier run, dpfunc.load(..., journal=path)"
    )
    raise LedgerConflict(
        f"Expected the ledger of a new run to have all steps of earlier runs in its journal {path}{beside}, got "
        f"{found}. {advice}. A run on other records has a journal, or an output_dir, of its own. {_NOTHING}"
    )


def journal_path(journal: object) -> Path | None:
    """The path of a journal, or None; a journal itself is refused."""
    if journal is None:
        return None
    if not isinstance(journal, (str, os.PathLike)):
        raise wrong_type("the path of a journal", "journal", journal, "Of a Journal pass journal.path.")
    return Path(journal)


def read_steps(
    *paths: Path | str, missing: Literal["refuse", "empty"] = "refuse", known: chain.Head | None = None
) -> dict[str, dict[int, Taken]]:
    """Steps that each run in some journals has taken: run -> step -> `Taken`. A repeated or copied step counts once.

    None is an error, or "empty"; since its end was `known`, when a checkpoint was saved, it may have grown.
    """
    runs: dict[str, dict[int, Taken]] = {}
    for path in map(Path, paths):
        lines = chain.read_chain(path)
        if known is not None:
            _check_known(path, lines, known)
        if not lines and missing == "refuse":
            raise CheckpointError(
                f"Expected a journal with at least one step, got {path}, which "
                f"{'is empty' if path.exists() else 'is no file'}. Name the file that the run was "
                "given as Journal(path, plan); if it was lost, restore it, with its .head file. A run that begins anew "
                "has no ledger yet: leave it out."
            )
        _add_lines(lines, path, runs)
    return runs


def count_steps(path: Path | str) -> int:
    """The number of steps of all runs in a journal; 0 before the first."""
    return sum(len(taken) for taken in read_steps(path, missing="empty").values())


def _check_known(path: Path, lines: list[chain.Line], known: chain.Head) -> None:
    then = "when the checkpoint was saved"
    if chain.read_head(path) is None:
        found = f"Expected the journal {path} with {chain.head_path(path).name} beside it, as {then}, got no such file"
    elif len(lines) < known.lines:
        found = f"Expected at least {known.lines} lines in the journal {path}, as {then}, got {len(lines)}"
    elif known.lines and lines[known.lines - 1][0] != known:
        found = f"Line {known.lines} of the journal {path}, which was changed or is another, is not the one {then}"
    else:
        return
    raise CheckpointError(f"{found}. {chain.RESTORE}")


def _add_lines(lines: list[chain.Line], path: Path, runs: dict[str, dict[int, Taken]]) -> str:
    """Enter the steps that lines of a journal have; the run of the last line."""
    run = ""
    for end, values in lines:
        try:
            run, step = values["run"], int(values["step"])
            own, before = _events(values["events"]), _events(values.get("before", []))
            taken = Taken(values["adjacency"], own, str(values["release"]), before)
        except (KeyError, ValueError, TypeError) as error:
            raise chain.unreadable(end.lines, path, error) from error
        if runs.setdefault(run, {}).setdefault(step, taken)[:3] != taken[:3]:
            raise CheckpointError(
                f"The journal {path} has step {step} of run {run} twice, with different values: one step is released "
                f"once. {chain.RESTORE}"
            )
    return run


def journal_ledger(path: Path | str) -> Ledger:
    """Ledger of all runs in a journal, and of what they counted from elsewhere when they began; needs no checkpoint.

    Raises:
        LedgerConflict: runs of different adjacency. CheckpointError: no such file, one without steps (a misspelt path
            must not be free), or one from which lines are missing or in which they were changed.
    """
    return whole_ledger(read_steps(path).values())


def steps_ledger(runs: Iterable[Mapping[int, Taken]]) -> Ledger:
    """Ledger of the steps of some runs, at least one, without what they counted before."""
    return compose(*(Ledger(taken.events, taken.adjacency) for run in runs for taken in run.values()))


def whole_ledger(runs: Collection[Mapping[int, Taken]]) -> Ledger:
    """Ledger of the steps of some runs, and of what they counted before: that of one can be that of another."""
    own = steps_ledger(runs)
    before = Ledger(adjacency=own.adjacency)
    for taken in (taken for run in runs for taken in run.values() if taken.before):
        before = before.compose(Ledger(taken.before, taken.adjacency).beyond(before))
    return own.compose(before)


def charged_for(state: StepState, plan: Plan, taken: Iterable[int]) -> StepState:
    """A state that pays for all steps up to the last of those that its run has taken."""
    later = max(taken, default=-1) + 1
    if later <= state.charged:
        return state
    cost = Ledger(plan.events(state.charged, later), plan.adjacency)
    return state._replace(charged=later, ledger=state.ledger.compose(cost))


def as_charged(state: StepState, plan: Plan, journal: Path | str, facts: tuple[str, ...]) -> StepState:
    """A state that is charged for every step of its run in the journal, and stands after the last of them.

    Steps that it was charged for before were taken by another process, of which nothing is known; `facts` are those of
    a step that this one took after the state (tests/hf/trainer/test_files.py::
    test_an_interruption_after_a_release_is_counted, tests/checkpoint/test_record.py::
    test_steps_of_another_process_claim_nothing).
    """
    from dpfunc.rng import fingerprint
    from dpfunc.state import weakest

    charged = charged_for(state, plan, read_steps(journal, missing="empty").get(fingerprint(state.key), {}))
    if charged.charged <= state.step:
        return state
    later = UNKNOWN if state.charged > state.step else facts
    return charged._replace(step=charged.charged, facts=weakest(state.facts or later, later))


def _written(events: Iterable[Event]) -> list[Any]:
    return [list(vars(event).values()) if type(event) is Event else to_values(event) for event in events]


def _events(values: Iterable[Any]) -> tuple[Event, ...]:
    return tuple(Event(*each) if isinstance(each, list) else from_values(each) for each in values)
