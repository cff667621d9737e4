"""The folder of a run: the job that is kept in it, checks before it is used, its cost, and what it protected.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dpfunc._utils.files import remove, replace_file
from dpfunc._utils.locks import LOCK_FILE
from dpfunc._utils.validation import refuse, shorten, unique_json
from dpfunc.accounting import Ledger
from dpfunc.accounting.accountant import upper
from dpfunc.accounting.record import ONE_RECORD, RECORD_FILE, Record
from dpfunc.budget import Budget
from dpfunc.checkpoint.costs import read_spent
from dpfunc.checkpoint.journal import count_steps, journal_ledger
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.hf.trainer._files import JOURNAL, START, is_complete, newest, released
from dpfunc.train.config import Job, job_from_dict, job_to_dict
from dpfunc.train.tables import json_values

MODEL = "model"
JOB_FILE = "job.json"
# A resumed run may differ in these: they change nothing that is trained, as no rate follows an evaluation
# (test_no_schedule_follows_an_evaluation). The folder may have been moved.
_FREE = ("logging_steps", "save_steps", "keep_checkpoints", "eval_steps", "report_to", "dp_dry_run", "output_dir")
_PERSON = "one person: all records with the same value of the column {!r}"


def write_job(job: Job, filled: Job, reasons: Mapping[str, str], folder: Path, insecure_seed: int | None) -> None:
    """Keep the job in its folder, as it was given and as it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    remove(folder / START)  # of a run that was killed here before its first step
    replace_file(folder / JOB_FILE, json.dumps({
        "job": job_to_dict(job), "filled": job_to_dict(filled), "recipe": dict(reasons), "insecure_seed": insecure_seed,
        "trained_on": str(Path(job.data.train).absolute()),
    }, indent=1) + "\n")  # fmt: skip


def _job_file(folder: Path) -> dict[str, Any]:
    """Read the file of `write_job`: the job as it was given and as it runs, its insecure seed, and its table."""
    path = folder / JOB_FILE
    try:
        match unique_json(path.read_bytes()):
            case {"job": dict(), "filled": dict(), "insecure_seed": int() | None} as values:
                return cast(dict[str, Any], values)
        problem = "it does not hold a job"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise CheckpointError(
        f"The file {path} cannot be read: {problem}. Restore it; or begin a new run in another --output_dir, which "
        f"counts this one: --spent {folder / JOURNAL}."
    )


def saved_job(folder: Path) -> tuple[Job, int | None, Path]:
    """The job of a run folder, its insecure seed, and the table that it was trained on, wherever this process is."""
    refuse(
        (not (folder / JOB_FILE).is_file(), CheckpointError(
            f"Expected the folder of a run of dpfunc train, got {str(folder)!r} without {JOB_FILE}.")),
    )  # fmt: skip
    values = _job_file(folder)
    job = job_from_dict(values["filled"])
    return job, values["insecure_seed"], Path(values.get("trained_on", job.data.train))  # not in older folders


def recorded_job(job: Job) -> Job:
    """The job of a run that is resumed, with the values that its recipe gave; what is free as in `job`."""
    # tests/train/test_recipe.py::test_a_resumed_run_has_the_recorded_values
    filled = _job_file(Path(job.output_dir))["filled"]
    for section, values in job_to_dict(job).items():
        if isinstance(values, dict):
            filled[section] = {**filled[section], **{key: value for key, value in values.items() if key in _FREE}}
        elif section in _FREE:
            filled[section] = values
    return job_from_dict(filled)


def check_folder(job: Job, resume: bool, insecure_seed: int | None) -> None:
    """Check that a run can begin in the output folder, or that it holds the run to resume.

    Without a released step it begins again: test_a_run_killed_before_its_first_step_begins_again.
    """
    folder = Path(job.output_dir)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    refuse(
        (not there.is_dir() or not os.access(there, os.W_OK | os.X_OK),
         f"Expected an output_dir that can be made or written, got output_dir={str(folder)!r}: {str(there)!r} "
         f"{'may not be' if there.is_dir() else 'is a file'}. Name another folder: --output_dir."),
    )  # fmt: skip
    half = {path.name for path in folder.glob(f"{JOB_FILE}.*.new")}  # after a kill
    names = {path.name for path in folder.glob("*")} - {LOCK_FILE} - half
    killed_before = JOB_FILE in names and MODEL not in names and not released(folder)
    if resume:
        _check_same_job(job, folder, insecure_seed)
    elif names and not killed_before:
        journal = folder / JOURNAL
        goes_on = "Go on with the run there: --resume; or name" if has_checkpoint(job) else "Name"
        spent = f", and count what was spent here: --spent {journal}" if count_steps(journal) else ""
        raise InvalidArgument(
            f"Expected an empty output_dir, got {str(folder)!r}, which is not. {goes_on} another folder, "
            f"--output_dir{spent}."
        )


def _check_same_job(job: Job, folder: Path, insecure_seed: int | None) -> None:
    """Check that a folder holds a run of this very job, with a checkpoint to resume from."""
    refuse(
        (not (folder / JOB_FILE).is_file(), CheckpointError(
            f"Expected a run in {str(folder)!r} to resume, found none. Start it without --resume.")),
    )  # fmt: skip
    saved = _job_file(folder)
    changed = _differences(saved["job"], job_to_dict(job))
    if saved["insecure_seed"] != insecure_seed:
        changed.append(f"--insecure-seed was {saved['insecure_seed']}, now {insecure_seed}")
    refuse(
        (changed, CheckpointError(
            f"Expected the job that {str(folder)!r} was started with, got another: {shorten(changed)}. A resumed run "
            "repeats steps with the same noise, so nothing else may change.")),
    )  # fmt: skip
    if not has_checkpoint(job):
        newest(folder)  # raises, and says how the steps of the journal are counted


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between two jobs as `job_to_dict` gives them, except in keys that do not change the training."""
    differences: list[str] = []
    for name in sorted({*saved, *now} - {*_FREE}):
        before, after = saved.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            differences += [f"{name}.{difference}" for difference in _differences(before, after)]
        elif before != after:
            differences.append(f"{name} was {before!r}, now {after!r}")
    return differences


def has_checkpoint(job: Job) -> bool:
    """True if the folder has a checkpoint that `--resume` can continue from."""
    checkpoints = list(Path(job.output_dir).glob("checkpoint-*"))
    return any(is_complete(path) for path in checkpoints) if job.privacy.dp_enabled else bool(checkpoints)


def interrupted(job: Job, how: str = "Interrupted") -> str:
    """Message after a run was ended: its privacy cost, and how to resume or count it."""
    journal = Path(job.output_dir) / JOURNAL
    steps, delta = count_steps(journal), job.privacy.dp_delta
    if delta is None or not job.privacy.dp_enabled:
        cost = f"{how}. The twin without privacy spends nothing."
    elif not steps:
        cost = f"{how} before the first step was released: nothing was spent."
    else:
        epsilon = journal_ledger(journal).epsilon(delta, job.privacy.dp_accountant).epsilon
        earlier = ", earlier runs included" if job.data.spent else ""
        cost = (
            f"{how}. The journal has {steps} steps, which spent epsilon={upper(epsilon, 4)} at delta={delta:g}"
            f"{earlier}. A new run on these records counts them: --spent {journal}."
        )
    begun = "There is no checkpoint to resume." if steps else "The same command starts it again."
    return f"{cost} {'--resume goes on with this run.' if has_checkpoint(job) else begun}"


def check_accounting(folder: Path) -> None:
    """Check, before a model is saved, that its accounting has every step in the journal of the folder."""
    # tests/train/test_run_folder.py::test_a_model_is_saved_with_the_cost_of_its_whole_journal
    journal, path = folder / JOURNAL, folder / RECORD_FILE
    taken, counted = journal_ledger(journal), Record.from_json(path.read_bytes()).ledger
    refuse(
        (counted != taken, CheckpointError(
            f"Expected {path} to count the steps of {journal}, {taken}, got {counted}. Another process has used this "
            f"folder. No model was saved. A new run counts all of it: --spent {journal}, and another --output_dir.")),
    )  # fmt: skip


def unit_of(job: Job) -> str:
    """The unit that the job protects, in the words of its accounting."""
    return _unit(job.data.unit_column)


def _unit(column: str | None) -> str:
    return ONE_RECORD if column is None else _PERSON.format(column)


def budget_of(job: Job) -> Budget | None:
    """The budget of the job's data set."""
    data = job.data
    return None if data.budget is None else Budget(data.budget, run=data.budget_run, spender=data.budget_spender)


def spent_before(job: Job) -> Ledger | None:
    """Costs of earlier runs on the records of the job, as it says or as the budget of the data set does.

    Those that a private job names must have protected what it protects: costs of two units do not add up.
    """
    # tests/train/test_dataset.py::test_costs_for_records_and_for_people_do_not_add_up
    budget = budget_of(job)
    # `compose` makes a ledger that does not name the budget: a search reserves for its runs, which do not
    spent = read_spent(job.data.spent) if budget is None else budget.spent().compose()
    for name in job.data.spent or () if job.privacy.dp_enabled else ():
        unit = _unit_of_run(Path(name))
        any_loop = unit is None and job.data.unit_column is None  # a ledger or a journal, which counts rows
        refuse(
            (not any_loop and unit != unit_of(job),
             f"Expected earlier runs that protected {unit_of(job)!r}, as this job does, got data.spent={name!r}, "
             f"which protected {unit or 'an unknown unit'!r}. Their costs do not add up. Name the "
             f"{RECORD_FILE} of a run with the same unit, or its journal in its folder."),
        )  # fmt: skip
    return spent


def _unit_of_run(path: Path) -> str | None:
    """The unit in a record of a run; of a journal, that of the job or the record beside it."""
    beside = (path, path.parent / RECORD_FILE, path.parent / JOB_FILE)
    for values in map(json_values, beside if path.suffix == ".jsonl" else (path,)):
        match values:
            case {"unit": str() as unit}:
                return unit
            case {"job": {"data": dict() as data}}:
                return _unit(data.get("unit_column"))
    return None
