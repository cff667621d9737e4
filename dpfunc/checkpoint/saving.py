"""Save a run: every process its parts of the tensors, and one of them what all have alike. One process is one part."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.locks import in_use
from dpfunc._utils.processes import is_dtensor
from dpfunc._utils.validation import fail, integer, wrong_type
from dpfunc._utils.versions import check_sharding
from dpfunc.checkpoint import _folder as folder
from dpfunc.checkpoint._chain import known_end, sha256, sync_directory, sync_file
from dpfunc.checkpoint._format import data_fingerprint, plan_to_dict, state_to_dict
from dpfunc.checkpoint._resume_policy import NOTES, Note, family, known_notes, layout
from dpfunc.checkpoint._states import PARAMS, encode, write_tensors
from dpfunc.checkpoint.journal import journal_path, writing
from dpfunc.distributed._object_collectives import all_or_none, by_writer, check_agreement, joint_group, rank_and_size
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import fingerprint
from dpfunc.state import StepState, check_newest, check_own_plan, plan_digest
from dpfunc.types import Batch, Params

_FAILED = "No checkpoint was made, and the one before is still the newest"
_TYPES: dict[str, tuple[Any, str]] = {
    "plan": (Plan, "plan to be a dpfunc.Plan"),
    "state": (StepState, "state to be a StepState"),
    "params": (Mapping, "params to be a mapping name -> tensor"),
    "optimizer_state": ((Mapping, NoneType), "the result of optimizer.state_dict()"),
}


def save(
    directory: Path | str,
    *,
    params: Params,
    state: StepState,
    plan: Plan,
    data: Batch | str,
    ranks: Ranks | None = None,
    optimizer_state: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    journal: Path | str | None = None,
) -> Path:
    """Write a checkpoint; any number of processes, in any layout, can load it.

    All files go into a new directory, which is renamed when every process has confirmed that its part is on disk. A
    kill or an error at any moment before leaves the old checkpoint the newest, and is an error on all processes.

    Args:
        directory: holds one sub-directory a checkpoint; made when missing. Several processes share its file system.
        params, state, plan: of the run, after a step, the same on all processes.
        data: the data set (a pytree of tensors), or a string that names it: only its fingerprint is stored.
        ranks: as given to `make_dp_step`; all their processes call. None is one process.
        optimizer_state: `optimizer.state_dict()`: tensors and DTensors, numbers, strings, lists and dicts. What `load`
            could not read (numbers of numpy, an Enum) is refused here, and named.
        extra: JSON values of your own.
        keep: older checkpoints are removed when there are more than this, >= 1.
        journal: the file of `Journal`, if the run has one. The checkpoint remembers where it ends, so that `load`
            finds out when lines were lost since.

    Returns:
        The path of the checkpoint. It holds the key of the run (file mode 0600): as secret as the data.

    Raises:
        InvalidArgument: a bad argument, a state of another plan, or sharded tensors without ranks.
        StateReused: without a journal, a state after which this process released steps: nothing would count them.
        RankMismatch: the processes hold different states, plans or unsharded tensors: nothing was saved.
        CheckpointError: the directory has checkpoints of another run, or another process could not write its part.
        NotWritten: this process could not. UnsupportedModel: several processes with an older torch.

    Guarantees:
        tests/checkpoint/test_folder.py: nothing is overwritten (test_nothing_is_overwritten);
        tests/checkpoint/test_several_processes.py: a crash leaves the old checkpoint (test_a_crash_while_saving),
        differing processes are refused (test_processes_that_differ_save_nothing).

    >>> import dpfunc, tempfile, torch
    >>> poisson, flat = dpfunc.sampling.Poisson(100, 0.1), dpfunc.clipping.Flat(1.0)
    >>> plan = Plan(poisson, flat, noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> run = {"plan": plan, "data": torch.ones(100, 2), "params": {"w": torch.zeros(2)}}
    >>> dp_step = dpfunc.make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), plan)
    >>> state = dp_step.init(run["params"], dpfunc.secure_key())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run["journal"] = Path(folder) / "journal.jsonl"  # as in make_dp_step(..., journal=Journal(path, plan))
    ...     path = save(folder, state=state, **run)
    ...     checkpoint = dpfunc.load(folder, **run)
    >>> checkpoint.state == state._replace(journal=str(run["journal"]))  # with which it must go on
    True
    """
    if ranks is not None:
        check_sharding()
    file, parent = journal_path(journal), Path(directory)
    tensors: dict[str, Tensor] = {}
    given = {"plan": plan, "state": state, "params": params, "optimizer_state": optimizer_state}

    def prepare() -> dict[str, Any]:
        integer("keep", keep, minimum=1)
        for name, (kind, domain) in _TYPES.items():
            if not isinstance(given[name], kind):
                raise wrong_type(domain, name, given[name])
        check_own_plan(state, plan_digest(plan))
        if file is None:  # a journal has the later steps
            check_newest(state)
        encoded = encode("optimizer_state", None if optimizer_state is None else dict(optimizer_state), tensors)
        noise = encode("noise_state", state.noise_state, tensors)
        tensors.update({PARAMS + name: p.detach() for name, p in params.items()})
        check_unsharded(tensors, ranks)
        values = state_to_dict(state, data_fingerprint(data, state.key), extra)
        return {folder.PLAN: plan_to_dict(plan), folder.STATE: {**values, "optimizer": encoded, "noise": noise}}

    files = all_or_none(prepare, ranks, _FAILED)
    texts = {name: json.dumps(values) for name, values in files.items()}
    check_agreement({**texts, "directory": str(parent.resolve()), "keep": str(keep)}, tensors, ranks)
    files[folder.STATE]["layout"] = layout(params, ranks)
    group = None if ranks is None else all_or_none(partial(joint_group, ranks), ranks, _FAILED)
    with writing(parent, state.ledger, plan), ExitStack() as stack:
        work = parent / by_writer(partial(_begin, parent, state, stack), ranks, _FAILED)
        write_tensors(work, tensors, group)
        all_or_none(partial(_sign, work, group), ranks, _FAILED)
        made = by_writer(partial(_commit, work, files, keep, rank_and_size(ranks)[1], file), ranks, _FAILED)
    return parent / str(made)


def check_unsharded(tensors: Mapping[str, Tensor], ranks: Ranks | None) -> None:
    """Check that the tensors of a single process are not sharded: it would write, or read, its own parts only."""
    sharded = [name for name, tensor in tensors.items() if is_dtensor(tensor)]
    if sharded and ranks is None:
        held = f"tensors that several processes hold ({sharded[0]})"
        raise fail(f"ranks with {held}", "ranks", None, "Pass the ranks of make_dp_step, on all processes.")


def _notes(parent: Path) -> list[Note]:
    """Notes of the run in a directory; its first checkpoint begins their file."""
    before = folder.complete_checkpoints(parent)
    if not before:
        sync_file(parent / NOTES)
    return known_notes(parent / NOTES, folder.saved_state(before[-1])["notes"] if before else 0)


def _begin(parent: Path, state: StepState, stack: ExitStack) -> str:
    """Name of a new directory to write into; it is this process's until the stack ends, and then removed."""
    run = fingerprint(state.key)
    folder.check_own(parent, family(run, _notes(parent)) if folder.complete_checkpoints(parent) else {run})
    parent.mkdir(parents=True, exist_ok=True)
    folder.sweep(parent)
    work = Path(tempfile.mkdtemp(prefix=folder.SAVING, dir=parent))
    stack.callback(shutil.rmtree, work, ignore_errors=True)
    stack.enter_context(in_use(work))
    return work.name


def _sign(work: Path, group: dist.ProcessGroup | None) -> None:
    """Sync the files that this process wrote, and list their names and digests in `part-N.json`."""
    number = 0 if group is None else dist.get_rank(group)
    written = sorted(work.glob(f"__{number}_*"))
    for file in written:
        file.chmod(0o600)
        sync_file(file)
    folder.write_json(work / f"part-{number}.json", {file.name: sha256(file) for file in written})


def _commit(work: Path, files: Mapping[str, Mapping[str, Any]], keep: int, processes: int, journal: Path | None) -> str:
    """Make this checkpoint the newest one, all of whose parts are on disk; its name."""
    parent = work.parent
    parts = [work / f"part-{number}.json" for number in range(processes)]
    if not all(part.exists() for part in parts):
        raise CheckpointError(f"Expected {parent} to be on a file system that all processes share: parts are missing.")
    written = {name: value for part in parts for name, value in json.loads(part.read_text()).items()}
    end = None if journal is None else known_end(journal)._asdict()
    known = {"notes": len(_notes(parent)), "journal": end}
    folder.write_json(work / folder.STATE, {**files[folder.STATE], **known})
    folder.write_json(work / folder.PLAN, files[folder.PLAN])
    (work / folder.METADATA).chmod(0o600)
    shared = [work / name for name in (folder.METADATA, folder.PLAN, folder.STATE)]
    own = {file.name: sha256(file) for file in (*shared, *parts)}
    folder.write_json(work / folder.MANIFEST, {**own, **written})
    sync_directory(work)
    path = folder.free_name(parent, files[folder.STATE]["step"])
    os.rename(work, path)
    sync_directory(parent)
    for old in {*folder.all_checkpoints(parent)} - {*folder.complete_checkpoints(parent)[-keep:]}:
        folder.remove(old)
    return path.name
