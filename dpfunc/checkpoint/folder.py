"""A directory of checkpoints: names, lists of files with digests, and removal that a kill may interrupt.

May import: its folder, step and below. Privacy depends on it: yes.
"""

import json
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from dpfunc._utils.files import replace_file, sha256
from dpfunc._utils.validation import unique_json
from dpfunc.checkpoint._format import key_of
from dpfunc.errors import CheckpointError
from dpfunc.rng import Key, fingerprint

_NAME = re.compile(r"step-(\d{1,18})\.(\d{1,18})")
STATE, PLAN, MANIFEST, METADATA = "state.json", "plan.json", "manifest.json", ".metadata"


def all_checkpoints(parent: Path) -> list[Path]:
    """Folders of checkpoints, the one that was saved last at the end; others in the directory are not looked at."""
    return sorted((path for path in parent.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()), key=_place)


def complete_checkpoints(parent: Path) -> list[Path]:
    """Those of `all_checkpoints` that have all their files; their contents are not read."""
    return [
        path
        for path in all_checkpoints(parent)
        if (path / MANIFEST).is_file() and all((path / name).is_file() for name in read_manifest(path))
    ]


def _place(path: Path) -> tuple[int, int]:
    """Order of checkpoints: by the number of the save, since a run that went back has lower steps."""
    step, _, number = path.name.removeprefix("step-").partition(".")
    return int(number), int(step)


def free_name(parent: Path, step: int) -> Path:
    """A new name for each save, even of the same step: nothing is overwritten. Later saves have higher numbers."""
    last = max((_place(path)[0] for path in all_checkpoints(parent)), default=-1)
    return parent / f"step-{step:08d}.{last + 1:03d}"


def read_json(path: Path) -> Any:
    """The values in a file of a checkpoint, which must be JSON with no name twice in one object."""
    try:
        return unique_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _changed(path, f"it cannot be read: {reason}") from error


def _changed(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"The file {path} was changed after it was saved: {how}. Restore it; or move the folder of this checkpoint "
        "away, and the one before it counts."
    )


def read_manifest(path: Path) -> dict[str, str]:
    """Names of the files of a checkpoint and their digests."""
    files = read_json(path / MANIFEST)
    plain = isinstance(files, dict) and all(isinstance(digest, str) for digest in files.values())
    if not plain or not {STATE, PLAN, METADATA} <= files.keys() or any(Path(name).name != name for name in files):
        raise _changed(path / MANIFEST, "it is no list of the files of a checkpoint")
    return dict(files)


def saved_state(path: Path) -> dict[str, Any]:
    """The values in the state of a checkpoint, checked to have the fields that comparisons need."""
    values = read_json(path / STATE)
    try:
        key_of(values)
        int(values["notes"])
    except (TypeError, KeyError, ValueError) as error:
        raise _changed(path / STATE, "it has no key of a run, or no number of notes") from error
    return dict(values)


def newest_key(parent: Path) -> Key:
    """The key of the newest complete checkpoint in a directory that has one."""
    return key_of(saved_state(complete_checkpoints(parent)[-1]))


def check_own(parent: Path, own: Container[str]) -> None:
    """Check that all checkpoints in a directory have keys of one run: others could be loaded or removed."""
    for path in complete_checkpoints(parent):
        if fingerprint(key_of(saved_state(path))) not in own:
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


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file that only its owner can read, from its first byte on: complete or not at all, and on disk."""
    replace_file(path, json.dumps(values, indent=1), 0o600)
