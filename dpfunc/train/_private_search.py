"""A search on private records: a random number of private runs, of which the best one alone is released."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpfunc._utils.locks import only_process
from dpfunc._utils.validation import unique_json
from dpfunc.accounting import Guarantee, RunCount
from dpfunc.accounting.record import (
    EXACT_SIZE,
    GUESSABLE,
    NOT_COVERED,
    RECORD_FILE,
    SECRET,
    SIZES,
    SelectionRecord,
    listed,
)
from dpfunc.checkpoint._chain import replace_file
from dpfunc.checkpoint._folder import remove, sweep
from dpfunc.checkpoint.record import versions
from dpfunc.errors import CheckpointError, DPFuncError, InvalidArgument, NotWritten
from dpfunc.rng import Key, fold_in, insecure_key, secure_key, stream
from dpfunc.sampling._records import data_name
from dpfunc.train._run_folder import MODEL, budget_of, check_folder, unit_of, write_job
from dpfunc.train._search import MEANING, Search, evaluate, noisy
from dpfunc.train.config import Job, job_to_dict
from dpfunc.train.run import check_job

_SECRET_FOLDER = "search"  # in output_dir, as long as the search is under way: as secret as the data
_STATE = "state.json"
_NOT_COVERED_BY_A_SEARCH = (
    "the time that the search took, from which the number of its runs can be guessed",
    "whoever could read the folder while the search was under way: it held the other runs, and the key",
)


@dataclass(frozen=True)
class Outcome:
    """Result of a search, released: its record, and why there is no model, if there is none."""

    record: SelectionRecord
    nothing: str | None


@dataclass(frozen=True)
class _State:
    """Progress of a search, and the key of all that is random in it. Secret."""

    key: Key
    done: int = 0
    """Number of finished runs."""
    slot: str | None = None
    """Name of the folder of the best one, whose candidate and score follow."""
    candidate: int | None = None
    score: float | None = None
    failure: str | None = None
    """Of the first run that failed."""


def search_lines(search: Search) -> list[str]:
    """The plan of a search in lines, from public numbers."""
    runs, cost = _counted(search)
    most, steps = runs.quantile(0.99), sum(each.plan.num_steps for each in search.candidates) / len(search.candidates)
    lines = [
        f"runs: {runs.mean:g} on average, with probability 0.99 at most {most}; each of a random candidate",
        f"steps: {runs.mean * steps:.0f} on average, with probability 0.99 at most about {most * steps:.0f}",
        f"score: {MEANING[search.job.task]}, plus noise of standard deviation {search.score_noise:g}",
    ]
    for candidate in search.candidates:
        plan = candidate.plan
        lines.append(
            f"candidate {listed(candidate.values)}: noise multiplier {plan.noise_multiplier:.4g} (without a search "
            f"{candidate.alone:.4g}); one run would cost epsilon={plan.guarantee().epsilon:.4g}"
        )
    counted = f", with {search.spent.num_steps} steps of earlier runs" if search.spent.num_steps else ""
    total = f"epsilon={cost.epsilon:.4g} at delta={cost.delta:g} ({cost.method}), {cost.adjacency}"
    return [*lines, f"the whole search{counted}: {total}"]


def outcome_lines(outcome: Outcome, folder: str, insecure_seed: int | None) -> list[str]:
    """The result of a search in lines: all of it is released."""
    record = outcome.record
    lines = [
        f"Spent by the whole search: epsilon={record.epsilon:.4g} at delta={record.delta:g}, one record protected."
    ]
    if insecure_seed is not None:
        lines.append(f"BUT anybody can guess the noise: --insecure-seed {insecure_seed}. Nothing is protected.")
    if record.chosen is None or record.chosen_score is None:
        lines.append(f"No model was released: {outcome.nothing}.")
    else:
        best, noise = listed(record.candidates[record.chosen]), f"noise of standard deviation {record.score_noise:g}"
        lines.append(f"Best: {best}; score {record.chosen_score:.4g}, with {noise}.")
        lines.append(f"Saved: {folder}/{MODEL}. The other runs were deleted.")
    lines.append(f"Accounting: {folder}/{RECORD_FILE}.")
    return [*lines, f"Not covered by epsilon: {'; '.join((*_NOT_COVERED_BY_A_SEARCH, *NOT_COVERED[:2]))}."]


def _counted(search: Search) -> tuple[RunCount, Guarantee]:
    """The distribution of the number of private runs, and what they cost together."""
    if search.runs is None or search.cost is None:
        raise InvalidArgument("Expected a search on private records, got one on public records: use run_public.")
    return search.runs, search.cost


def check_search_folder(job: Job, resume: bool) -> None:
    """Check, before a table is read, that a search can begin or go on in the folder of its job."""
    if not resume:
        check_job(job, False, None)
    elif not (Path(job.output_dir) / _SECRET_FOLDER / _STATE).is_file():
        raise CheckpointError(
            f"Expected an interrupted search in {job.output_dir!r}, found none. Begin without --resume."
        )


def run_search(search: Search, *, resume: bool = False, insecure_seed: int | None = None) -> Outcome:
    """Do the runs of a search, and release the best one.

    How many runs there are, and what the others were, is not told, and their files are deleted. A run that fails has
    the lowest score. Until the end nothing is released: an interrupted search has cost nothing, if nobody read its
    folder; it is resumed with the same key, number of runs, candidates, batches and noise.

    Guarantees:
        tests/train/test_private_search.py::test_the_best_run_alone_is_released,
        ::test_a_killed_search_goes_on_with_the_same_result.
    """
    job = search.job
    folder = Path(job.output_dir)
    secret = folder / _SECRET_FOLDER
    check_search_folder(job, resume)
    with only_process(folder):
        about = {**_about(search), "insecure_seed": insecure_seed}
        if resume:
            state = _resumed(secret, about)
            if (folder / RECORD_FILE).is_file():  # it is written last: only the secret folder is left to be deleted
                record = SelectionRecord.from_json((folder / RECORD_FILE).read_bytes())
                return _finished(secret, state, record)
        else:
            check_folder(job, False, None)  # again: another process may have ended there
            state = _State(secure_key() if insecure_seed is None else insecure_key(insecure_seed))
        secret.mkdir(mode=0o700, exist_ok=True)
        sweep(secret)
        _write(secret, state, about)
        if (budget := budget_of(job)) is not None:
            budget.reserve(_counted(search)[1], state.key, unit=unit_of(job), before=search.spent)
        uniform = float(stream(fold_in(state.key, "number of runs")).random())
        while state.done < _counted(search)[0].quantile(uniform):
            state = _after_a_run(search, secret, state)
            _write(secret, state, about)
        return _finished(secret, state, _release(search, state, folder, insecure_seed))


def interrupted_search(job: Job) -> str:
    """Message after the user interrupts a search: its cost, and how it goes on."""
    folder = Path(job.output_dir)
    goes_on = "--resume goes on, with the same key and number of runs; or delete the folder."
    if (folder / MODEL).exists() or (folder / RECORD_FILE).exists():
        return f"Interrupted while the best run was released: the whole budget counts as spent. {goes_on}"
    if not (folder / _SECRET_FOLDER / _STATE).is_file():
        return "Interrupted before the first run: nothing was spent."
    return (
        f"Interrupted. Nothing was released, so nothing was spent, unless somebody reads {folder / _SECRET_FOLDER}: "
        f"keep it as secret as the data. {goes_on}"
    )


def _after_a_run(search: Search, secret: Path, state: _State) -> _State:
    """The state after one run more, in a folder that the best run so far does not use."""
    slot = "b" if state.slot == "a" else "a"
    remove(secret / slot)  # of an interrupted or a worse run
    key = fold_in(state.key, "run", state.done)
    number = int(stream(fold_in(key, "candidate")).integers(len(search.candidates)))
    candidate, done = search.candidates[number], state.done + 1
    try:
        value = evaluate(candidate, secret / slot, fold_in(key, "training"))
    except NotWritten:  # no fault of the run: the search goes on from here
        raise
    except (DPFuncError, ArithmeticError, RuntimeError, ValueError) as error:
        # A run that fails counts as the worst: without it the number of runs would depend on the data.
        return dataclasses.replace(state, done=done, failure=state.failure or f"{type(error).__name__}: {error}")
    found = noisy(value, search.score_noise, fold_in(key, "score"))
    if state.score is not None and found <= state.score:
        return dataclasses.replace(state, done=done)
    return dataclasses.replace(state, done=done, slot=slot, candidate=number, score=found)


def _release(search: Search, state: _State, folder: Path, insecure_seed: int | None) -> SelectionRecord:
    """Write the best run, and the record of the search, into the folder; again the same after an interruption."""
    runs, cost = _counted(search)
    publishes_size = search.spent.adjacency == "add_remove" and search.job.privacy.dp_dataset_size is None
    record = SelectionRecord(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        unit="one record of the table",  # the held-out ones too: not those of training alone
        epsilon=cost.epsilon,
        delta=cost.delta,
        target_epsilon=search.job.privacy.dp_epsilon or 0.0,
        runs=runs,
        candidates=tuple(candidate.values for candidate in search.candidates),
        ledgers=search.ledgers,
        score=MEANING[search.job.task],
        score_noise=search.score_noise,
        chosen=state.candidate,
        chosen_score=state.score,
        spent=search.spent,
        noise_key=GUESSABLE if state.key.guessable else SECRET,
        dataset_size=search.size,
        dataset_size_is=SIZES[search.job.privacy.dp_dataset_size is not None],
        versions=versions(),
        not_covered=(*([EXACT_SIZE] if publishes_size else []), *_NOT_COVERED_BY_A_SEARCH, *NOT_COVERED),
    )
    if state.candidate is not None and state.slot is not None:
        _copy_contents(folder / _SECRET_FOLDER / state.slot / MODEL, folder / MODEL)
        filled = dataclasses.replace(search.candidates[state.candidate].prepared.job, output_dir=search.job.output_dir)
        write_job(search.job, filled, {}, folder, insecure_seed)
    replace_file(folder / RECORD_FILE, record.to_json() + "\n")
    return record


def _finished(secret: Path, state: _State, record: SelectionRecord) -> Outcome:
    """Delete the other runs and the key; last what a search that is killed here is resumed from."""
    for path in secret.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _STATE:
            path.unlink()
    (secret / _STATE).unlink()
    secret.rmdir()
    nothing = None if state.candidate is not None else state.failure or "no run was drawn"
    return Outcome(record, nothing)


def _copy_contents(source: Path, target: Path) -> None:
    """Copy the files of a folder, but not their times, which tell when in the search the best run was."""
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _copy_contents(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def _about(search: Search) -> dict[str, Any]:
    """Facts that an interrupted search must have in common with the one that goes on, as JSON values."""
    runs, _ = _counted(search)
    return {
        "candidates": [job_to_dict(candidate.prepared.job) for candidate in search.candidates],
        "mean_runs": runs.mean, "shape": str(runs.shape), "score_noise": search.score_noise,
        "train": data_name(search.records.train), "held_out": data_name(search.records.evaluation or ("",)),
        "versions": versions(),
    }  # fmt: skip


def _write(secret: Path, state: _State, about: dict[str, Any]) -> None:
    values = {**dataclasses.asdict(state), "key": bytes(state.key.secret).hex(), "guessable": state.key.guessable}
    replace_file(secret / _STATE, json.dumps({"state": values, "about": about}), 0o600)


def _resumed(secret: Path, about: dict[str, Any]) -> _State:
    """The state of an interrupted search, if it is this one."""
    path = secret / _STATE
    try:
        found = unique_json(path.read_bytes())
        values, known = found["state"], found["about"]
        key = Key(bytes.fromhex(values.pop("key")), values.pop("guessable"))
        state = _State(key, **{name: values[name] for name in ("done", "slot", "candidate", "score", "failure")})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The file {path} cannot be read ({type(error).__name__}). Nothing of that search was released: delete "
            "its folder, and begin again."
        ) from error
    changed = [name for name, value in json.loads(json.dumps(about)).items() if known.get(name) != value]
    if changed:
        raise CheckpointError(
            f"Expected the search that {str(secret.parent)!r} was begun with, got another: {', '.join(changed)} "
            "differ. It would repeat noise with other values. Give the same job, grid, records and versions; or delete "
            "the folder, of which nothing was released, and begin again."
        )
    return state
