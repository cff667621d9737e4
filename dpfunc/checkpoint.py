"""Checkpoints: params, optimizer, state and plan in one directory that is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpfunc.checks import fail, whole
from dpfunc.errors import CheckpointError
from dpfunc.journal import read_steps, sync_directory
from dpfunc.plan import Plan
from dpfunc.plan_json import plan_difference, plan_to_dict
from dpfunc.rng import Key, fingerprint
from dpfunc.saved import (
    MANIFEST,
    PLAN,
    PREFIX,
    STATE,
    Checkpoint,
    check_journal,
    check_own,
    check_schema,
    data_fingerprint,
    described,
    difference,
    free_name,
    refuse,
    refuse_data,
    sha256,
    state_from_dict,
    state_to_dict,
    sync_file,
    verify,
    whole_checkpoints,
    write_json,
)
from dpfunc.state import StepState, resumed
from dpfunc.types import Batch, Params

__all__ = ["MANIFEST", "PREFIX", "Checkpoint", "data_fingerprint", "load", "save"]

PARAMS, OPTIMIZER = "params.safetensors", "optimizer.pt"


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
) -> Path:
    """Write a checkpoint: a new directory, synced, then renamed into place. A kill at any moment leaves the old one.

    Args:
        directory: holds one sub-directory a checkpoint; made when missing.
        params, state, plan: of the run, after a step.
        data: the data set (a pytree of tensors), or a string that names it: only its fingerprint is stored.
        optimizer_state: `optimizer.state_dict()`: tensors, numbers, strings, lists and dicts.
        extra: JSON values of your own.
        keep: older checkpoints are removed when there are more than this, >= 1.

    Returns:
        The path of the checkpoint. It holds the key of the run (file mode 0600): as secret as the data.

    Raises:
        InvalidArgument: a bad keep, optimizer_state, extra or data.
        CheckpointError: the directory has checkpoints of another run, or of `save_sharded`.

    >>> import tempfile
    >>> from dpfunc import clipping, sampling
    >>> from dpfunc.rng import secure_key
    >>> from dpfunc.step import make_dp_step
    >>> plan = Plan(sampling.Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> data, params = torch.ones(100, 2), {"w": torch.zeros(2)}
    >>> dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), plan)
    >>> state = dp_step.init(params, secure_key())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(folder, params=params, state=state, plan=plan, data=data)
    ...     checkpoint = load(folder, plan=plan, params=params, data=data)
    >>> checkpoint.state == state
    True
    """
    keep = whole("keep", keep, minimum=1)
    if optimizer_state is not None and not isinstance(optimizer_state, Mapping):
        raise fail("the result of optimizer.state_dict()", "optimizer_state", type(optimizer_state).__name__)
    from safetensors.torch import save_file

    parent = Path(directory)
    check_own(parent, state.key, PARAMS)
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".saving-", dir=parent))
    try:
        save_file({name: p.detach().cpu().contiguous().clone() for name, p in params.items()}, work / PARAMS)
        if optimizer_state is not None:
            torch.save(dict(optimizer_state), work / OPTIMIZER)
        write_json(work / PLAN, plan_to_dict(plan))
        write_json(work / STATE, state_to_dict(state, data_fingerprint(data, state.key), extra or {}))
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
            shutil.rmtree(old)
    return target


def _check_kind(path: Path, files: Mapping[str, str]) -> None:
    if PARAMS not in files:
        raise CheckpointError(
            f"Expected a checkpoint of dpfunc.save, got {path}, which save_sharded wrote: read it with "
            "dpfunc.distributed_checkpoint.load_sharded, and give each kind a directory of its own."
        )


def load(
    directory: Path | str, *, plan: Plan, params: Params, data: Batch | str, journal: Path | str | None = None
) -> Checkpoint:
    """Read the newest whole checkpoint, and refuse one of another plan, data set or parameter set.

    The state that comes back repeats the steps after the checkpoint bit for bit, on the same data, at no cost; its
    ledger counts all steps in the journal, so that epsilon never shrinks.

    Args:
        directory: as given to `save`.
        plan, data: of this run; must equal the saved ones.
        params: parameters of the right names, shapes and dtypes (their values do not matter).
        journal: the file of `Journal`, if the run has one.

    Raises:
        CheckpointError: none there, damaged, or of another run; the difference is shown. A journal that lacks steps
            which the checkpoint has.

    Guarantees:
        tests/test_checkpoint.py: the resumed run is bit-identical (test_resume_is_bit_identical) and epsilon never
        shrinks (test_epsilon_never_shrinks).

    >>> import tempfile
    >>> from dpfunc import clipping, sampling
    >>> plan = Plan(sampling.Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(folder, plan=plan, params={}, data="mails-2026")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.CheckpointError: Expected a checkpoint in ..., found none. Start a new run.
    """
    from safetensors.torch import load_file

    found = whole_checkpoints(Path(directory))
    if not found:
        raise CheckpointError(f"Expected a checkpoint in {directory}, found none. Start a new run.")
    path = found[-1]
    files = json.loads((path / MANIFEST).read_text())
    _check_kind(path, files)
    verify(path, files)
    values = json.loads((path / STATE).read_text())
    check_schema(values, path)
    refuse("plan", path, plan_difference(plan, json.loads((path / PLAN).read_text())))
    refuse_data(data, values, path)
    saved = load_file(path / PARAMS)
    refuse("parameter set", path, difference(described(saved), described(params)))
    run = fingerprint(Key(bytes.fromhex(values["key"])))
    taken = {} if journal is None else read_steps(Path(journal)).get(run, {})
    if journal is not None:
        check_journal(values, taken)
    state = state_from_dict(values, plan, taken)
    moved = {name: saved[name].to(param.device) for name, param in params.items()}
    optimizer = path / OPTIMIZER
    optimizer_state = torch.load(optimizer, weights_only=True) if optimizer.exists() else None
    return Checkpoint(moved, optimizer_state, resumed(state), values["extra"], path)
