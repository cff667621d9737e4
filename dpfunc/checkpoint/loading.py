"""Load a run with any number of processes, or with one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from dpfunc._utils.validation import one_of, shorten
from dpfunc._utils.versions import check_sharding
from dpfunc.checkpoint import _folder as folder
from dpfunc.checkpoint import _format as run
from dpfunc.checkpoint._chain import Head, append_line, read_chain
from dpfunc.checkpoint._resume_policy import NOTES, History, LaterRuns, known_notes, layout, resume
from dpfunc.checkpoint._states import PARAMS, decode, empty, read_table, read_tensors, room
from dpfunc.checkpoint.journal import count_steps, journal_path, read_steps
from dpfunc.checkpoint.saving import check_unsharded
from dpfunc.distributed._object_collectives import all_or_none, by_writer, joint_group, rank_and_size
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.plan import Plan
from dpfunc.rng import secure_key
from dpfunc.state import resumed
from dpfunc.types import Batch, Params

_FAILED = "No checkpoint was loaded"
_BOTH = 'Expected journal= or without_journal="new_key", got both. With the journal the run is repeated as it was.'
_NO_JOURNAL = (
    "Expected the journal of the run, got journal=None: nobody knows which steps were released after the checkpoint, "
    "and repeating them with anything changed would give their noise away. Pass journal=, the file of Journal; or go "
    'on with new noise, without_journal="new_key", if no step after the checkpoint was released, or you count those.'
)
_logger = logging.getLogger(__name__)


def load(
    directory: Path | str,
    *,
    plan: Plan,
    params: Params,
    data: Batch | str,
    ranks: Ranks | None = None,
    optimizer_state: Mapping[str, Any] | None = None,
    journal: Path | str | None = None,
    recharge: bool = False,
    without_journal: Literal["refuse", "new_key"] = "refuse",
    later_runs: LaterRuns = "refuse",
) -> run.Checkpoint:
    """Read the newest complete checkpoint into the layout of these processes, and refuse one of another run.

    In the layout in which it was saved the state that comes back repeats the steps after the checkpoint bit for bit, on
    the same data, at no cost. In another one (other processes, machine or number of threads) sums round differently:
    the run goes on with the same noise only when the journal has no step beyond the checkpoint. In all cases the ledger
    has every step in the journal, so that epsilon never shrinks.

    Args:
        directory: as given to `save`.
        plan, data: of this run; must equal the saved ones.
        params: parameters of the right names, shapes and dtypes; their values do not matter, and their layouts and
            devices are those of the result.
        ranks: as given to `make_dp_step`; all their processes call. None is one process.
        optimizer_state: a state of the same structure, whose tensors say how each is laid out. None lays out what is
            like its parameter as that parameter, and shards nothing else. Optimizers of torch number their parameters:
            build them from `params.values()`, or from `params.items()`, which keeps the names.
        journal: the file of `Journal`, read by the process that writes it.
        recharge: steps beyond the checkpoint that cannot be repeated are drawn anew, with a new key, at their cost.
            Save before the next step: until then another crash costs them once more.
        without_journal: `"refuse"`; or `"new_key"`, so that no noise is used twice and each step is paid for. Steps
            released after the checkpoint are unknown, and not in its ledger: if there are some, begin a new run whose
            ledger has them, dp_step.init(params, dpfunc.secure_key(), ledger).
        later_runs: `"refuse"` or `"ignore"` another run, which continues none of this directory, and began after this
            one in the journal, or went on from this checkpoint without one. The ledger lacks its steps: if it saw the
            same records, count both.

    Raises:
        CheckpointError: none there, damaged, of another run, or not to be repeated; the difference is shown. No
            journal, or one that lacks steps which the checkpoint has, or lines which it had when that was saved.
        InvalidArgument: both journal and without_journal="new_key", or sharded tensors without ranks.
        UnsupportedModel: several processes with an older torch.

    Guarantees:
        tests/checkpoint/test_loading.py: the resumed run is bit-identical (test_resume_is_bit_identical) and
        epsilon never shrinks (test_epsilon_never_shrinks); tests/checkpoint/test_several_processes.py: any number of
        processes goes on as one would have (test_saved_by_four_and_loaded_by_any), and no crash loses accounting
        (test_kill_loses_no_accounting, test_other_layouts_pay_again).

    >>> import dpfunc, tempfile
    >>> plan = dpfunc.Plan(dpfunc.sampling.Poisson(100, 0.1), dpfunc.clipping.Flat(1.0), 1.0, num_steps=3, delta=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(folder, plan=plan, params={}, data="mails-2026")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.CheckpointError: Expected a checkpoint in ..., found none. Start a new run.
    """
    if ranks is not None:
        check_sharding()
    file, parent = journal_path(journal), Path(directory)
    name, values = by_writer(partial(_found, parent, file), ranks, _FAILED)
    path = parent / name

    def check() -> dict[str, torch.Tensor]:
        new_key = one_of("without_journal", without_journal, ("refuse", "new_key")) == "new_key"
        if (file is None) != new_key:
            raise InvalidArgument(_BOTH) if new_key else CheckpointError(_NO_JOURNAL)
        check_unsharded(params, ranks)
        number, count = rank_and_size(ranks)  # each file is verified by one process
        folder.verify(path, dict(sorted(folder.read_manifest(path).items())[number::count]))
        if values.get("schema") != run.SCHEMA:
            raise CheckpointError(
                f"Expected schema {run.SCHEMA} in {path / folder.STATE}, got {values.get('schema')!r}."
            )
        run.refuse("plan", path, run.plan_difference(plan, folder.read_json(path / folder.PLAN)))
        same = values["data"] == run.data_fingerprint(data, run.key_of(values))
        run.refuse("data set", path, [] if same else ["the data differ from those the run was started on"])
        table = read_table(path)
        saved = {n.removeprefix(PARAMS): run.describe(tensor) for n, tensor in table.items() if n.startswith(PARAMS)}
        run.refuse("parameter set", path, run.difference(saved, {n: run.describe(p) for n, p in params.items()}))
        laid_out = {PARAMS + n: empty(p, p) for n, p in params.items()}
        optimizer = room("optimizer_state", values["optimizer"], table, params, optimizer_state)
        return {**laid_out, **optimizer, **room("noise_state", values["noise"], table, params)}

    tensors = all_or_none(check, ranks, _FAILED)
    now = layout(params, ranks)

    def decide() -> dict[str, Any]:
        """State and note with which the run continues, by the process that has the journal."""
        lines = 0 if file is None else len(read_chain(file))  # first: later ones may not be compared
        end = None if values["journal"] is None else Head(**values["journal"])
        taken = None if file is None else read_steps(file, missing="empty" if end else "refuse", known=end)
        history = History(values, known_notes(parent / NOTES, values["notes"]), taken)
        state, note = resume(history, plan, now, secure_key(), recharge=recharge, later_runs=later_runs)
        line = None if note is None else json.dumps(asdict(note))
        return {"state": run.state_to_dict(state), "note": line, "lines": lines}

    decided = by_writer(decide, ranks, _FAILED)
    group = None if ranks is None else all_or_none(partial(joint_group, ranks), ranks, _FAILED)
    read_tensors(path, tensors, group)
    if decided["note"] is not None:
        by_writer(partial(append_line, parent / NOTES, decided["note"]), ranks, _FAILED)
    optimizer, noise = (decode(values[name], lambda slot: tensors[slot.name]) for name in ("optimizer", "noise"))
    where, lines = "" if file is None else str(file.absolute()), decided["lines"]
    state = resumed(run.state_from_dict(decided["state"], plan, {}))
    state = state._replace(noise_state=noise, journal=where, journal_lines=lines)
    return run.Checkpoint({n: tensors[PARAMS + n] for n in params}, optimizer, state, values["extra"], path)


def _found(parent: Path, journal: Path | None) -> tuple[str, dict[str, Any]]:
    """The name of the newest complete checkpoint and its state."""
    complete = folder.complete_checkpoints(parent)
    half = [path for path in folder.all_checkpoints(parent) if path not in complete]
    if not complete:
        there = f" What is there is not complete: {shorten([path.name for path in half])}." if half else ""
        said = f"Expected a checkpoint in {parent}, found none.{there} Start a new run."
        if journal is not None and (taken := count_steps(journal)):
            begin = "begin it with ledger=journal_ledger(path), of dpfunc.checkpoint"
            said += f" The journal {journal} has {taken} steps, which count: {begin}."
        raise CheckpointError(said)
    path = complete[-1]
    if folder.all_checkpoints(parent)[-1] != path:
        _logger.warning("The checkpoint %s is not complete and is passed over.", half[-1])
    folder.verify(path, {folder.STATE: folder.read_manifest(path)[folder.STATE]})
    return path.name, folder.saved_state(path)
