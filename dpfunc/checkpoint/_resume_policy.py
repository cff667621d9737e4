"""Whether a resumed run keeps its key, takes a new one and pays again, or is refused: a table of situations.

May import: its folder, step and below. Privacy depends on it: yes.

A key belongs to a run. Its steps may be repeated only in the layout (what decides how sums round: processes, sharding,
device, threads, version of torch) in which they were released: in another one two releases would share their noise, on
sums that differ. A file of notes says in which layout each stretch of steps was computed, and which run continues
which. The checkpoint was saved at `step`; the steps from there to `charged` were released later, and the journal has
them.

| journal | layout | steps in the journal beyond the checkpoint | the run goes on |
|---|---|---|---|
| given | any | none | with its key |
| given | that of those steps | some | with its key, and repeats them bit for bit at no cost |
| given | another | some | is refused |
| given | any | some, with `recharge=True` | with a new key: they are drawn anew, and charged again |
| none | any | unknown | is refused; `without_journal="new_key"`: a new key, unless a run with one went on from there |

The last refusal is lifted by `later_runs="ignore"`. In each row the ledger gets all steps of the lineage that the
journal has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from dpfunc._utils.parts import is_dtensor
from dpfunc._utils.validation import one_of, refuse, shorten, unique_json
from dpfunc.accounting import Ledger
from dpfunc.checkpoint._format import difference, key_of, state_from_dict
from dpfunc.checkpoint.journal import Taken, whole_ledger
from dpfunc.distributed._object_collectives import digest_over_ranks, rank_and_size
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint
from dpfunc.state import StepState, step_events
from dpfunc.types import Event, Params

NOTES = "resumed.jsonl"
LaterRuns = Literal["refuse", "ignore"]
# Entries of a layout that a reader cannot understand: others come first in messages.
_DIGESTS = ("all machines", "parts of parameters")


def layout(params: Params, ranks: Ranks | None) -> dict[str, Any]:
    """The layout of a run as JSON values, without engine and microbatch size: runs of equal ones repeat bit for bit."""
    processes, size = rank_and_size(ranks)[1], 1 if ranks is None else ranks.size
    single = processes == 1
    parts = [f"{p.placements} on {tuple(p.device_mesh.shape)}" if is_dtensor(p) else "whole" for p in params.values()]
    return {
        "data processes": size,
        "tensor processes": processes // size,
        "backend": None if ranks is None or single else str(dist.get_backend(ranks.group)),
        "parts of parameters": digest_over_ranks(str(parts), None),
        "machine": _machine(params),
        "all machines": digest_over_ranks(_machine(params), None if single else ranks),
    }


def _machine(params: Params) -> str:
    known = {
        "cpu": lambda: f"cpu {torch.backends.cpu.get_cpu_capability()} with {torch.get_num_threads()} threads",
        "cuda": torch.cuda.get_device_name,
    }
    kinds = sorted({p.device.type for p in params.values()})
    return ", ".join([f"torch {torch.__version__}", *(known[kind]() if kind in known else kind for kind in kinds)])


@dataclass(frozen=True)
class Note:
    """One line about a resumption. Public facts only."""

    run: str  # fingerprint of the key of the steps that follow
    start: int  # the first of them
    layout: Mapping[str, Any]  # in which they are computed
    counted: Mapping[str, int]  # other run of the lineage -> its first step that the ledger lacks from here on
    parent: str | None = None  # the run that this one continues with new noise; None when the run itself goes on


def known_notes(path: Path, count: int) -> list[Note]:
    """All notes of a run that has a checkpoint, at least as many as when it was saved; the first save begins the file.

    A line left incomplete by a crash belongs to a resumption that released nothing
    (tests/checkpoint/test_resume_policy.py::test_notes_that_were_lost_are_not_read_as_never_resumed).
    """
    try:
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else None
        notes = [Note(**unique_json(line)) for line in lines or ()]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"The notes {path} cannot be read: {error}. Start a new run.") from error
    if lines is None or len(notes) < count:
        raise CheckpointError(
            f"Expected {path} with at least {count} notes, as when the checkpoint was saved, got "
            f"{'no such file' if lines is None else len(notes)}. It says with which keys and layouts steps were "
            "released: restore it."
        )
    return notes


@dataclass(frozen=True)
class History:
    """Records about a run that is resumed: its checkpoint, its notes and its journal."""

    values: Mapping[str, Any] = field(repr=False)  # of the checkpoint: they hold the key
    notes: list[Note]  # all there are now; `values` says how many there were
    taken: Mapping[str, Mapping[int, Taken]] | None  # all steps in the journal; None without one

    @property
    def run(self) -> str:
        """Fingerprint of the key of the checkpoint."""
        return fingerprint(key_of(self.values))

    @property
    def own_notes(self) -> list[Note]:
        return [note for note in self.notes if note.run == self.run]

    @property
    def steps(self) -> Mapping[int, Taken]:
        """Steps of this run in the journal."""
        return (self.taken or {}).get(self.run, {})

    @property
    def counted_when_saved(self) -> Mapping[str, int]:
        """Other runs of the lineage -> the first of their steps that the ledger of the checkpoint lacks."""
        return next((note.counted for note in reversed(self.notes[: self.values["notes"]]) if note.run == self.run), {})

    def layout_of(self, step: int) -> Mapping[str, Any]:
        """Layout in which a step of this run was computed, or would have been."""
        return dict([self.values["layout"], *(note.layout for note in self.own_notes if note.start <= step)][-1])


def lineage_of(run: str, notes: Sequence[Note]) -> set[str]:
    """Fingerprints of a run and of all runs of its lineage."""
    found, size = {run}, 0
    while size < len(found):
        size = len(found)
        for note in notes:
            if note.parent is not None and found & {note.run, note.parent}:
                found |= {note.run, note.parent}
    return found


def resume(
    history: History, plan: Plan, now: Mapping[str, Any], new_key: Key, *, recharge: bool, later_runs: LaterRuns
) -> tuple[StepState, Note | None]:
    """The state that may go on in the layout of `now`, and the note that must be on disk before; or why it may not."""
    _refuse_lost(history)
    state = state_from_dict(history.values, plan, history.steps)
    if one_of("later_runs", later_runs, ("refuse", "ignore")) == "refuse":
        _refuse_others(history, state, plan)
    state, counted = _with_lineage(state, history, plan)
    if history.taken is not None:
        other = [each for each in map(history.layout_of, range(state.step, state.charged)) if each != now]
        if not (other or (recharge and state.step < state.charged)):
            # the steps can be repeated; a note is due where those that follow are in another layout, or more is counted
            same = history.layout_of(state.charged) == now and counted == history.counted_when_saved
            return state, None if same else Note(history.run, state.step, now, counted)
        if not recharge:
            lines = sorted(difference(other[0], now), key=lambda line: line.startswith(_DIGESTS))
            raise CheckpointError(
                "The run cannot be repeated bit for bit, because its processes, machines or versions are others "
                f"({shorten(lines) or 'it was, for a while'}), and the same noise on sums that round differently would "
                f"give the difference away. Steps {state.step} to {state.charged - 1} were released after the "
                "checkpoint, and are in the journal. Resume as they were computed; or draw them anew, with new noise, "
                "at their cost: load(..., recharge=True)."
            )
    elif later_runs == "refuse":
        _refuse_continued(history)
    note = Note(fingerprint(new_key), state.step, now, {**counted, history.run: state.charged}, history.run)
    return _with_new_key(history, state, plan, new_key), note


_BEGIN = "dp_step.init(params, dpfunc.secure_key(), ledger"


def _with_new_key(history: History, state: StepState, plan: Plan, key: Key) -> StepState:
    """The same run with other noise: steps from here on are drawn anew, and cost again what the ledger has of them.

    A key that others can know stays one: the record of the run is also about the steps that were taken with it.
    """
    refuse(
        (history.values["noise"] != {"tuple": []}, CheckpointError(  # the state (), of noise of each step by itself
            "Expected a noise mechanism without state to go on from with a new key, got one with state: its noise may "
            "be correlated over steps. Resume with journal=, and with what the run was started with; or begin a new "
            f"run that counts this one: {_BEGIN}).")),
        (not plan.events(state.step, state.step + 1), CheckpointError(
            f"Expected a checkpoint at the end of an epoch to go on from with a new key, got one of step {state.step}: "
            "what is released as a whole, as an epoch of shuffled steps is, cannot be drawn anew from its middle. "
            f"Resume with journal=, or begin a new run that counts this one: {_BEGIN}).")),
    )  # fmt: skip
    own = replace(key, guessable=state.key.guessable)
    return _within_budget(state._replace(key=own, charged=state.step, released=()), plan)


def _refuse_lost(history: History) -> None:
    """Refuse a journal without the last step of the checkpoint; it has the steps from the first one with its key."""
    last = int(history.values["charged"]) - 1
    first = next((note.start for note in history.own_notes if note.parent is not None), 0)  # computed with its key
    if history.taken is None or last < first or last in history.steps:
        return
    counting = {note.run for note in history.notes if note.counted.get(history.run, 0) > last}
    advice = "It is the journal of another run, or incomplete: pass the right one"
    if later := [run for run in history.taken if run in counting]:
        advice = (
            f"It has a run that continues this one ({shorten(later)}), and counts all of it: begin a new run from the "
            f"saved parameters that counts both, {_BEGIN}=dpfunc.checkpoint.journal_ledger(path))"
        )
    raise CheckpointError(f"Expected the journal to have step {last} of this run, which the checkpoint has. {advice}.")


def _refuse_others(history: History, state: StepState, plan: Plan) -> None:
    """Refuse runs that began after this one in its journal and are not of its lineage. Earlier runs are allowed."""
    taken, lineage = history.taken or {}, lineage_of(history.run, history.notes)
    runs = list(taken)
    began = next((number for number, run in enumerate(runs) if run in lineage), len(runs))
    outside = [run for run in runs[began:] if run not in lineage]
    if runs and began == len(runs):  # saved before its first step there: its ledger has theirs beside its own
        own = Taken(plan.adjacency, step_events(plan, state, 0, state.charged), "")
        outside = runs if state.ledger.lacks(whole_ledger([*taken.values(), {0: own}])) else []
    if outside:
        raise CheckpointError(
            f"The journal has another run that began after this one ({shorten(outside)}), and resumed.jsonl does not "
            "say that it continues it. If notes were lost, restore them. If it is a run of its own, what it cost is "
            "not in this ledger: give each run a journal and a folder of its own, or pass "
            'later_runs="ignore" and count both.'
        )


def _refuse_continued(history: History) -> None:
    """Refuse a checkpoint from which a run with a new key went on before: nobody would count its steps."""
    if before := [note.run for note in history.notes[history.values["notes"] :] if note.parent == history.run]:
        raise CheckpointError(
            "Expected a checkpoint from which no run has gone on with a new key, got one from which "
            f"{len(before)} did ({shorten(before)}), and left no checkpoint. What they released is in no ledger, but "
            f"that of a journal if they had one: then begin a new run from the saved parameters that counts it, "
            f"{_BEGIN}=dpfunc.checkpoint.journal_ledger(path)). If they took no step, or you count their steps, pass "
            'later_runs="ignore". Next time give the steps a journal: make_dp_step(..., journal=Journal(path, plan)).'
        )


def _with_lineage(state: StepState, history: History, plan: Plan) -> tuple[StepState, dict[str, int]]:
    """Add to the ledger the steps of the other runs of the lineage that it lacks."""
    counted, extra = dict(history.counted_when_saved), list[Event]()
    for run in sorted(lineage_of(history.run, history.notes) - {history.run}):
        steps = (history.taken or {}).get(run, {})
        extra += [event for step, taken in steps.items() if step >= counted.get(run, 0) for event in taken.events]
        counted[run] = max([counted.get(run, 0), *(step + 1 for step in steps)])
    if extra:
        ledger = state.ledger.compose(Ledger(tuple(extra), plan.adjacency))
        state = _within_budget(state._replace(ledger=ledger), plan)
    return state, counted


def _within_budget(state: StepState, plan: Plan) -> StepState:
    """The state with the step at which the budget ends; steps already charged cost nothing."""
    return state._replace(limit=min(state.limit, plan.step_limit(state.ledger, state.charged)))
