"""Rule for using noise again when a run continues with another number of processes or another layout.

A key belongs to a run. Its steps may be repeated only in the layout in which they were released: in another one the
sums round differently, and two releases would share their noise. A file of notes says in which layout each stretch of
steps was computed, and which runs continue others.

| journal | layout | steps after the checkpoint | the run goes on |
|---|---|---|---|
| given | as it was | any | with its key, and repeats them bit for bit, at no cost |
| given | another | none | with its key |
| given | another | some | not; with `recharge` with a new key, and pays for them again |
| none | any | unknown | with a new key; not where one went on from there before, unless `later_runs="ignore"` |

In each row the ledger gets all steps of the lineage that the journal has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dpfunc._utils.validation import one_of, shorten, unique_json
from dpfunc.accounting import Ledger, affordable_steps
from dpfunc.checkpoint.format import difference, key_of, state_from_dict
from dpfunc.checkpoint.journal import Taken, whole_ledger
from dpfunc.checkpoint.run_layout import DIGESTS
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint
from dpfunc.state import StepState, step_events
from dpfunc.types import Event

NOTES = "resumed.jsonl"
_NO_STATE: Mapping[str, Any] = {"tuple": []}
"""The state of Gaussian noise, `()`, as a checkpoint has it."""
_Runs = Mapping[str, Mapping[int, Taken]]
LaterRuns = Literal["refuse", "ignore"]


@dataclass(frozen=True)
class Note:
    """One line about a resumption. Public facts only.

    Args:
        run: fingerprint of the key of the steps that follow. start: the first of them.
        layout: in which they are computed.
        counted: other runs of the same lineage -> their steps below this are in the ledger of this one.
        parent: the run that this one continues with new noise, or None when the run itself goes on.
    """

    run: str
    start: int
    layout: Mapping[str, Any]
    counted: Mapping[str, int]
    parent: str | None = None


def read_notes(path: Path) -> list[Note]:
    """Read all notes; a line left incomplete by a crash belongs to a resumption that released nothing."""
    if not path.exists():
        return []
    try:
        return [Note(**unique_json(line)) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"The notes {path} cannot be read: {error}. Start a new run.") from error


def known_notes(path: Path, count: int) -> list[Note]:
    """All notes of a run that has a checkpoint; the first save begins the file.

    Args:
        path: of the notes. count: how many there were when the checkpoint was saved.

    Raises:
        CheckpointError: the file is gone or shorter: without it a run that took a new key or another layout looks like
            one that never did.

    Guarantees:
        tests/checkpoint/test_resume_policy.py::test_notes_that_were_lost_are_not_read_as_never_resumed.
    """
    notes = read_notes(path)
    if not path.exists() or len(notes) < count:
        raise CheckpointError(
            f"Expected {path} with at least {count} notes, as when the checkpoint was saved, got "
            f"{len(notes) if path.exists() else 'no such file'}. It says with which keys and layouts steps were "
            "released: restore it."
        )
    return notes


@dataclass(frozen=True)
class History:
    """Records about a run that is resumed: its checkpoint, its notes and its journal.

    Args:
        values: of the checkpoint, with its layout and the number of notes there were.
        notes: all there are now. taken: all steps in the journal, or None without one, when the run takes a new key.
    """

    values: Mapping[str, Any] = field(repr=False)  # they hold the key
    notes: list[Note]
    taken: _Runs | None

    @property
    def run(self) -> str:
        """Fingerprint of the key of the checkpoint."""
        return fingerprint(key_of(self.values))

    @property
    def steps(self) -> Mapping[int, Taken]:
        """Steps of this run in the journal."""
        return (self.taken or {}).get(self.run, {})

    @property
    def counted(self) -> Mapping[str, int]:
        """Steps of related runs that the checkpoint's ledger contains: run -> number of its first step not counted."""
        known = [note.counted for note in self.notes[: self.values["notes"]] if note.run == self.run]
        return known[-1] if known else {}

    def layout_of(self, step: int) -> Mapping[str, Any]:
        """Layout in which a step of this run was computed, or would have been."""
        known = [note.layout for note in self.notes if note.run == self.run and note.start <= step]
        found: Mapping[str, Any] = known[-1] if known else self.values["layout"]
        return found

    def relatives(self) -> set[str]:
        """Other runs of the same lineage."""
        return family(self.run, self.notes) - {self.run}


def family(run: str, notes: Sequence[Note]) -> set[str]:
    """Fingerprints of a run and of all runs of its lineage."""
    found, size = {run}, 0
    while size < len(found):
        size = len(found)
        for note in notes:
            if note.parent is not None and found & {note.run, note.parent}:
                found |= {note.run, note.parent}
    return found


def resume(
    history: History, plan: Plan, layout: Mapping[str, Any], new_key: Key, *, recharge: bool, later_runs: LaterRuns
) -> tuple[StepState, Note | None]:
    """The state that may go on, and the note that must be on disk before it does.

    Args:
        history: of the run. plan: of the run. layout: of the processes that resume it. new_key: never used before.
        recharge: steps that cannot be repeated may be drawn anew, and cost again. later_runs: "ignore" other runs that
            began after this one in its journal, which somebody else counts.

    Raises:
        CheckpointError: the steps after the checkpoint cannot be repeated, or it is unknown which were released.
    """
    _own_journal(history)
    state = state_from_dict(history.values, plan, history.steps)
    if one_of("later_runs", later_runs, ("refuse", "ignore")) == "refuse":
        _explained(history, state, plan)
    counted = dict(history.counted)
    state = _with_relatives(state, history, plan, counted)
    newest = history.layout_of(state.charged)
    if history.taken is not None:
        released = [history.layout_of(step) for step in range(state.step, state.charged)]
        changed = next((each for each in released if each != layout), None)
        if changed is None:
            same = newest == layout and counted == history.counted
            return state, None if same else Note(history.run, state.step, layout, counted)
        if not recharge:
            _refuse(changed, layout, state)
    elif later_runs == "refuse":  # without a journal: it is unknown what was released after the checkpoint
        _continued_once(history)
    counted[history.run] = state.charged
    fresh = _with_new_key(history, state, plan, new_key)
    return fresh, Note(fingerprint(new_key), state.step, layout, counted, history.run)


def _own_journal(history: History) -> None:
    """Check that the journal has the steps of the checkpoint, from the first one with its own key."""
    born = [note.start for note in history.notes if note.run == history.run and note.parent is not None]
    last = int(history.values["charged"]) - 1
    if history.taken is None or last < (born[0] if born else 0) or last in history.steps:
        return
    advice = "It is the journal of another run, or incomplete: pass the right one"
    counting = {note.run for note in history.notes if note.counted.get(history.run, 0) > last}
    if later := [run for run in history.taken if run in counting]:
        advice = (
            f"It has a run that continues this one ({shorten(later)}), and counts all of it: begin a new run from the "
            "saved parameters that counts both, dp_step.init(params, dpfunc.secure_key(), "
            "ledger=dpfunc.checkpoint.journal_ledger(path))"
        )
    raise CheckpointError(f"Expected the journal to have step {last} of this run, which the checkpoint has. {advice}.")


def _explained(history: History, state: StepState, plan: Plan) -> None:
    """Check that runs that began after this one in its journal belong to its lineage. Earlier runs are allowed."""
    taken = history.taken or {}
    family, runs = {history.run, *history.relatives()}, list(taken)
    began = next((number for number, run in enumerate(runs) if run in family), len(runs))
    strangers = [run for run in runs[began:] if run not in family]
    if runs and began == len(runs):  # saved before its first step there: its ledger has theirs beside its own
        own = Taken(plan.adjacency, step_events(plan, state, 0, state.charged), "")
        strangers = runs if state.ledger.lacks(whole_ledger([*taken.values(), {0: own}])) else []
    if strangers:
        raise CheckpointError(
            f"The journal has another run that began after this one ({shorten(strangers)}), and {NOTES} does not say "
            "that it continues it. If notes were lost, restore them. If it is a run of its own, what it cost is not in "
            'this ledger: give each run a journal and a folder of its own, or pass later_runs="ignore" and count both.'
        )


def _continued_once(history: History) -> None:
    """Check that no run without a journal went on from this checkpoint before: nobody would count its steps."""
    before = [note.run for note in history.notes[history.values["notes"] :] if note.parent == history.run]
    if before:
        raise CheckpointError(
            f"Expected a checkpoint from which no run has gone on without a journal, got one from which {len(before)} "
            f"did ({shorten(before)}), and left no checkpoint. What they released is in no ledger, but that of a "
            "journal if they had one: then begin a new run from the saved parameters that counts it, "
            "dp_step.init(params, dpfunc.secure_key(), ledger=dpfunc.checkpoint.journal_ledger(path)). If they took no "
            'step, or you count their steps, pass later_runs="ignore". '
            "Next time give the steps a journal: make_dp_step(..., journal=Journal(path, plan))."
        )


def _with_relatives(state: StepState, history: History, plan: Plan, counted: dict[str, int]) -> StepState:
    """Add to the ledger the steps of related runs (that continued this one, or that it continues) not yet counted."""
    extra: list[Event] = []
    for run in sorted(history.relatives()):
        steps = (history.taken or {}).get(run, {})
        extra += [event for step, taken in steps.items() if step >= counted.get(run, 0) for event in taken.events]
        counted[run] = max([counted.get(run, 0), *(step + 1 for step in steps)])
    if not extra:
        return state
    state = state._replace(ledger=state.ledger.compose(Ledger(tuple(extra), plan.adjacency)))
    return state._replace(limit=_budget_limit(state, plan))


def _with_new_key(history: History, state: StepState, plan: Plan, key: Key) -> StepState:
    """The same run with other noise: steps from here on are drawn anew, and cost again what the ledger has of them."""
    if history.values["noise"] != _NO_STATE:
        raise CheckpointError(
            "Expected a noise mechanism without state to go on from with a new key, got one with state: its noise is "
            "correlated over steps. Resume with journal=, and with what the run was started with; or begin a new run "
            "that counts this one: dp_step.init(params, dpfunc.secure_key(), ledger)."
        )
    epoch = getattr(plan.sampler, "steps_per_epoch", 1)
    if state.step % epoch:
        raise CheckpointError(
            f"Expected a checkpoint at the end of an epoch to go on from with a new key, got one of step {state.step}: "
            f"an epoch of {epoch} shuffled steps cannot be drawn anew from its middle. Resume with journal=, or begin "
            "a new run that counts this one: dp_step.init(params, dpfunc.secure_key(), ledger)."
        )
    fresh = state._replace(key=key, charged=state.step, released=())
    return fresh._replace(limit=_budget_limit(fresh, plan))


def _budget_limit(state: StepState, plan: Plan) -> int:
    """Step at which the budget ends; steps already charged cost nothing, and without a budget it is `state.limit`."""
    if plan.epsilon is None:
        return state.limit
    start = state.charged
    return start + affordable_steps(
        lambda steps: state.ledger.compose(Ledger(plan.events(start, start + steps), plan.adjacency)),
        epsilon=plan.epsilon,
        delta=plan.delta,
        limit=max(state.limit - start, 0),
        method=plan.accountant,
    )


def _refuse(saved: Mapping[str, Any], now: Mapping[str, Any], state: StepState) -> None:
    lines = shorten(sorted(difference(saved, now), key=lambda line: line.startswith(DIGESTS))) or "it was, for a while"
    raise CheckpointError(
        f"The run cannot be repeated bit for bit, because it is laid out differently ({lines}), and the same noise on "
        f"sums that round differently would give the difference away. Steps {state.step} to {state.charged - 1} were "
        "released after the checkpoint, and are in the journal. Resume as they were computed; or draw them anew, with "
        "new noise, at their cost: load(..., recharge=True)."
    )
