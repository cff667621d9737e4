"""Files of a private Trainer run besides the Trainer's own: its state, and its accounting."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpfunc.accounting import Ledger
from dpfunc.checkpoint import MANIFEST, PREFIX, Checkpoint, load, save
from dpfunc.errors import CheckpointError
from dpfunc.journal import read_steps
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint
from dpfunc.saved import STATE, read_json, sha256, verify, write_json
from dpfunc.state import StepState
from dpfunc.types import Params, schedule_at

logger = logging.getLogger(__name__)

ACCOUNTING = "privacy_accounting.json"
JOURNAL = "privacy_journal.jsonl"
FOLDER = "dpfunc"
TRAINER_STATE = "trainer_state.json"
FILES = "trainer_files.json"
"""A digest of every file that the Trainer has written into a checkpoint."""


def save_run(
    checkpoint: Path,
    *,
    params: Params,
    state: StepState,
    plan: Plan,
    data: str,
    extra: Mapping[str, Any],
    journal: Path,
) -> None:
    """Write parameters, key, ledger and plan into a checkpoint of the Trainer, which counts as whole only later."""
    shutil.rmtree(checkpoint / FOLDER, ignore_errors=True)  # of an earlier run, whose files the Trainer has replaced
    save(checkpoint / FOLDER, params=params, state=state, plan=plan, data=data, extra=extra, keep=1, journal=journal)


def finish(checkpoint: Path, args: Any, state: Any) -> None:  # noqa: ANN401  (the Trainer's)
    """Record the files that the Trainer has written, which makes the checkpoint complete; remove older checkpoints."""
    from transformers.trainer_utils import rotate_checkpoints

    if (checkpoint / FOLDER).exists():
        own = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
        names = [path.relative_to(checkpoint) for path in own]
        write_json(checkpoint / FOLDER / FILES, {str(n): sha256(checkpoint / n) for n in names if n.parts[0] != FOLDER})
    rotate_checkpoints(
        output_dir=args.output_dir,
        save_total_limit=args.save_total_limit,
        best_model_checkpoint=state.best_model_checkpoint,
        use_mtime=True,
    )


def load_run(
    checkpoint: Path, *, params: Params, plan: Plan, data: str, journal: Path, key: Key | None, earlier: Ledger | None
) -> Checkpoint:
    """Read what `save_run` wrote; the ledger also counts the steps that the journal has beyond it.

    Raises:
        CheckpointError: not whole, or of another plan, data set, parameter set or key; or a file of the Trainer
            (optimizer, scheduler, its state) is missing or was changed, without which it would start anew.
    """
    if not is_whole(checkpoint):
        raise CheckpointError(
            f"Expected a whole checkpoint of a private run, got {checkpoint}. It needs {TRAINER_STATE} and "
            f"{FOLDER}/{FILES}; with save_only_model nothing can be resumed."
        )
    verify(checkpoint, read_json(checkpoint / FOLDER / FILES))
    saved = load(checkpoint / FOLDER, plan=plan, params=params, data=data, journal=journal)
    if key is not None and key != saved.state.key:
        raise CheckpointError(
            f"The checkpoint {checkpoint} belongs to a run with another key ({fingerprint(saved.state.key)}, not "
            f"{fingerprint(key)}). Leave key= out: the checkpoint holds it."
        )
    own = plan.ledger(saved.state.charged)
    if earlier is not None and earlier.compose(own) != saved.state.ledger:
        raise CheckpointError(
            f"Expected the ledger that the run was started with, got {earlier} beside the {own.num_steps} steps of "
            f"this run; the checkpoint {checkpoint} counts {saved.state.ledger}. Leave it out (ledger=, --spent): the "
            "checkpoint has it. What other runs have spent since does not count here: begin a new run with all of it."
        )
    return saved


def check_goes_on(before: StepState, saved: Checkpoint) -> None:
    """A trainer that was interrupted goes on with its own run, and with all that it has spent.

    Raises:
        CheckpointError: another run's checkpoint, or a journal that lacks steps of this trainer.
    """
    if saved.state.key != before.key:
        raise CheckpointError(
            f"The checkpoint {saved.path} belongs to another run than this trainer's: resume it with a new DPTrainer."
        )
    if saved.state.charged < before.charged:
        raise CheckpointError(
            f"Expected the journal to have all {before.charged} steps that this trainer took, got "
            f"{saved.state.charged}. It is incomplete: restore it."
        )


def newest(output_dir: Path) -> Path:
    """The newest whole checkpoint of a run; one that a kill left half-written is passed over.

    Raises:
        CheckpointError: there is none, or it is not clear of which run.

    Guarantees:
        tests/integrations/test_trainer_resume.py::test_a_folder_of_several_runs_is_not_guessed_about.
    """
    found = [(int(match[1]), path) for path in output_dir.glob("checkpoint-*") if (match := _numbered(path))]
    whole: list[Path] = []
    for _, path in sorted(found, reverse=True):
        if is_whole(path):
            whole.append(path)
        else:
            logger.warning("The checkpoint %s is not whole and is passed over.", path)
    if whole:
        _of_one_run(whole, output_dir / JOURNAL)
        return whole[0]
    steps = count_steps(output_dir / JOURNAL)
    more = (
        f" The journal counts {steps} steps. If anything of them was kept or seen, the new run counts them: "
        f"DPTrainer(..., ledger=journal_ledger(path)), or dpfunc train with --spent {output_dir / JOURNAL} and another "
        "--output_dir."
        if steps else ""
    )  # fmt: skip
    raise CheckpointError(f"Expected a checkpoint in {output_dir}, found none. Start a new run.{more}")


def _of_one_run(checkpoints: list[Path], journal: Path) -> None:
    """Check that all checkpoints are of one run, and that it is the one that began last in the journal.

    Raises:
        CheckpointError: a folder that several runs have used; a higher number is not a newer run.
    """
    runs = {_run_of(path): path for path in reversed(checkpoints)}
    which = (
        "Name the one to go on with: resume_from_checkpoint=PATH. A run of its own belongs into a folder of its own."
    )
    if len(runs) > 1:
        raise CheckpointError(
            "Expected checkpoints of one run, got several: "
            f"{', '.join(f'{path.name} of run {run}' for run, path in runs.items())}. {which}"
        )
    began = list(read_steps(journal))
    if began and began[-1] not in runs:
        raise CheckpointError(
            f"The run that began last in {journal}, {began[-1]}, left no checkpoint; {checkpoints[0].name} is of "
            f"another run, {next(iter(runs))}. {which}"
        )


def _run_of(checkpoint: Path) -> str:
    """Fingerprint of the key of a checkpoint."""
    try:
        (state,) = (checkpoint / FOLDER).glob(f"{PREFIX}*/{STATE}")
        return fingerprint(Key(bytes.fromhex(read_json(state)["key"])))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The state of {checkpoint} was changed after it was saved: {error}.") from error


def _numbered(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


def is_whole(checkpoint: Path) -> bool:
    """True if a checkpoint was written completely: the list of its files is written last."""
    try:
        for path in (checkpoint / TRAINER_STATE, checkpoint / FOLDER / FILES):
            json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return any((path / MANIFEST).exists() for path in (checkpoint / FOLDER).glob(f"{PREFIX}*"))


def note_earlier_runs(journal: Path, counted: int = 0) -> None:
    """Warn if the journal holds runs that this run does not count; remove the accounting of an earlier end.

    A run that is killed later would leave it behind, with fewer steps than were taken.

    Args:
        journal: of the run. counted: steps in the ledger of a run that is resumed; 0 for a new one.
    """
    (journal.parent / ACCOUNTING).unlink(missing_ok=True)
    steps = count_steps(journal) - counted
    if steps > 0:
        logger.warning(
            "The journal %s has %d steps of %s runs. If they saw the same records and anything of them was kept, "
            "they count too: resume_from_checkpoint=True, or DPTrainer(..., ledger=journal_ledger(path)).",
            journal,
            steps,
            "other" if counted else "earlier",
        )


def count_steps(journal: Path) -> int:
    """The number of steps of all runs in a journal; 0 before the first."""
    return sum(len(taken) for taken in read_steps(journal, missing="empty").values())


def accounting(plan: Plan, state: StepState, epoch: float) -> dict[str, Any]:
    """Privacy spent by a run up to a state, earlier phases included, with the facts needed to check it. Public."""
    answer = state.ledger.epsilon(plan.delta, plan.accountant)
    size = plan.sampler.expected_batch_size(state.step)
    return {
        "epsilon": answer.epsilon,
        "delta": plan.delta,
        "target_epsilon": plan.epsilon,
        "max_grad_norm": plan.clip.clip_norm,
        "noise_multiplier": schedule_at(plan.noise_multiplier, state.step),
        "global_step": state.step,
        "epoch": epoch,
        "num_steps": state.limit,
        "sampler": type(plan.sampler).__name__,
        "sampling_prob": size / plan.sampler.dataset_size,
        "expected_batch_size": size,
        "dataset_size": plan.sampler.dataset_size,
        "adjacency": plan.adjacency,
        "clip": type(plan.clip).__name__,
        "accountant": answer.method,
        "note": answer.note,
        "epsilon_rdp": state.ledger.epsilon(plan.delta, "rdp").epsilon,
        "ledger": json.loads(state.ledger.to_json()),
    }


def write_accounting(folder: Path, record: dict[str, Any]) -> Path:
    """Write a record as `privacy_accounting.json`, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ACCOUNTING
    path.write_text(json.dumps(record, indent=1))
    return path
