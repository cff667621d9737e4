"""Save a run of several processes: every process its parts, and one of them what all have alike."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.validation import whole
from dpfunc._utils.versions import check_sharding
from dpfunc.checkpoint.chain import sync_directory
from dpfunc.checkpoint.format import (
    AWAY,
    MANIFEST,
    NAME,
    PLAN,
    PREFIX,
    STATE,
    check_own,
    data_fingerprint,
    free_name,
    half_checkpoints,
    read_json,
    remove,
    sha256,
    state_to_dict,
    sweep,
    sync_file,
    whole_checkpoints,
    write_json,
)
from dpfunc.checkpoint.journal import saved_end
from dpfunc.checkpoint.plan_json import plan_to_dict
from dpfunc.checkpoint.resume_policy import NOTES, family, known_notes, read_notes
from dpfunc.checkpoint.run_layout import layout
from dpfunc.checkpoint.tensors import METADATA, PARAMS, encode, write_tensors
from dpfunc.distributed.launch import is_writer
from dpfunc.distributed.object_collectives import all_or_none, check_agreement, joint_group, rank_and_size, shared
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import fingerprint
from dpfunc.state import StepState
from dpfunc.types import Batch, Params

LATEST = "LATEST"
FAILED = "No checkpoint was made, and the one before is still the newest"


def save_sharded(
    directory: Path | str,
    *,
    params: Params,
    state: StepState,
    plan: Plan,
    data: Batch | str,
    ranks: Ranks | None,
    optimizer_state: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    journal: Path | str | None = None,
) -> Path:
    """Write a checkpoint of all processes; any other number of them, in any other layout, can load it.

    Each process writes its parts of DTensors; replicated tensors are written once. When every process has confirmed
    that its part is on disk, the file LATEST gets the new name. A kill or an error at any moment before leaves the
    old checkpoint the newest, and is an error on all processes.

    Args:
        directory: on a file system that all processes share; holds one sub-directory a checkpoint.
        params, state, plan: of the run, after a step, the same on all processes.
        data: the data set (a pytree of tensors), or a string that names it: only its fingerprint is stored.
        ranks: as given to `make_dp_step`; all their processes call. None is one process.
        optimizer_state: `optimizer.state_dict()`: tensors and DTensors, numbers, strings, lists and dicts.
        extra: JSON values of your own.
        keep: older checkpoints are removed when there are more than this, >= 1.
        journal: the file of `Journal`, if the run has one. The checkpoint remembers where it ends, so that a load
            finds out when lines were lost since.

    Returns:
        The path of the checkpoint. Its state.json holds the key of the run (file mode 0600): as secret as the data.

    Raises:
        InvalidArgument: keep < 1, or what cannot be saved.
        RankMismatch: the processes hold different states, plans or whole tensors: nothing was saved.
        CheckpointError: another process could not write its part.
        UnsupportedModel: an older torch, see `dpfunc._utils.versions.check_sharding`.

    Guarantees:
        tests/checkpoint/test_sharded.py: a crash leaves the old checkpoint (test_a_crash_while_saving),
        nothing is overwritten (test_nothing_is_overwritten), differing processes are refused
        (test_processes_that_differ_save_nothing).

    >>> import tempfile, torch
    >>> from dpfunc import clipping, sampling
    >>> from dpfunc.checkpoint import load_sharded
    >>> from dpfunc.rng import secure_key
    >>> from dpfunc.step import make_dp_step
    >>> plan = Plan(sampling.Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> run = {"plan": plan, "data": torch.ones(100, 2), "params": {"w": torch.zeros(2)}, "ranks": None}
    >>> dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), plan)
    >>> state = dp_step.init(run["params"], secure_key())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run["journal"] = Path(folder) / "journal.jsonl"
    ...     path = save_sharded(folder, state=state, **run)
    ...     checkpoint = load_sharded(folder, **run)
    >>> checkpoint.state == state
    True
    """
    check_sharding()
    parent = Path(directory)
    tensors: dict[str, Tensor] = {}

    def prepare() -> dict[str, Any]:
        whole("keep", keep, minimum=1)
        encoded = None if optimizer_state is None else encode(optimizer_state, tensors)
        tensors.update({PARAMS + name: p.detach() for name, p in params.items()})
        values = state_to_dict(state, data_fingerprint(data, state.key), extra or {})
        return {PLAN: plan_to_dict(plan), STATE: {**values, "optimizer": encoded, "layout": {}, "notes": 0}}

    files = all_or_none(prepare, ranks, FAILED)
    said = {name: json.dumps(values) for name, values in files.items()}
    check_agreement({**said, "directory": str(parent.resolve()), "keep": str(keep)}, tensors, ranks)
    files[STATE]["layout"] = layout(params, ranks)
    group = None if ranks is None else all_or_none(partial(joint_group, ranks), ranks, FAILED)
    made = all_or_none(partial(_new_directory, parent, state, ranks), ranks, FAILED)
    path = parent / shared(made, ranks).decode()
    try:
        write_tensors(path, tensors, group)
        all_or_none(partial(_sign, path, group), ranks, FAILED)
        all_or_none(partial(_commit, path, files, keep, ranks, journal), ranks, FAILED)
    finally:
        if is_writer(ranks) and latest(parent) != path.name:
            remove(path)
    return path


def latest(parent: Path) -> str | None:
    """The name of the newest checkpoint; None before the first.

    Raises:
        CheckpointError: the file that says it holds something else.
    """
    pointer = parent / LATEST
    if not pointer.exists():
        return None
    name = pointer.read_bytes().decode("utf-8", "replace").strip()
    if not NAME.fullmatch(name):
        raise CheckpointError(
            f"Expected the name of a checkpoint in {pointer}, got something else: it was changed. Write the name of "
            f"the newest whole one into it, as {PREFIX}00000012.000."
        )
    return name


def _count_notes(parent: Path) -> int:
    """The number of notes; the first checkpoint of a folder begins their file."""
    name = latest(parent)
    if name is None:
        (parent / NOTES).touch()
        sync_file(parent / NOTES)
    before = parent / (name or "") / STATE
    values = read_json(before) if before.exists() else {"notes": 0}
    if not isinstance(values, dict) or not isinstance(values.get("notes"), int):
        raise CheckpointError(f"The file {before} was changed after it was saved: it lacks the number of notes. {AWAY}")
    return len(known_notes(parent / NOTES, values["notes"]))


def _new_directory(parent: Path, state: StepState, ranks: Ranks | None) -> bytes:
    if not is_writer(ranks):
        return b""
    if latest(parent) is not None:  # without its notes, what belongs to this run is not known
        _count_notes(parent)
    check_own(parent, state.key, METADATA, family(fingerprint(state.key), read_notes(parent / NOTES)))
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    path = free_name(parent, state.step)
    path.mkdir(mode=0o700)
    return path.name.encode()


def _sign(path: Path, group: dist.ProcessGroup | None) -> None:
    """Sync the files that this process wrote, and list their names and digests in `part-N.json`."""
    number = 0 if group is None else dist.get_rank(group)
    for file in sorted(path.glob(f"__{number}_*")):
        file.chmod(0o600)
        sync_file(file)
    write_json(path / f"part-{number}.json", {file.name: sha256(file) for file in sorted(path.glob(f"__{number}_*"))})


def _commit(
    path: Path, files: Mapping[str, Mapping[str, Any]], keep: int, ranks: Ranks | None, journal: Path | str | None
) -> None:
    """Make this checkpoint the newest one; all its parts are on disk."""
    if not is_writer(ranks):
        return
    parent = path.parent
    parts = [path / f"part-{number}.json" for number in range(rank_and_size(ranks)[1])]
    if not all(part.exists() for part in parts):
        raise CheckpointError(f"Expected {parent} to be on a file system that all processes share: parts are missing.")
    written = {name: value for part in parts for name, value in json.loads(part.read_text()).items()}
    notes = _count_notes(parent)
    end = saved_end(journal)
    write_json(path / STATE, {**files[STATE], "notes": notes, "journal": None if end is None else end._asdict()})
    write_json(path / PLAN, files[PLAN])
    (path / METADATA).chmod(0o600)
    own = {name: sha256(path / name) for name in (METADATA, PLAN, STATE)}
    write_json(path / MANIFEST, {**own, **written})
    sync_directory(path)
    pointer = parent / f".{LATEST}"
    pointer.unlink(missing_ok=True)
    pointer.write_text(path.name + "\n")
    sync_file(pointer)
    sync_directory(parent)
    os.replace(pointer, parent / LATEST)
    sync_directory(parent)
    # In the order in which they were made: a run that went back has lower steps now.
    kept = sorted(whole_checkpoints(parent), key=lambda each: (each / MANIFEST).stat().st_mtime_ns)[-keep:]
    for old in (*whole_checkpoints(parent), *half_checkpoints(parent)):  # also what a kill left unfinished
        if old not in (*kept, path):
            remove(old)
