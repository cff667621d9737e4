"""Save a run, and load it with any number of processes: each has its parts of the tensors, one what all have alike.

May import: its folder, step and below. Privacy depends on it: yes.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.files import SAVING, remove, sha256, sweep, sync_directory, sync_file
from dpfunc._utils.locks import in_use
from dpfunc._utils.parts import is_dtensor
from dpfunc._utils.validation import fail, integer, one_of, refuse, shorten, wrong_type
from dpfunc.checkpoint import _format as form
from dpfunc.checkpoint import folder
from dpfunc.checkpoint._resume_policy import NOTES, History, LaterRuns, Note, known_notes, layout, lineage_of, resume
from dpfunc.checkpoint._states import PARAMS, decode, empties, empty, encode, read_table, read_tensors, write_tensors
from dpfunc.checkpoint.chain import Head, append_line, known_end, locked, read_chain
from dpfunc.checkpoint.journal import count_steps, journal_path, read_steps
from dpfunc.checkpoint.not_written import writing
from dpfunc.distributed._object_collectives import all_or_none, by_writer, check_agreement, joint_group, rank_and_size
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint, numbers_of_numpy, secure_key
from dpfunc.state import StepState, check_newest, check_own_plan, plan_digest, resumed
from dpfunc.types import Batch, Params

_FAILED = "No checkpoint was made, and the one before is still the newest"
_NOT_LOADED = "No checkpoint was loaded"
_logger = logging.getLogger(__name__)
_TYPES: dict[str, tuple[Any, str]] = {
    "plan": (Plan, "plan to be a dpfunc.Plan"),
    "state": (StepState, "state to be a StepState"),
    "params": (Mapping, "params to be a mapping name -> tensor"),
    "optimizer_state": ((Mapping, NoneType), "the result of optimizer.state_dict()"),
}


@dataclass(frozen=True)
class Checkpoint:
    """A run as `load` has read it, ready for its next step.

    Args:
        params, optimizer_state: laid out as `load` says. Released.
        state: to take the next step from. It holds the key of the run, and is not released.
        extra: the JSON values that `save` was given. path: of the checkpoint.
    """

    params: dict[str, Tensor]
    optimizer_state: Mapping[str, Any] | None
    state: StepState
    extra: Mapping[str, Any]
    path: Path


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
        extra: JSON values of your own. keep: older checkpoints are removed when there are more than this, >= 1.
        journal: the file of `Journal`, if the run has one. The checkpoint remembers where it ends, so that `load`
            finds out when lines were lost since.

    Returns:
        The path of the checkpoint. It holds the key of the run (file mode 0600): as secret as the data.

    Raises:
        InvalidArgument: a bad argument, a state of another plan, or sharded tensors without ranks.
        StateReused: without a journal, a state after which this process released steps: nothing would count them.
        RankMismatch: the processes hold different states, plans or unsharded tensors: nothing was saved.
        CheckpointError: the directory has checkpoints of another run, or another process could not write its part.
        NotWritten: this process could not.

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
        _check_unsharded(tensors, ranks)
        values = form.state_to_dict(state, form.data_fingerprint(data, state.key), extra)
        return {folder.PLAN: form.plan_to_dict(plan), folder.STATE: {**values, "optimizer": encoded, "noise": noise}}

    files = all_or_none(prepare, ranks, _FAILED)
    texts = {name: json.dumps(values) for name, values in files.items()}
    check_agreement({**texts, "directory": str(parent.resolve()), "keep": str(keep)}, tensors, ranks)
    files[folder.STATE] |= {"layout": layout(params, ranks), "numbers": numbers_of_numpy()}
    group = None if ranks is None else all_or_none(partial(joint_group, ranks), ranks, _FAILED)
    with writing(parent, state.ledger, plan), ExitStack() as stack:
        work = parent / by_writer(partial(_new_work_folder, parent, state, stack), ranks, _FAILED)
        write_tensors(work, tensors, group)
        all_or_none(partial(_list_own_files, work, group), ranks, _FAILED)
        made = by_writer(partial(_commit, work, files, keep, rank_and_size(ranks)[1], file), ranks, _FAILED)
    return parent / str(made)


def _check_unsharded(tensors: Mapping[str, Tensor], ranks: Ranks | None) -> None:
    """Check that the tensors of a single process are not sharded: it would write, or read, its own parts only."""
    sharded = [name for name, tensor in tensors.items() if is_dtensor(tensor)]
    if sharded and ranks is None:
        raise fail(
            f"ranks with tensors that several processes hold ({sharded[0]})", "ranks", None,
            "Pass the ranks of make_dp_step, on all processes.",
        )  # fmt: skip


def _notes(parent: Path) -> list[Note]:
    """Notes of the run in a directory; its first checkpoint begins their file."""
    before = folder.complete_checkpoints(parent)
    if not before:
        sync_file(parent / NOTES)
    return known_notes(parent / NOTES, folder.saved_state(before[-1])["notes"] if before else 0)


def _check_own(parent: Path, key: Key) -> None:
    """Check that the checkpoints in a directory are of the run with this key, or of its lineage."""
    own = fingerprint(key)
    folder.check_own(parent, lineage_of(own, _notes(parent)) if folder.complete_checkpoints(parent) else {own})


def _new_work_folder(parent: Path, state: StepState, stack: ExitStack) -> str:
    """Name of a new directory to write into; it is this process's until the stack ends, and then removed."""
    _check_own(parent, state.key)
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    work = Path(tempfile.mkdtemp(prefix=SAVING, dir=parent))
    stack.callback(shutil.rmtree, work, ignore_errors=True)
    stack.enter_context(in_use(work))
    return work.name


def _list_own_files(work: Path, group: dist.ProcessGroup | None) -> None:
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
    known = {
        "notes": len(_notes(parent)),
        "journal": None if journal is None else known_end(journal)._asdict(),
        "place": None if journal is None else str(journal.resolve()),
    }
    folder.write_json(work / folder.STATE, {**files[folder.STATE], **known})
    folder.write_json(work / folder.PLAN, files[folder.PLAN])
    (work / folder.METADATA).chmod(0o600)
    shared = [work / name for name in (folder.METADATA, folder.PLAN, folder.STATE)]
    folder.write_json(work / folder.MANIFEST, {**{file.name: sha256(file) for file in (*shared, *parts)}, **written})
    sync_directory(work)
    with locked(parent / NOTES):  # two runs may have begun here at one moment
        _check_own(parent, form.key_of(files[folder.STATE]))
        path = folder.free_name(parent, files[folder.STATE]["step"])
        os.rename(work, path)
        sync_directory(parent)
        for old in {*folder.all_checkpoints(parent)} - {*folder.complete_checkpoints(parent)[-keep:]}:
            remove(old)
    return path.name


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
) -> Checkpoint:
    """Read the newest complete checkpoint into the layout of these processes, and refuse one of another run.

    In the layout in which they were computed the steps after the checkpoint are repeated bit for bit, on the same data,
    at no cost. In another one (processes, machine, threads) sums round differently: the run goes on with the same noise
    only when the journal has no step beyond the checkpoint. In all cases the ledger has every step in the journal.

    Args:
        directory: as given to `save`. plan, data: of this run; must equal the saved ones.
        params: parameters of the right names, shapes and dtypes; their values do not matter, and their layouts and
            devices are those of the result.
        ranks: as given to `make_dp_step`; all their processes call. None is one process.
        optimizer_state: a state of the same structure, whose tensors say how each is laid out. None lays out what is
            like its parameter as that parameter, and shards nothing else. Optimizers of torch number their parameters:
            build them from `params.values()`, or from `params.items()`, which keeps the names.
        journal: the file of `Journal`, read by the process that writes it.
        recharge: all steps beyond the checkpoint are drawn anew, with a new key, at their cost, also where they could
            be repeated. Save before the next step: until then another crash costs them once more.
        without_journal: `"refuse"`; or `"new_key"`, so that no noise is used twice. Steps released after the checkpoint
            are not in its ledger: if there are some, begin a new run with them, dp_step.init(params, key, ledger).
        later_runs: `"refuse"` or `"ignore"` another run that began after this one in the journal, or went on from this
            checkpoint without one. The ledger lacks its steps: if it saw the same records, count both.

    Raises:
        CheckpointError: none there, damaged, of another run, of a numpy that makes other numbers of a key, or not to be
            repeated; the difference is shown. No journal, or one that lacks steps which the checkpoint has, or lines
            which it had when that was saved; or a copy of one that is still in its own place, whichever went on. Of
            copies elsewhere, or on other machines, nothing is seen: a line in the log warns.
        InvalidArgument: both journal and without_journal="new_key", or sharded tensors without ranks.

    Guarantees:
        tests/checkpoint/test_saving.py: the resumed run is bit-identical (test_resume_is_bit_identical) and
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
    file, parent = journal_path(journal), Path(directory)
    name, values = by_writer(partial(_newest, parent, file), ranks, _NOT_LOADED)
    path = parent / name

    def check() -> dict[str, Tensor]:
        new_key = one_of("without_journal", without_journal, ("refuse", "new_key")) == "new_key"
        refuse(
            (new_key and file is not None,
             'Expected journal= or without_journal="new_key", got both. With the journal the run is repeated as it '
             "was."),
            (file is None and not new_key, CheckpointError(
                "Expected the journal of the run, got journal=None: nobody knows which steps were released after the "
                "checkpoint, and repeating them with anything changed would give their noise away. Pass journal=, the "
                'file of Journal; or go on with new noise, without_journal="new_key", if no step after the checkpoint '
                "was released, or you count those."
            )),
        )  # fmt: skip
        _check_unsharded(params, ranks)
        number, count = rank_and_size(ranks)  # each file is verified by one process
        folder.verify(path, dict(sorted(folder.read_manifest(path).items())[number::count]))
        if values.get("schema") != form.SCHEMA:
            raise CheckpointError(
                f"Expected schema {form.SCHEMA} in {path / folder.STATE}, got {values.get('schema')!r}."
            )
        form.refuse("plan", path, form.plan_difference(plan, folder.read_json(path / folder.PLAN)))
        same = values["data"] == form.data_fingerprint(data, form.key_of(values))
        form.refuse("data set", path, [] if same else ["the data differ from those the run was started on"])
        same = values.get("numbers") in (None, numbers_of_numpy())  # None: an older version does not say it
        form.refuse("numpy", path, [] if same else ["its batches and noise would be others from here on"])
        table = read_table(path)
        saved = {n.removeprefix(PARAMS): form.describe(tensor) for n, tensor in table.items() if n.startswith(PARAMS)}
        form.refuse("parameter set", path, form.difference(saved, {n: form.describe(p) for n, p in params.items()}))
        return {
            **{PARAMS + n: empty(p, p) for n, p in params.items()},
            **empties("optimizer_state", values["optimizer"], table, params, optimizer_state),
            **empties("noise_state", values["noise"], table, params),
        }

    tensors = all_or_none(check, ranks, _NOT_LOADED)
    now = layout(params, ranks)

    def decide() -> dict[str, Any]:
        """State and note with which the run continues, by the process that has the journal."""
        lines = 0 if file is None else len(read_chain(file))  # first: later ones may not be compared
        end = None if values["journal"] is None else Head(**values["journal"])
        if file is not None and end is not None:
            _refuse_copy(values.get("place"), end, file)
        taken = None if file is None else read_steps(file, missing="empty" if end else "refuse", known=end)
        history = History(values, known_notes(parent / NOTES, values["notes"]), taken)
        state, note = resume(history, plan, now, secure_key(), recharge=recharge, later_runs=later_runs)
        return {
            "state": form.state_to_dict(state),
            "note": None if note is None else [json.dumps(asdict(note)), len(history.notes)],
            "lines": lines,
        }

    decided = by_writer(decide, ranks, _NOT_LOADED)
    group = None if ranks is None else all_or_none(partial(joint_group, ranks), ranks, _NOT_LOADED)
    read_tensors(path, tensors, group)
    if decided["note"] is not None:
        by_writer(partial(append_line, parent / NOTES, *decided["note"]), ranks, _NOT_LOADED)
    optimizer, noise = (decode(values[name], lambda slot: tensors[slot.name]) for name in ("optimizer", "noise"))
    state = resumed(form.state_from_dict(decided["state"], plan, {}))._replace(
        noise_state=noise, journal="" if file is None else str(file.absolute()), journal_lines=decided["lines"]
    )
    return Checkpoint({n: tensors[PARAMS + n] for n in params}, optimizer, state, values["extra"], path)


def _refuse_copy(place: str | None, end: Head, file: Path) -> None:
    """Refuse to go on beside the run whose copy this is; warn of a journal that is elsewhere, where none is seen.

    (tests/checkpoint/test_saving.py::test_a_copy_does_not_go_on_beside_its_run)
    """
    there = Path(place or file)  # an older version does not say it
    if not file.exists() or there == file.resolve() or (there.exists() and there.samefile(file)):
        return
    if there.is_file() and end in [Head(), *(head for head, _ in read_chain(there))]:
        raise CheckpointError(
            f"Expected the journal of the run, {there}, got {file}, a copy of a run that can still go on: both use one "
            "key, and steps of the same noise give it away by their difference. Go on there; or, if nothing went on "
            f'there since the copy was made, remove {there}; or here with new noise: without_journal="new_key".'
        )
    _logger.warning(
        "The journal of the run was %s, and is %s now. Go on in one place only: with a copy, here or on another "
        "machine, of which nothing is seen, the same noise would be used twice.", there, file,
    )  # fmt: skip


def _newest(parent: Path, journal: Path | None) -> tuple[str, dict[str, Any]]:
    """The name of the newest complete checkpoint and its state."""
    complete = folder.complete_checkpoints(parent)
    half = [path for path in folder.all_checkpoints(parent) if path not in complete]
    if not complete:
        there = f" What is there is not complete: {shorten([path.name for path in half])}." if half else ""
        said = f"Expected a checkpoint in {parent}, found none.{there} Start a new run."
        if journal is not None and (taken := count_steps(journal)):
            said += (
                f" The journal {journal} has {taken} steps, which count: begin it with ledger=journal_ledger(path), of "
                "dpfunc.checkpoint."
            )
        raise CheckpointError(said)
    path = complete[-1]
    if folder.all_checkpoints(parent)[-1] != path:
        _logger.warning("The checkpoint %s is not complete and is passed over.", half[-1])
    folder.verify(path, {folder.STATE: folder.read_manifest(path)[folder.STATE]})
    return path.name, folder.saved_state(path)
