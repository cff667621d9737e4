"""The files of a checkpoint: the values that describe a run, and the checks that they belong to it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dpfunc._utils.locks import abandoned
from dpfunc._utils.validation import shorten, unique_json, wrong_type
from dpfunc.accounting import Ledger
from dpfunc.checkpoint.chain import replace_file
from dpfunc.checkpoint.journal import Taken
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint
from dpfunc.state import StepState, plan_digest
from dpfunc.types import Batch

SCHEMA = 3
_PREFIX = "step-"
NAME = re.compile(r"step-(\d{1,18})\.(\d{1,18})")
SAVING, REMOVING = ".saving-", ".removing-"
STATE, PLAN, MANIFEST, METADATA = "state.json", "plan.json", "manifest.json", ".metadata"
_AWAY = "Restore it; or move the folder of this checkpoint away, and the one before it counts."


@dataclass(frozen=True)
class Checkpoint:
    """Result of `load`. `params` and `optimizer_state` are released; `state` holds the key and is not."""

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
        digest.update(b"name" + data.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
    for path, leaf in pytree.tree_leaves_with_path(data):
        if not isinstance(leaf, torch.Tensor):
            raise wrong_type("data to be a pytree of tensors, or a string that names it", "data", leaf)
        digest.update(f"{pytree.keystr(path)}{leaf.dtype}{tuple(leaf.shape)}".encode())
        digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_to_dict(state: StepState, data: str = "", extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A state as JSON values, with its key, and without that of the noise mechanism, which can have tensors."""
    try:
        json.dumps(dict(extra or {}))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"Expected extra to hold JSON values, got others: {error}.") from error
    return {
        "schema": SCHEMA,
        "step": state.step,
        "limit": state.limit,
        "charged": state.charged,
        "key": state.key.secret.hex(),
        "guessable": state.key.guessable,
        "drawn": state.drawn,
        "num_records": state.num_records,
        "ledger": json.loads(state.ledger.to_json()),
        "released": state.released,
        "data": data,
        "extra": dict(extra or {}),
    }


def state_from_dict(values: Mapping[str, Any], plan: Plan, taken: Mapping[int, Taken]) -> StepState:
    """The state from `state_to_dict`, charged for every step in the journal, which may be repeated bit for bit."""
    charged, ledger = int(values["charged"]), Ledger.from_json(json.dumps(values["ledger"]))
    later = max(taken, default=-1) + 1
    if later > charged:
        ledger = ledger.compose(Ledger(plan.events(charged, later), plan.adjacency))
        charged = later
    key = Key(bytes.fromhex(values["key"]), guessable=bool(values["guessable"]))
    step = int(values["step"])
    released = dict(values["released"]) | {number: line.release for number, line in taken.items() if number >= step}
    limit, repeated = int(values["limit"]), tuple(sorted(released.items()))
    drawn, count = bool(values["drawn"]), values["num_records"]
    return StepState(step, limit, charged, key, (), ledger, repeated, plan_digest(plan), drawn, count)


def key_of(values: Mapping[str, Any]) -> Key:
    """The key of a saved state, for fingerprints."""
    return Key(bytes.fromhex(values["key"]))


def check_path(journal: object) -> None:
    """Refuse a journal that is not named by its path."""
    if journal is not None and not isinstance(journal, (str, os.PathLike)):
        raise wrong_type("the path of a journal", "journal", journal, "Of a Journal pass journal.path.")


def read_json(path: Path) -> Any:
    """The values in a file of a checkpoint, which must be JSON with no name twice in one object."""
    try:
        return unique_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"The file {path} cannot be read: {reason}. It was changed after it was saved. {_AWAY}"
        ) from error


def describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """A type and a shape in words.

    >>> describe(torch.float32, (3, 2))
    'float32 (3, 2)'
    """
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def difference(saved: Mapping[str, Any], now: Mapping[str, Any], show: Callable[[Any], str] = str) -> list[str]:
    """One line for each name whose value differs.

    >>> difference({"w": "float32 (3,)"}, {"w": "float32 (4,)"})
    ['w: saved float32 (3,), now float32 (4,)']
    """
    pairs = {name: (saved.get(name, "absent"), now.get(name, "absent")) for name in sorted(saved.keys() | now.keys())}
    return [f"{name}: saved {show(was)}, now {show(has)}" for name, (was, has) in pairs.items() if was != has]


def refuse(what: str, path: Path, lines: list[str]) -> None:
    """Refuse a checkpoint of another run if there are any lines of differences."""
    if lines:
        raise CheckpointError(
            f"The checkpoint {path} belongs to another {what}: {shorten(lines)}. Resume with what the run was "
            "started with, or start a new run whose ledger contains the old one: dp_step.init(params, key, ledger)."
        )


def all_checkpoints(parent: Path) -> list[Path]:
    """Folders of checkpoints, the one that was saved last at the end; others in the directory are not looked at."""
    found = {path: NAME.fullmatch(path.name) for path in parent.glob(f"{_PREFIX}*")}
    return sorted((path for path in found if found[path] and path.is_dir()), key=_place)


def complete_checkpoints(parent: Path) -> list[Path]:
    """Those of `all_checkpoints` that have all their files; their contents are not read."""

    def complete(path: Path) -> bool:
        return (path / MANIFEST).is_file() and all((path / name).is_file() for name in read_manifest(path))

    return [path for path in all_checkpoints(parent) if complete(path)]


def read_manifest(path: Path) -> dict[str, str]:
    """Names of the files of a checkpoint and their digests."""
    files = read_json(path / MANIFEST)
    plain = isinstance(files, dict) and all(isinstance(digest, str) for digest in files.values())
    if not plain or not {STATE, PLAN, METADATA} <= files.keys() or any(Path(name).name != name for name in files):
        raise CheckpointError(
            f"The file {path / MANIFEST} was changed after it was saved: it is no list of the files of a checkpoint. "
            f"{_AWAY}"
        )
    return dict(files)


def _place(path: Path) -> tuple[int, int]:
    """Order of checkpoints: by the number of the save, since a run that went back has lower steps."""
    step, _, number = path.name.removeprefix(_PREFIX).partition(".")
    return int(number), int(step)


def free_name(parent: Path, step: int) -> Path:
    """A new name for each save, also of the same step: nothing is ever overwritten. Later saves have higher numbers."""
    last = max((_place(path)[0] for path in all_checkpoints(parent)), default=-1)
    return parent / f"{_PREFIX}{step:08d}.{last + 1:03d}"


def remove(path: Path) -> None:
    """Remove a folder, if it is there. It first gets a name that nothing reads; what a kill leaves, `sweep` removes.

    Guarantees:
        tests/checkpoint/test_one_process.py::test_a_kill_while_an_old_checkpoint_is_removed.
    """
    if not path.exists():
        return
    gone = path.with_name(f"{REMOVING}{path.name}-{secrets.token_hex(4)}")
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove what killed processes left of saves and removals in a directory: it can hold the key of the run.

    Saves of processes that are still at work stay.

    Guarantees:
        tests/checkpoint/test_one_process.py::test_what_killed_saves_left_is_swept.
    """
    for path in parent.glob(f"{REMOVING}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(f"{SAVING}*"):
        if abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def saved_state(path: Path) -> dict[str, Any]:
    """The values in the state of a checkpoint; those by which others are compared with it are there."""
    values = read_json(path / STATE)
    try:
        key_of(values)
        int(values["notes"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"The file {path / STATE} was changed after it was saved: it has no key of a run, or no number of notes. "
            f"{_AWAY}"
        ) from error
    return dict(values)


def saved_key(path: Path) -> Key:
    """The key in the state of a checkpoint."""
    return key_of(saved_state(path))


def check_own(parent: Path, own: Container[str]) -> None:
    """Check that all checkpoints in a directory have keys of one run: others could be loaded or removed."""
    for path in complete_checkpoints(parent):
        if fingerprint(saved_key(path)) not in own:
            raise CheckpointError(
                f"Expected only checkpoints of this run in {parent}, found {path.name} of another run: a load could "
                "take it for one of this run. Give each run a directory of its own; they may share a journal. Nothing "
                "was written; the steps that this run has taken count."
            )


def verify(path: Path, files: Mapping[str, str]) -> None:
    """Check that files of a checkpoint (name -> digest) are unchanged since they were saved."""
    for name, expected in files.items():
        if not (path / name).exists() or sha256(path / name) != expected:
            raise CheckpointError(f"The file {path / name} is missing or was changed after it was saved.")


def sha256(path: Path) -> str:
    """The digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file that only its owner can read, from its first byte on: complete or not at all, and on disk."""
    replace_file(path, json.dumps(values, indent=1), 0o600)


def sync_file(path: Path) -> None:
    """Wait until a file is on disk."""
    with open(path, "r+b") as file:  # Windows syncs what can be written
        os.fsync(file.fileno())
