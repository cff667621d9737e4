"""Load a run of several processes with any number of processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from dpfunc._utils.versions import check_sharding
from dpfunc.checkpoint.format import (
    MANIFEST,
    PLAN,
    STATE,
    Checkpoint,
    check_choice,
    check_schema,
    describe,
    described,
    difference,
    known_journal,
    read_json,
    read_manifest,
    refuse,
    refuse_data,
    state_from_dict,
    state_to_dict,
    verify,
    whole_checkpoints,
)
from dpfunc.checkpoint.journal import append_line, read_steps
from dpfunc.checkpoint.plan_json import plan_difference
from dpfunc.checkpoint.resume_policy import NOTES, History, known_notes, note_line, resume
from dpfunc.checkpoint.run_layout import layout
from dpfunc.checkpoint.sharded_save import LATEST, latest
from dpfunc.checkpoint.tensors import METADATA, PARAMS, decode, read_table, read_tensors, room
from dpfunc.distributed.launch import is_writer
from dpfunc.distributed.object_collectives import all_or_none, joint_group, rank_and_size, shared
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import secure_key
from dpfunc.state import resumed
from dpfunc.types import Batch, Params

FAILED = "No checkpoint was loaded"


def load_sharded(
    directory: Path | str,
    *,
    plan: Plan,
    params: Params,
    data: Batch | str,
    ranks: Ranks | None,
    optimizer_state: Mapping[str, Any] | None = None,
    journal: Path | str | None = None,
    recharge: bool = False,
    without_journal: Literal["refuse", "new_key"] = "refuse",
) -> Checkpoint:
    """Read the newest whole checkpoint into the layout of these processes, and refuse one of another run.

    In the layout in which it was saved the state that comes back repeats the steps after the checkpoint bit for bit, at
    no cost, as `dpfunc.load` does. In another one sums round differently. Then the run goes on with the same noise only
    when the journal has no step beyond the checkpoint; otherwise it is refused, or, with `recharge`, goes on as a run
    with a new key that pays for those steps again. In all cases the ledger has every step in the journal.

    Args:
        directory: as given to `save_sharded`.
        plan, data: of this run; must equal the saved ones.
        params: parameters of the right names, shapes and dtypes; their layouts are those of the result.
        ranks: as given to `make_dp_step`; all their processes call. None is one process.
        optimizer_state: a state of the same structure, whose tensors say how each is laid out. None lays out what is
            like its parameter as that parameter, and the rest whole. Optimizers of torch number their parameters:
            build them from `params.values()`, or from `params.items()`, which keeps the names.
        journal: the file of `Journal`, read by the process that writes it.
        recharge: what to do when steps beyond the checkpoint cannot be repeated. True: draw them anew, at their cost.
            Save before the next step: until then another crash costs them once more.
        without_journal: what to do without a journal: `"refuse"`, or `"new_key"`, which goes on with new noise. Steps
            that were released after the checkpoint are not in its ledger then: see `dpfunc.load`.

    Raises:
        CheckpointError: none there, damaged, of another run, or not to be repeated; the difference is shown.
        UnsupportedModel: an older torch, see `dpfunc._utils.versions.check_sharding`.

    Guarantees:
        tests/checkpoint/test_sharded.py: any number of processes goes on as one would have
        (test_saved_by_four_and_loaded_by_any), and epsilon never shrinks (test_kill_loses_no_accounting,
        test_other_layouts_pay_again).

    >>> import tempfile
    >>> from dpfunc import clipping, sampling
    >>> plan = Plan(sampling.Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load_sharded(folder, plan=plan, params={}, data="mails-2026", ranks=None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.CheckpointError: Expected a checkpoint in ..., found none. Start a new run.
    """
    check_sharding()
    parent = Path(directory)
    name, values = json.loads(shared(all_or_none(partial(_found, parent, ranks), ranks, FAILED), ranks))
    path = parent / name
    all_or_none(partial(check_choice, journal, without_journal), ranks, FAILED)

    def check() -> dict[str, torch.Tensor]:
        _verify_share(path, ranks)
        check_schema(values, path)
        refuse("plan", path, plan_difference(plan, read_json(path / PLAN)))
        refuse_data(data, values, path)
        table = read_table(path)
        saved = {n.removeprefix(PARAMS): describe(*about) for n, about in table.items() if n.startswith(PARAMS)}
        refuse("parameter set", path, difference(saved, described(params)))
        return room(values["optimizer"], table, params, optimizer_state)

    tensors = all_or_none(check, ranks, FAILED)
    now = layout(params, ranks)
    decide = partial(_decided, parent, values, plan, now, journal, recharge, ranks)
    decided = json.loads(shared(all_or_none(decide, ranks, FAILED), ranks))
    group = None if ranks is None else all_or_none(partial(joint_group, ranks), ranks, FAILED)
    read_tensors(path, tensors, group)
    all_or_none(partial(_note, parent, decided["note"], ranks), ranks, FAILED)
    state = state_from_dict(decided["state"], plan, {})
    return Checkpoint(
        {n: tensors[PARAMS + n] for n in params},
        None if values["optimizer"] is None else decode(values["optimizer"], lambda slot: tensors[slot.name]),
        resumed(state),
        values["extra"],
        path,
    )


def _found(parent: Path, ranks: Ranks | None) -> bytes:
    """The name of the newest checkpoint and its state, read by one process."""
    if not is_writer(ranks):
        return b""
    name = latest(parent)
    if name is None:
        raise CheckpointError(f"Expected a checkpoint in {parent}, found none. {_instead(parent)}")
    path = parent / name
    if not (path / MANIFEST).exists():
        raise CheckpointError(
            f"Expected a whole checkpoint at {path}, which {parent / LATEST} names. To go back to an older one, write "
            "its name there: the journal keeps what was spent."
        )
    verify(path, {STATE: _manifest(path)[STATE]})
    return json.dumps([name, read_json(path / STATE)]).encode()


def _instead(parent: Path) -> str:
    """Advice for the error message when a folder names no newest checkpoint."""
    there = whole_checkpoints(parent)
    if not there:
        return "Start a new run."
    if (there[-1] / METADATA).exists():
        return f"The file {LATEST} is missing: write the name of the newest checkpoint into it, e.g. {there[-1].name}."
    return f"But {there[-1].name} is there, which dpfunc.save wrote: read it with dpfunc.load."


def _verify_share(path: Path, ranks: Ranks | None) -> None:
    """Verify this process's share of the files; each file is verified by one process."""
    number, count = rank_and_size(ranks)
    verify(path, dict(sorted(_manifest(path).items())[number::count]))


def _manifest(path: Path) -> dict[str, str]:
    manifest = read_manifest(path)
    if METADATA not in manifest:
        raise CheckpointError(f"The file {path / MANIFEST} was changed after it was saved: it lacks {METADATA}.")
    return manifest


def _decided(
    parent: Path,
    values: Mapping[str, Any],
    plan: Plan,
    now: Mapping[str, Any],
    journal: Path | str | None,
    recharge: bool,
    ranks: Ranks | None,
) -> bytes:
    """State and note with which the run continues, decided by the process that has the journal; empty on the others."""
    if not is_writer(ranks):
        return b""
    known = known_journal(values)
    empty: Literal["refuse", "empty"] = "refuse" if known is None else "empty"
    taken = None if journal is None else read_steps(journal, missing=empty, known=known)
    history = History(values, known_notes(parent / NOTES, values["notes"]), taken)
    state, note = resume(history, plan, now, secure_key(), recharge=recharge)
    line = None if note is None else note_line(note)
    return json.dumps({"state": state_to_dict(state, "", {}), "note": line}).encode()


def _note(parent: Path, line: str | None, ranks: Ranks | None) -> None:
    if line is not None and is_writer(ranks):
        append_line(parent / NOTES, line)
