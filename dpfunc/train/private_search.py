"""A search on private records: a random number of private runs, of which the best one alone is released."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpfunc._utils.locks import only_process
from dpfunc._utils.validation import fail, positive, unique_json
from dpfunc.accounting import Guarantee, Ledger, RunCount, calibrate_search
from dpfunc.accounting.record import (
    EXACT_SIZE,
    GUESSABLE,
    NOT_COVERED,
    RECORD_FILE,
    SECRET,
    SIZES,
    SelectionRecord,
    refuse_replaced,
    search_cost,
)
from dpfunc.checkpoint.chain import replace_file
from dpfunc.checkpoint.folder import remove, sweep
from dpfunc.checkpoint.prior_ledgers import read_spent
from dpfunc.checkpoint.record import versions
from dpfunc.errors import CheckpointError, DPFuncError, InvalidArgument, NotWritten
from dpfunc.plan import Plan
from dpfunc.rng import Key, fold_in, insecure_key, secure_key, stream
from dpfunc.sampling.records import data_name
from dpfunc.train.candidates import (
    MEANING,
    Candidate,
    check_scored,
    load,
    noise_of,
    noisy,
    score,
    shown,
    train_candidate,
)
from dpfunc.train.config import Job, job_to_dict
from dpfunc.train.dataset import Records, read_records
from dpfunc.train.grid import Trial
from dpfunc.train.model import load_processing
from dpfunc.train.run import check_job
from dpfunc.train.run_folder import MODEL, check_folder, check_spent_units, write_job
from dpfunc.types import Event

SECRET_FOLDER = "search"  # in output_dir, as long as the search is under way: as secret as the data
_STATE = "state.json"
NOT_COVERED_BY_A_SEARCH = (
    "the time that the search took, from which the number of its runs can be guessed",
    "whoever could read the folder while the search was under way: it held the other runs, and the key",
)


@dataclass(frozen=True)
class Search:
    """A private search, ready to begin.

    Args:
        job: as it was given; its budget is for the whole search. candidates: with the noise of one run.
        records: private, the held-out ones included. processing: tokenizer or processor.
        runs: distribution of the number of runs. score_noise: standard deviation.
        spent: by earlier runs. size: public number of records. cost: of the search, earlier runs included.
        alone: noise multiplier with which each candidate alone would spend the budget.
    """

    job: Job
    candidates: tuple[Candidate, ...]
    records: Records
    runs: RunCount
    score_noise: float
    spent: Ledger
    size: int
    cost: Guarantee
    alone: tuple[float, ...]

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """Cost of training each candidate once."""
        return tuple(candidate.plan.ledger() for candidate in self.candidates)


@dataclass(frozen=True)
class Outcome:
    """Result of a search, released: its record, and why there is no model, if there is none."""

    record: SelectionRecord
    nothing: str | None


@dataclass(frozen=True)
class _State:
    """Progress of a search. Secret.

    Args:
        key: of all that is random in it. done: number of finished runs.
        slot: name of the folder of the best one. candidate, score: of it. failure: of the first run that failed.
    """

    key: Key
    done: int = 0
    slot: str | None = None
    candidate: int | None = None
    score: float | None = None
    failure: str | None = None


def prepare_search(trials: Sequence[Trial], runs: RunCount, score_noise: float, *, shows: bool = False) -> Search:
    """Load everything, and find the noise with which the whole search costs the budget of the job; write nothing.

    Args:
        trials: combinations of a public grid. runs: distribution of the number of runs.
        score_noise: standard deviation of the noise of a score, > 0, in held-out records.
        shows: draw progress bars.

    Guarantees:
        tests/train/test_private_search.py::test_the_whole_search_costs_the_budget.
    """
    job = trials[0].job
    check_scored(job)
    _check_private(job)
    positive("score_noise", score_noise)
    processing = load_processing(job)
    records = read_records(job, processing)
    size = job.privacy.public_size(len(records.train))
    spent = read_spent(job.data.spent) or Ledger(adjacency=job.privacy.adjacency)
    check_spent_units(job)
    score_ledger = Ledger((Event(1.0, score_noise, 1),), job.privacy.adjacency)
    alone: list[float] = []

    def noise(plans: list[Plan]) -> list[Plan]:
        alone.extend(noise_of(plan) for plan in plans)

        def scaled(scale: float) -> list[Plan]:
            pairs = zip(plans, alone, strict=True)
            return [dataclasses.replace(plan, noise_multiplier=scale * sigma, epsilon=None) for plan, sigma in pairs]

        budget, delta = job.privacy.dp_epsilon or 0.0, plans[0].delta
        return scaled(
            calibrate_search(
                runs, lambda scale: [*(p.ledger() for p in scaled(scale)), score_ledger],
                epsilon=budget, delta=delta, spent=spent,
            )
        )  # fmt: skip

    candidates = load(trials, processing, records, size, noise, shows=shows)
    ledgers = [candidate.plan.ledger() for candidate in candidates]
    cost = search_cost(runs, ledgers, score_noise, candidates[0].plan.delta, spent)
    return Search(job, candidates, records, runs, score_noise, spent, size, cost, tuple(alone))


def _check_private(job: Job) -> None:
    """Refuse a job whose search would not be private, or would tell more than its best run."""
    privacy, data = job.privacy, job.data
    if not privacy.dp_enabled or privacy.dp_epsilon is None:
        raise fail("dp_epsilon, the budget of the whole search", "dp_epsilon", privacy.dp_epsilon)
    refuse_replaced("dp_adjacency", privacy.adjacency)
    if data.eval is not None or not data.eval_fraction:
        raise InvalidArgument(
            "Expected data.eval_fraction > 0, and no data.eval, for --private: runs are compared on a part of the "
            "private table, e.g. eval_fraction: 0.1. With a public table to compare on, search with --public."
        )
    if job.training.report_to is not None:
        raise fail(
            "no training.report_to for --private", "report_to", list(job.training.report_to), "It shows each run."
        )
    if privacy.dp_log_unreleased:
        raise fail("no dp_log_unreleased for --private", "dp_log_unreleased", True)


def search_lines(search: Search) -> list[str]:
    """The plan of a search in lines, from public numbers."""
    most, plans = search.runs.quantile(0.99), [candidate.plan for candidate in search.candidates]
    steps = sum(plan.num_steps for plan in plans) / len(plans)
    lines = [
        f"runs: {search.runs.mean:g} on average, with probability 0.99 at most {most}; each of a random candidate",
        f"steps: {search.runs.mean * steps:.0f} on average, with probability 0.99 at most about {most * steps:.0f}",
        f"score: {MEANING[search.job.task]}, plus noise of standard deviation {search.score_noise:g}",
    ]
    for candidate, plan, alone in zip(search.candidates, plans, search.alone, strict=True):
        one = plan.guarantee()
        lines.append(
            f"candidate {shown(candidate)}: noise multiplier {plan.noise_multiplier:.4g} (without a search "
            f"{alone:.4g}); one run would cost epsilon={one.epsilon:.4g}"
        )
    counted = f", with {search.spent.num_steps} steps of earlier runs" if search.spent.num_steps else ""
    cost = search.cost
    total = f"epsilon={cost.epsilon:.4g} at delta={cost.delta:g} ({cost.method}), {cost.adjacency}"
    return [*lines, f"the whole search{counted}: {total}"]


def check_search_folder(job: Job, resume: bool) -> None:
    """Check, before a table is read, that a search can begin or go on in the folder of its job."""
    if not resume:
        check_job(job, False, None)
    elif not (Path(job.output_dir) / SECRET_FOLDER / _STATE).is_file():
        raise CheckpointError(
            f"Expected an interrupted search in {job.output_dir!r}, found none. Begin without --resume."
        )


def run_search(search: Search, *, resume: bool = False, insecure_seed: int | None = None) -> Outcome:
    """Do the runs of a search, and release the best one.

    How many runs there are, and what the others were, is not told, and their files are deleted. A run that fails has
    the lowest score. Until the end nothing is released: an interrupted search has cost nothing, if nobody read its
    folder.

    Args:
        search: from `prepare_search`. resume: go on with the interrupted search in output_dir: the same key, and with
            it the same number of runs, candidates, batches and noise.
        insecure_seed: a key that anybody can guess, for tests and public data.

    Returns:
        The record, which is in output_dir as well; and a message if no model was released.

    Guarantees:
        tests/train/test_private_search.py::test_the_best_run_alone_is_released,
        ::test_a_killed_search_goes_on_with_the_same_result.
    """
    job = search.job
    folder = Path(job.output_dir)
    secret = folder / SECRET_FOLDER
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
        uniform = float(stream(fold_in(state.key, "number of runs")).random())
        while state.done < search.runs.quantile(uniform):
            state = _after_a_run(search, secret, state)
            _write(secret, state, about)
        return _finished(secret, state, _release(search, state, folder, insecure_seed))


def interrupted_search(job: Job) -> str:
    """Message after the user interrupts a search: its cost, and how it goes on."""
    folder = Path(job.output_dir)
    goes_on = "--resume goes on, with the same key and number of runs; or delete the folder."
    if (folder / MODEL).exists() or (folder / RECORD_FILE).exists():
        return f"Interrupted while the best run was released: the whole budget counts as spent. {goes_on}"
    if not (folder / SECRET_FOLDER / _STATE).is_file():
        return "Interrupted before the first run: nothing was spent."
    return (
        f"Interrupted. Nothing was released, so nothing was spent, unless somebody reads {folder / SECRET_FOLDER}: "
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
        model = train_candidate(candidate, secret / slot, fold_in(key, "training"))
        value = score(candidate.prepared, model, candidate.prepared.records.evaluation)
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
    publishes_size = search.spent.adjacency == "add_remove" and search.job.privacy.dp_dataset_size is None
    record = SelectionRecord(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        unit="one record of the table",  # the held-out ones too: not those of training alone
        epsilon=search.cost.epsilon,
        delta=search.cost.delta,
        target_epsilon=search.job.privacy.dp_epsilon or 0.0,
        runs=search.runs,
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
        not_covered=(*([EXACT_SIZE] if publishes_size else []), *NOT_COVERED_BY_A_SEARCH, *NOT_COVERED),
    )
    if state.candidate is not None and state.slot is not None:
        _copy_contents(folder / SECRET_FOLDER / state.slot / MODEL, folder / MODEL)
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
    return {
        "candidates": [job_to_dict(candidate.prepared.job) for candidate in search.candidates],
        "mean_runs": search.runs.mean, "shape": str(search.runs.shape), "score_noise": search.score_noise,
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
