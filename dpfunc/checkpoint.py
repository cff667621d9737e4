"""Checkpoints: params, optimizer, state and plan in one directory that is there whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dpfunc.accounting import Ledger
from dpfunc.checks import shorten
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.journal import read_steps, sync_directory
from dpfunc.plan import Plan
from dpfunc.plan_json import plan_difference, plan_to_dict
from dpfunc.rng import Key, fingerprint
from dpfunc.step import StepState, replay
from dpfunc.types import Batch, Params

SCHEMA = 1
PREFIX = "step-"
PARAMS, OPTIMIZER, STATE, PLAN, MANIFEST = (
    "params.safetensors", "optimizer.pt", "state.json", "plan.json", "manifest.json",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What `load` gives back. `params` and `optimizer_state` are released; `state` holds the key and is not."""

    params: dict[str, torch.Tensor]
    optimizer_state: Mapping[str, Any] | None
    state: StepState
    extra: Mapping[str, Any]
    path: Path


def data_fingerprint(data: Batch | str, key: Key) -> str:
    """A fingerprint of a data set that says nothing to who lacks the key: keyed BLAKE2b over all bytes and shapes.

    Args:
        data: a pytree of tensors, or a string that names the data set (a version, a hash of its files).

    >>> from dpfunc.rng import insecure_key
    >>> data_fingerprint("mails-2026-01", insecure_key(0)) == data_fingerprint("mails-2026-02", insecure_key(0))
    False
    """
    digest = hashlib.blake2b(key=key.secret, digest_size=16)
    if isinstance(data, str):
        digest.update(b"name" + data.encode())
        return digest.hexdigest()
    for path, leaf in pytree.tree_leaves_with_path(data):
        digest.update(f"{pytree.keystr(path)}{leaf.dtype}{tuple(leaf.shape)}".encode())
        digest.update(memoryview(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


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
        InvalidArgument: keep < 1.

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
    if keep < 1:
        raise InvalidArgument(f"Expected keep >= 1, got keep={keep}.")
    from safetensors.torch import save_file

    parent = Path(directory)
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".saving-", dir=parent))
    try:
        save_file({name: p.detach().cpu().contiguous().clone() for name, p in params.items()}, work / PARAMS)
        if optimizer_state is not None:
            torch.save(dict(optimizer_state), work / OPTIMIZER)
        _write_json(work / PLAN, plan_to_dict(plan))
        _write_json(work / STATE, _state_to_dict(state, data_fingerprint(data, state.key), extra or {}))
        _write_json(work / MANIFEST, {path.name: _sha256(path) for path in sorted(work.iterdir())})
        for path in work.iterdir():
            path.chmod(0o600)
            _sync_file(path)
        sync_directory(work)
        target = _free_name(parent, state.step)
        os.rename(work, target)
        sync_directory(parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for old in _checkpoints(parent)[:-keep]:
        shutil.rmtree(old)
    return target


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
        CheckpointError: none there, damaged, or of another run; the difference is shown.

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

    found = _checkpoints(Path(directory))
    if not found:
        raise CheckpointError(f"Expected a checkpoint in {directory}, found none. Start a new run.")
    path = found[-1]
    _verify(path)
    values = json.loads((path / STATE).read_text())
    if values.get("schema") != SCHEMA:
        raise CheckpointError(f"Expected schema {SCHEMA} in {path / STATE}, got {values.get('schema')!r}.")
    _refuse("plan", path, plan_difference(plan, json.loads((path / PLAN).read_text())))
    key = Key(bytes.fromhex(values["key"]))
    if values["data"] != data_fingerprint(data, key):
        _refuse("data set", path, ["the data differ from those the run was started on"])
    saved = load_file(path / PARAMS)
    _refuse("parameter set", path, _params_difference(params, saved))
    state = _state_from_dict(values, key, plan, None if journal is None else Path(journal))
    moved = {name: saved[name].to(param.device) for name, param in params.items()}
    optimizer = path / OPTIMIZER
    optimizer_state = torch.load(optimizer, weights_only=True) if optimizer.exists() else None
    return Checkpoint(moved, optimizer_state, replay(state), values["extra"], path)


def _state_to_dict(state: StepState, data: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    if state.noise_state != ():
        raise CheckpointError("Expected a mechanism without state; its state cannot be saved yet.")
    return {
        "schema": SCHEMA,
        "step": state.step,
        "limit": state.limit,
        "charged": state.charged,
        "key": state.key.secret.hex(),
        "ledger": json.loads(state.ledger.to_json()),
        "data": data,
        "extra": dict(extra),
    }


def _state_from_dict(values: Mapping[str, Any], key: Key, plan: Plan, journal: Path | None) -> StepState:
    charged, ledger = int(values["charged"]), Ledger.from_json(json.dumps(values["ledger"]))
    if journal is not None:
        taken = read_steps(journal).get(fingerprint(key), {})
        later = max(taken, default=-1) + 1
        if later > charged:
            ledger = ledger.compose(Ledger(plan.events(charged, later), plan.adjacency))
            charged = later
    return StepState(int(values["step"]), int(values["limit"]), charged, key, (), ledger)


def _params_difference(params: Params, saved: Params) -> list[str]:
    described = [
        {name: f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}" for name, p in side.items()}
        for side in (saved, params)
    ]
    return [
        f"{name}: saved {described[0].get(name, 'absent')}, now {described[1].get(name, 'absent')}"
        for name in sorted(described[0].keys() | described[1].keys())
        if described[0].get(name) != described[1].get(name)
    ]


def _refuse(what: str, path: Path, difference: list[str]) -> None:
    if difference:
        raise CheckpointError(
            f"The checkpoint {path} belongs to another {what}: {shorten(difference)}. Resume with what the run was "
            "started with, or start a new run whose ledger contains the old one: dp_step.init(params, key, ledger)."
        )


def _checkpoints(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob(f"{PREFIX}*") if (path / MANIFEST).exists())


def _free_name(parent: Path, step: int) -> Path:
    """A new name for each save, also of the same step: nothing is ever overwritten. Later names sort later."""
    names = (parent / f"{PREFIX}{step:08d}.{copy:03d}" for copy in itertools.count())
    return next(name for name in names if not name.exists())


def _verify(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    for name, expected in manifest.items():
        if not (path / name).exists() or _sha256(path / name) != expected:
            raise CheckpointError(f"The file {path / name} is missing or was changed after it was saved.")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1))


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
