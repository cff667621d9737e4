"""Checkpoints: params, optimizer, state and plan in one directory, which is complete or absent."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dpfunc._utils.locks import in_use
from dpfunc._utils.validation import shorten, whole, wrong_type
from dpfunc.checkpoint.chain import sync_directory
from dpfunc.checkpoint.format import (
    AWAY,
    MANIFEST,
    PLAN,
    PREFIX,
    SAVING,
    STATE,
    Checkpoint,
    check_choice,
    check_journal,
    check_own,
    check_schema,
    data_fingerprint,
    described,
    difference,
    free_name,
    half_checkpoints,
    known_journal,
    read_json,
    read_manifest,
    refuse,
    refuse_data,
    remove,
    sha256,
    state_from_dict,
    state_to_dict,
    sweep,
    sync_file,
    verify,
    whole_checkpoints,
    with_new_key,
    write_json,
)
from dpfunc.checkpoint.journal import read_steps, saved_end
from dpfunc.checkpoint.plan_json import plan_difference, plan_to_dict
from dpfunc.checkpoint.values import read_values, write_values
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint, secure_key
from dpfunc.state import StepState, resumed
from dpfunc.types import Batch, Params

__all__ = ["MANIFEST", "PREFIX", "Checkpoint", "data_fingerprint", "load", "save"]

PARAMS, OPTIMIZER = "params.safetensors", "optimizer.pt"
METADATA = ".metadata"  # of save_sharded

logger = logging.getLogger(__name__)


def save(
    directory: Path | str,
    *,
    params: Params,
    state: StepState,
    plan: Plan,
    data: Batch | str,
    optimizer_state: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    journal: Path | str | None = None,
) -> Path:
    """Write a checkpoint: a new directory, synced, then renamed into place. A kill at any moment leaves the old one.

    Args:
        directory: holds one sub-directory a checkpoint; made when missing.
        params, state, plan: of the run, after a step.
        data: the data set (a pytree of tensors), or a string that names it: only its fingerprint is stored.
        optimizer_state: `optimizer.state_dict()`: tensors, numbers, strings, lists and dicts. What `load` could not
            read (numbers of numpy, an Enum) is refused here, and named.
        extra: JSON values of your own.
        keep: older checkpoints are removed when there are more than this, >= 1.
        journal: the file of `Journal`, if the run has one. The checkpoint remembers where it ends, so that `load`
            finds out when lines were lost since.

    Returns:
        The path of the checkpoint. It holds the key of the run (file mode 0600): as secret as the data.

    Raises:
        InvalidArgument: a bad keep, optimizer_state, extra or data.
        CheckpointError: the directory has checkpoints of another run, or of `save_sharded`.

    >>> import tempfile, torch
    >>> from dpfunc import clipping, sampling
    >>> from dpfunc.rng import secure_key
    >>> from dpfunc.step import make_dp_step
    >>> plan = Plan(sampling.Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> data, params = torch.ones(100, 2), {"w": torch.zeros(2)}
    >>> dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), plan)
    >>> state = dp_step.init(params, secure_key())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Path(folder) / "journal.jsonl"  # as in make_dp_step(..., journal=Journal(journal, plan))
    ...     path = save(folder, params=params, state=state, plan=plan, data=data, journal=journal)
    ...     checkpoint = load(folder, plan=plan, params=params, data=data, journal=journal)
    >>> checkpoint.state == state
    True
    """
    keep = whole("keep", keep, minimum=1)
    if not isinstance(plan, Plan):
        raise wrong_type("plan to be a dpfunc.Plan", "plan", plan)
    if not isinstance(state, StepState):
        raise wrong_type("state to be a StepState", "state", state)
    if not isinstance(params, Mapping):
        raise wrong_type("params to be a mapping name -> tensor", "params", params)
    if optimizer_state is not None and not isinstance(optimizer_state, Mapping):
        raise wrong_type("the result of optimizer.state_dict()", "optimizer_state", optimizer_state)
    from safetensors.torch import save_file

    parent = Path(directory)
    check_own(parent, state.key, PARAMS)
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    work = Path(tempfile.mkdtemp(prefix=SAVING, dir=parent))
    try:
        with in_use(work):
            save_file({name: p.detach().cpu().contiguous().clone() for name, p in params.items()}, work / PARAMS)
            if optimizer_state is not None:
                write_values(work / OPTIMIZER, optimizer_state)
            write_json(work / PLAN, plan_to_dict(plan))
            end = saved_end(journal)
            write_json(work / STATE, state_to_dict(state, data_fingerprint(data, state.key), extra or {}, end))
            write_json(work / MANIFEST, {path.name: sha256(path) for path in sorted(work.iterdir())})
            for path in work.iterdir():
                path.chmod(0o600)
                sync_file(path)
            sync_directory(work)
            target = free_name(parent, state.step)
            os.rename(work, target)
            sync_directory(parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for old in whole_checkpoints(parent)[:-keep]:
        if old != target:
            remove(old)
    return target


def _check_kind(path: Path, files: Mapping[str, str]) -> None:
    if METADATA not in files and PARAMS not in files:
        raise CheckpointError(f"The file {path / MANIFEST} was changed after it was saved: it lacks {PARAMS}. {AWAY}")
    if OPTIMIZER not in files and (path / OPTIMIZER).exists():
        raise CheckpointError(
            f"The file {path / OPTIMIZER} is not in {MANIFEST}: one of the two was changed after it was saved. {AWAY}"
        )
    if PARAMS not in files:
        raise CheckpointError(
            f"Expected a checkpoint of dpfunc.save, got {path}, which save_sharded wrote: read it with "
            "dpfunc.checkpoint.load_sharded, and give each kind a directory of its own."
        )


def _state(values: Mapping[str, Any], plan: Plan, journal: Path | str | None) -> StepState:
    """The state of a run that goes on: as its journal says, or with a new key."""
    if journal is None:
        return with_new_key(state_from_dict(values, plan, {}), plan, secure_key())
    known = known_journal(values)
    runs = read_steps(journal, missing="refuse" if known is None else "empty", known=known)
    taken = runs.get(fingerprint(Key(bytes.fromhex(values["key"]))), {})
    check_journal(values, taken)
    return state_from_dict(values, plan, taken)


def load(
    directory: Path | str,
    *,
    plan: Plan,
    params: Params,
    data: Batch | str,
    journal: Path | str | None = None,
    without_journal: Literal["refuse", "new_key"] = "refuse",
) -> Checkpoint:
    """Read the newest whole checkpoint, and refuse one of another plan, data set or parameter set.

    The state that comes back repeats the steps after the checkpoint bit for bit, on the same data, at no cost; its
    ledger counts all steps in the journal, so that epsilon never shrinks.

    Without a journal it is unknown which steps were released after the checkpoint. With `without_journal="new_key"` the
    run goes on with a new key, so that no noise is used twice, and pays for each step that it takes. Steps that were
    released after this checkpoint are not in its ledger: if there were any, do not go on from here, but begin a new run
    whose ledger has them, dp_step.init(params, dpfunc.secure_key(), ledger). Save the run with the new key into another
    directory.

    Args:
        directory: as given to `save`.
        plan, data: of this run; must equal the saved ones.
        params: parameters of the right names, shapes and dtypes (their values do not matter).
        journal: the file of `Journal`.
        without_journal: what to do without one: `"refuse"`, or `"new_key"`, see above.

    Raises:
        CheckpointError: none there, damaged, or of another run; the difference is shown. No journal, or one that lacks
            steps which the checkpoint has, or lines which it had when the checkpoint was saved.
        InvalidArgument: both journal and without_journal="new_key".

    Guarantees:
        tests/checkpoint/test_local.py: the resumed run is bit-identical (test_resume_is_bit_identical) and epsilon
        never shrinks (test_epsilon_never_shrinks).

    >>> import tempfile
    >>> from dpfunc import clipping, sampling
    >>> plan = Plan(sampling.Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(folder, plan=plan, params={}, data="mails-2026")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.CheckpointError: Expected a checkpoint in ..., found none. Start a new run.
    """
    from safetensors.torch import load_file

    found, half = whole_checkpoints(Path(directory)), half_checkpoints(Path(directory))
    if half and (not found or half[-1].name > found[-1].name):
        logger.warning("The checkpoint %s is not whole and is passed over.", half[-1])
    if not found:
        there = f" What is there is not whole: {shorten([path.name for path in half])}." if half else ""
        raise CheckpointError(f"Expected a checkpoint in {directory}, found none.{there} Start a new run.")
    check_choice(journal, without_journal)
    path = found[-1]
    files = read_manifest(path)
    _check_kind(path, files)
    verify(path, files)
    values = read_json(path / STATE)
    check_schema(values, path)
    refuse("plan", path, plan_difference(plan, read_json(path / PLAN)))
    refuse_data(data, values, path)
    saved = load_file(path / PARAMS)
    refuse("parameter set", path, difference(described(saved), described(params)))
    state = _state(values, plan, journal)
    moved = {name: saved[name].to(param.device) for name, param in params.items()}
    optimizer_state = read_values(path / OPTIMIZER) if OPTIMIZER in files else None
    return Checkpoint(moved, optimizer_state, resumed(state), values["extra"], path)
