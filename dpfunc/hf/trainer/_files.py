"""Files of a private Trainer run besides the Trainer's own: its state, and its accounting.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.
"""

import logging
from pathlib import Path
from typing import Any

from dpfunc._utils.files import remove, replace_file, sha256
from dpfunc._utils.validation import refuse
from dpfunc.accounting import Ledger
from dpfunc.accounting.record import RECORD_FILE, Record
from dpfunc.budget.budget import KEPT
from dpfunc.checkpoint import Checkpoint, folder
from dpfunc.checkpoint.chain import RESTORE
from dpfunc.checkpoint.journal import check_counted, count_steps, read_steps, whole_ledger
from dpfunc.checkpoint.saving import load
from dpfunc.distributed import all_or_none
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint, secure_key
from dpfunc.state import StepState
from dpfunc.types import Params

_logger = logging.getLogger(__name__)

JOURNAL = "privacy_journal.jsonl"
FOLDER = "dpfunc"
START = "checkpoint-0"  # before the first step; it stays until there is a later one
_TRAINER_STATE = "trainer_state.json"
_MARK = "checkpoint-is-incomplete.txt"  # of enable_jit_checkpoint, which removes it behind the Trainer's own save
FILES = "trainer_files.json"  # a digest of every file that the Trainer has written into a checkpoint


def finish(checkpoint: Path, args: Any, state: Any) -> None:
    """Record the files that the Trainer has written, which makes the checkpoint complete; remove older checkpoints."""
    if (checkpoint / FOLDER).exists():
        names = [path.relative_to(checkpoint) for path in sorted(checkpoint.rglob("*")) if path.is_file()]
        digests = {str(n): sha256(checkpoint / n) for n in names if n.parts[0] not in (FOLDER, _MARK)}
        folder.write_json(checkpoint / FOLDER / FILES, digests)
    if checkpoint.name == START:  # those of earlier runs stay until a step of this one is saved
        return
    before, best = (checkpoint.with_name(START), (checkpoint.parent / KEPT).parent), state.best_model_checkpoint
    for path in (*before, *outdated(checkpoint.parent, args.save_total_limit, best)):
        remove(path)


def outdated(output_dir: Path, limit: int | None, best: str | None) -> list[Path]:
    """Checkpoints that the Trainer would remove file by file; those that a kill left half-written go first."""
    from transformers.trainer_utils import sort_checkpoints

    found = sorted((Path(path) for path in sort_checkpoints(str(output_dir), use_mtime=True)), key=is_complete)
    if not limit or limit < 0 or len(found) <= limit:
        return []
    stay = {found[-1], *([Path(best)] if best is not None else [])}
    return [path for path in found if path not in stay][: len(found) - max(limit, len(stay))]


def kept_key(output_dir: Path, given: Key | None) -> Key:
    """The key of a run that reserves in a budget, which finds its reservation after a kill: on disk before it reserves.

    (tests/hf/trainer/test_run.py::test_a_run_killed_before_its_first_step_finds_its_reservation)
    """
    file, place = output_dir / KEPT, str(output_dir.resolve())
    values = folder.read_json(file) if file.exists() and not released(output_dir) else None
    if values is not None and given is None:
        if values["place"] != place:
            raise CheckpointError(
                f"Expected the folder in which this run has reserved, {values['place']}, got {place}, a copy: two runs "
                "of one key would use the same noise. Go on there; or settle that run, dpfunc budget settle URL RUN "
                f"{place}, and begin another one, with a name of its own, in an empty folder."
            )
        return Key(bytes.fromhex(values["key"]), guessable=values["guessable"])
    key = given or secure_key()
    if values is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        values = {"run": fingerprint(key), "key": key.secret.hex(), "guessable": key.guessable, "place": place}
        folder.write_json(file, values)
    return key


def load_run(
    checkpoint: Path, *, params: Params, plan: Plan, data: str, journal: Path, ranks: Ranks | None
) -> Checkpoint:
    """Read, by all processes, what is not the Trainer's of a whole checkpoint; later steps in the journal count."""

    def check() -> None:
        if not is_complete(checkpoint):
            raise CheckpointError(
                f"Expected a complete checkpoint of a private run, got {checkpoint}. It needs {_TRAINER_STATE} and "
                f"{FOLDER}/{FILES}; with save_only_model nothing can be resumed."
            )
        folder.verify(checkpoint, folder.read_json(checkpoint / FOLDER / FILES))

    all_or_none(check, ranks, "Nothing was resumed")
    return load(
        checkpoint / FOLDER, plan=plan, params=params, data=data, ranks=ranks, journal=journal,
        later_runs="ignore",  # `begin_accounting` warns of them
    )  # fmt: skip


def check_resumed(
    saved: Checkpoint, plan: Plan, key: Key | None, earlier: Ledger | None, before: StepState | None
) -> None:
    """Check what the user says about the start of a run that is resumed, and the state of this trainer's own run."""
    state, own = saved.state, plan.ledger(saved.state.charged)
    here = state if before is None else before
    refuse(
        (key is not None and key != state.key, CheckpointError(
            f"The checkpoint {saved.path} belongs to a run with another key ({fingerprint(state.key)}, not "
            f"{fingerprint(key or state.key)}). Leave key= out: the checkpoint holds it.")),
        (earlier is not None and earlier.compose(own) != state.ledger, CheckpointError(
            f"Expected the ledger that the run was started with, got {earlier} beside the {own.num_steps} steps of "
            f"this run; the checkpoint {saved.path} counts {state.ledger}. Leave it out (ledger=, --spent): the "
            "checkpoint has it. What other runs have spent since does not count here: begin a new run with all of "
            "it.")),
        (state.key != here.key, CheckpointError(
            f"The checkpoint {saved.path} belongs to another run than this trainer's: resume it with a new "
            "DPTrainer.")),
        (state.charged < here.charged, CheckpointError(
            f"Expected the journal to have all {here.charged} steps that this trainer took, got {state.charged}. It is "
            "incomplete: restore it.")),
    )  # fmt: skip


def newest(output_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, without those that a kill left half-written; None before any release.

    (tests/hf/trainer/test_files.py::test_a_folder_of_several_runs_is_not_guessed_about,
    ::test_a_run_that_released_nothing_begins_again, ::test_a_run_that_may_have_released_a_step_does_not)
    """
    found = _numbered(output_dir)
    complete = [path for path in found if is_complete(path)]
    for path in (path for path in found if path not in complete):
        _logger.warning("The checkpoint %s is not complete and is passed over.", path)
    if complete:
        _check_one_run(complete, output_dir / JOURNAL)
        return complete[0]
    if not released(output_dir):
        return None
    steps = count_steps(output_dir / JOURNAL)
    more = (
        f"The journal counts {steps} steps. If anything of them was kept or seen, the new run counts them: "
        f"DPTrainer(..., ledger=journal_ledger(path)), or dpfunc train with --spent {output_dir / JOURNAL} and another "
        "--output_dir."
        if steps else f"Other files there are of steps that its journal lacks. {RESTORE}"
    )  # fmt: skip
    raise CheckpointError(f"Expected a checkpoint in {output_dir}, found none. Start a new run. {more}")


def released(output_dir: Path) -> bool:
    """True if the folder of a run says that a step was released there, or lacks the journal that would say so."""
    journal, start = output_dir / JOURNAL, output_dir / START
    later = [path for path in _numbered(output_dir) if path != start]
    lost = is_complete(start) and not journal.exists()
    return bool(count_steps(journal) or later or (output_dir / RECORD_FILE).exists() or lost)


def _numbered(output_dir: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in output_dir.glob("checkpoint-*")}
    return sorted((p for p, step in steps.items() if step.isdecimal()), key=lambda p: int(steps[p]), reverse=True)


def _check_one_run(checkpoints: list[Path], journal: Path) -> None:
    """Check that all checkpoints are of one run, and that it is the one that began last in the journal."""
    runs = {fingerprint(key_of(path)): path.name for path in reversed(checkpoints)}
    last = next(reversed(read_steps(journal, missing="empty")), None)
    named = ", ".join(f"{name} of run {run}" for run, name in runs.items())
    advice = "Name the one to go on with: resume_from_checkpoint=PATH. Give each run a folder of its own."
    refuse(
        (len(runs) > 1, CheckpointError(f"Expected checkpoints of one run, got several: {named}. {advice}")),
        (last is not None and last not in runs, CheckpointError(
            f"The run that began last in {journal}, {last}, left no checkpoint; {checkpoints[0].name} is of another "
            f"run, {next(iter(runs))}. {advice}")),
    )  # fmt: skip


def key_of(checkpoint: Path) -> Key:
    """The key of the run that a complete checkpoint is of."""
    return folder.newest_key(checkpoint / FOLDER)


def is_complete(checkpoint: Path) -> bool:
    """True if a checkpoint was written completely, and nothing of it removed: the list of its files is written last."""
    try:
        folder.read_json(checkpoint / _TRAINER_STATE)
        listed = isinstance(folder.read_json(checkpoint / FOLDER / FILES), dict)
        return listed and bool(folder.complete_checkpoints(checkpoint / FOLDER))
    except CheckpointError:
        return False


def begin_accounting(journal: Path, ledger: Ledger, *, resumed: bool = False) -> None:
    """Compare the journal with what a run counts, and remove the accounting of an earlier end, which may lack steps."""
    runs = read_steps(journal, missing="empty")
    if not resumed:
        check_counted(journal, runs, ledger)
    (journal.parent / RECORD_FILE).unlink(missing_ok=True)
    if runs and (steps := ledger.lacks(whole_ledger(runs.values()))):
        _logger.warning(
            "The journal %s has %d steps of other runs. If they saw the same records and anything of them was kept, "
            "they count too: DPTrainer(..., ledger=journal_ledger(path)), with journal_ledger from dpfunc.checkpoint.",
            journal, steps,
        )  # fmt: skip


def check_journal(journal: Path, state: StepState) -> None:
    """Check that the journal of a finished run has its steps, and no others of the same key."""
    taken = read_steps(journal, missing="empty").get(fingerprint(state.key), {})
    if len(taken) != state.charged:
        raise CheckpointError(
            f"Expected the {state.charged} steps of this run in the journal {journal}, got {len(taken)}. Lines were "
            "lost, or another process has taken steps with the same key. Count the larger number, and publish nothing "
            "that is accounted for with the smaller."
        )


def write_accounting(folder: Path, record: Record) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / RECORD_FILE, record.to_json() + "\n")
