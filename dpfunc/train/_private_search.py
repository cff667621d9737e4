"""A search on private records: of a random number of runs the best one alone is released, and the budget pays for all.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpfunc._utils.files import remove, replace_file, sweep, weights_in
from dpfunc._utils.locks import only_process
from dpfunc._utils.validation import expect, refuse, unique_json
from dpfunc.accounting import Ledger, record
from dpfunc.accounting.accountant import upper
from dpfunc.accounting.record import RECORD_FILE, Record, SelectionRecord, listed
from dpfunc.checkpoint.record import versions
from dpfunc.errors import BudgetExhausted, CheckpointError, LedgerConflict, NotWritten
from dpfunc.rehearsal import FAILURES
from dpfunc.rng import Key, fingerprint, fold_in, insecure_key, secure_key, stream
from dpfunc.sampling import data_name
from dpfunc.train import _run_folder as folders
from dpfunc.train._search import PrivateSearch
from dpfunc.train._search_runs import evaluate, noisy
from dpfunc.train.config import TASKS, Job, job_to_dict
from dpfunc.train.run import check_job

_SECRET_FOLDER = "search"  # in output_dir, as long as a private search is under way: as secret as the data
_STATE = "state.json"
_ALL_FAILED = "all runs failed. Why is private: a record may decide it. A search on public records (--public) shows it"
# Result of a private search, released: its record, and why there is no model, if there is none.
Outcome = tuple[SelectionRecord, str | None]


@dataclass(frozen=True)
class _State:
    """Progress of a private search, and the key of all that is random in it; slot: folder of the best run. Secret."""

    key: Key
    done: int = 0
    slot: str | None = None
    candidate: int | None = None
    score: float | None = None
    settings: dict[str, str] | None = None  # `record.SETTINGS` of the runs so far, which they have in common


def search_lines(search: PrivateSearch) -> list[str]:
    """The plan of a private search in lines, from public numbers."""
    runs, cost = search.runs, search.cost
    most, steps = runs.quantile(0.99), sum(each.plan.num_steps for each in search.candidates) / len(search.candidates)
    counted = f", with {search.spent.num_steps} steps of earlier runs" if search.spent.num_steps else ""
    return [
        f"runs: {runs.mean:g} on average, with probability 0.99 at most {most}; each of a random candidate",
        f"steps: {runs.mean * steps:.0f} on average, with probability 0.99 at most about {most * steps:.0f}",
        f"score: {TASKS[search.job.task].score}, plus noise of standard deviation {search.score_noise:g}",
        *(f"candidate {listed(each.values)}: noise multiplier {each.plan.noise_multiplier:.4g} (without a search "
          f"{each.alone:.4g}); one run would cost epsilon={upper(each.plan.guarantee().epsilon, 4)}"
          for each in search.candidates),
        f"the whole search{counted}: epsilon={upper(cost.epsilon, 4)} at delta={cost.delta:g} ({cost.method}), "
        f"{cost.adjacency}",
    ]  # fmt: skip


def outcome_lines(outcome: Outcome, folder: str, insecure_seed: int | None) -> list[str]:
    """The result of a private search in lines: all of it is released."""
    search, reason = outcome
    spent = f"epsilon={upper(search.epsilon, 4)} at delta={search.delta:g}"
    lines = [f"Spent by the whole search: {spent}, one record protected."]
    if insecure_seed is not None:
        lines.append(f"BUT anybody can guess the noise: --insecure-seed {insecure_seed}. Nothing is protected.")
    if search.chosen is None:
        lines.append(f"No model was released: {reason}.")
    else:
        best, noise = listed(search.candidates[search.chosen]), f"noise of standard deviation {search.score_noise:g}"
        lines += [
            f"Best: {best}; score {search.chosen_score:.4g}, with {noise}.",
            f"Saved: {folder}/{folders.MODEL}. The other runs were deleted.",
        ]
    return [
        *lines,
        f"Accounting: {folder}/{RECORD_FILE}.",
        f"Not covered by epsilon: {'; '.join(search.not_covered[: 2 - len(record.NOT_COVERED)])}.",
    ]


def check_search_folder(job: Job, resume: bool) -> None:
    """Check, before a table is read, that a private search can begin or go on in the folder of its job."""
    if not resume:
        check_job(job, False, None)
    elif not (Path(job.output_dir) / _SECRET_FOLDER / _STATE).is_file():
        raise CheckpointError(
            f"Expected an interrupted search in {job.output_dir!r}, found none. Begin without --resume."
        )


def run_search(search: PrivateSearch, *, resume: bool = False, insecure_seed: int | None = None) -> Outcome:
    """Do the runs of a private search, and release the best one.

    How many runs there are, and what the others were, is not told, and their files are deleted. A run that fails has
    the lowest score. Until the end nothing is released: an interrupted search has cost nothing, if nobody read its
    folder; it is resumed with the same key, number of runs, candidates, batches and noise.

    Guarantees:
        tests/train/test_search.py::test_the_best_run_alone_is_released,
        ::test_a_killed_search_goes_on_with_the_same_result.
    """
    job, folder = search.job, Path(search.job.output_dir)
    secret = folder / _SECRET_FOLDER
    check_search_folder(job, resume)
    with only_process(folder):
        about = {**_about(search), "insecure_seed": insecure_seed}
        if resume:
            state = _resumed(secret, about)
            if (folder / RECORD_FILE).is_file():  # it is written last: only the secret folder is left to be deleted
                found = SelectionRecord.from_json((folder / RECORD_FILE).read_bytes())
                expect(
                    found.run in ("", fingerprint(state.key)), f"the record of this search in {str(folder)!r}", "run",
                    found.run, "It is of another search: restore that of this one, or remove it.",
                )  # fmt: skip
                return _finished(secret, state, found)
        else:
            folders.check_folder(job, False, None)  # again: another process may have ended there
            state = _State(secure_key() if insecure_seed is None else insecure_key(insecure_seed))
        secret.mkdir(mode=0o700, exist_ok=True)
        sweep(secret)
        _write(secret, state, about)
        if (budget := folders.budget_of(job)) is not None:
            try:
                budget.reserve(search.cost, state.key, unit=folders.unit_of(job), before=search.spent)
            except (BudgetExhausted, LedgerConflict):  # nothing was reserved: the folder is as it was
                if not resume:
                    remove(secret)
                raise
        uniform = float(stream(fold_in(state.key, "number of runs")).random())
        while state.done < search.runs.quantile(uniform):
            state = _after_a_run(search, secret, state)
            _write(secret, state, about)
        return _finished(secret, state, _release(search, state, folder, insecure_seed))


def interrupted_search(job: Job, how: str = "Interrupted") -> str:
    """Message after a private search was ended: its cost, and how it goes on."""
    folder = Path(job.output_dir)
    goes_on = "--resume goes on, with the same key and number of runs; or delete the folder."
    if (folder / folders.MODEL).exists() or (folder / RECORD_FILE).exists():
        return f"{how} while the best run was released: the whole budget counts as spent. {goes_on}"
    if not (folder / _SECRET_FOLDER / _STATE).is_file():
        return f"{how} before the first run: nothing was spent."
    return (
        f"{how}. Nothing was released, so nothing was spent, unless others can read {folder / _SECRET_FOLDER}: "
        f"keep it as secret as the data. {goes_on}"
    )


def _after_a_run(search: PrivateSearch, secret: Path, state: _State) -> _State:
    """The state after one run more, in a folder that the best run so far does not use."""
    slot = "b" if state.slot == "a" else "a"
    remove(secret / slot)  # of an interrupted or a worse run
    key = fold_in(state.key, "run", state.done)
    number = int(stream(fold_in(key, "candidate")).integers(len(search.candidates)))
    done = state.done + 1
    candidate = search.candidates[number]
    try:
        value = evaluate(candidate, secret / slot, fold_in(key, "training"))
    except (NotWritten, OSError, ImportError):  # no fault of the run: the search goes on from here
        raise
    except FAILURES:
        # A run that fails counts as the worst: without it the number of runs would depend on the data. Neither its
        # message nor its type is told: a record may decide both.
        return replace(state, done=done)
    noisy_score = noisy(value, search.score_noise, fold_in(key, "score"))
    state = replace(state, done=done, settings=_settings(secret / slot, candidate.plan.ledger(), state.settings))
    if state.score is not None and noisy_score <= state.score:
        return state
    return replace(state, slot=slot, candidate=number, score=noisy_score)


def _release(search: PrivateSearch, state: _State, folder: Path, insecure_seed: int | None) -> SelectionRecord:
    """Write the best run, and the record of the search, into the folder; again the same after an interruption."""
    cost, stated = search.cost, search.job.privacy.dp_dataset_size is not None
    exact = [] if stated or search.spent.adjacency != "add_remove" else [record.EXACT_SIZE]
    others = [record.OTHER_STEPS] if search.spent.events else []
    best = folder / _SECRET_FOLDER / (state.slot or "") / folders.MODEL
    weights = () if state.candidate is None else tuple(weights_in(best.parent))
    released = SelectionRecord(
        date=datetime.now(UTC).isoformat(timespec="seconds"), run=fingerprint(state.key),
        unit="one record of the table",  # the held-out ones too: not those of training alone
        epsilon=cost.epsilon, delta=cost.delta, target_epsilon=search.job.privacy.dp_epsilon or 0.0, runs=search.runs,
        candidates=tuple(candidate.values for candidate in search.candidates),
        ledgers=tuple(candidate.plan.ledger() for candidate in search.candidates),
        score=TASKS[search.job.task].score, score_noise=search.score_noise, chosen=state.candidate,
        chosen_score=state.score, spent=search.spent,
        noise_key=record.GUESSABLE if state.key.guessable else record.SECRET,
        dataset_size=search.size, dataset_size_is=record.SIZES[stated], versions=versions(),
        not_covered=(*exact, *others, *record.SEARCH_NOT_COVERED, *record.NOT_COVERED),
        settings=None if state.candidate is None else state.settings, weights=weights,
    )  # fmt: skip
    if state.candidate is not None:
        # not their times, which tell when in the search the best run was
        shutil.copytree(best, folder / folders.MODEL, copy_function=shutil.copyfile, dirs_exist_ok=True)
        for path in (folder / folders.MODEL, *(folder / folders.MODEL).rglob("*")):
            os.utime(path)
        filled = replace(search.candidates[state.candidate].prepared.job, output_dir=search.job.output_dir)
        folders.write_job(search.job, filled, {}, folder, insecure_seed)
    replace_file(folder / RECORD_FILE, released.to_json() + "\n")
    return released


def _settings(slot: Path, counted: Ledger, known: dict[str, str] | None) -> dict[str, str]:
    """The settings of a run, which is refused unless it took the steps that the search counts, as those before it."""
    own = Record.from_json((slot / RECORD_FILE).read_bytes())
    settings = {name: getattr(own, name) for name in record.SETTINGS}
    refuse(
        (own.ledger != counted, CheckpointError(
            f"Expected a run with the steps that the search counts for it, {counted}, got {own.ledger}. Nothing was "
            "released. Report this.")),
        (known not in (None, settings), CheckpointError(
            f"Expected runs with the settings of those before, {known}, which the record of the search says of all, "
            f"got {settings}. Resume the search where it began. Nothing was released.")),
    )  # fmt: skip
    return settings


def _finished(secret: Path, state: _State, released: SelectionRecord) -> Outcome:
    """Delete the other runs and the key; the file from which a killed search resumes is deleted last."""
    for path in secret.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    shutil.rmtree(secret)
    reason = _ALL_FAILED if state.done else "no run was drawn"
    return released, reason if state.candidate is None else None


def _about(search: PrivateSearch) -> dict[str, Any]:
    """Facts that must be equal in an interrupted search and the one that continues it, as JSON values."""
    return {
        "candidates": [job_to_dict(candidate.prepared.job) for candidate in search.candidates],
        "mean_runs": search.runs.mean, "shape": str(search.runs.shape), "score_noise": search.score_noise,
        "train": data_name(search.records.train), "held_out": data_name(search.records.evaluation or ("",)),
        "versions": versions(),
    }  # fmt: skip


def _write(secret: Path, state: _State, about: dict[str, Any]) -> None:
    values = {**asdict(state), "key": bytes(state.key.secret).hex(), "guessable": state.key.guessable}
    replace_file(secret / _STATE, json.dumps({"state": values, "about": about}), 0o600)


def _resumed(secret: Path, about: dict[str, Any]) -> _State:
    """The state of an interrupted search, if it is this one."""
    path = secret / _STATE
    try:
        saved = unique_json(path.read_bytes())
        values, known = saved["state"], dict(saved["about"])
        state = _State(Key(bytes.fromhex(values.pop("key")), values.pop("guessable")), **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The file {path} cannot be read ({type(error).__name__}). Nothing of that search was released: delete "
            "its folder, and begin again."
        ) from error
    if changed := [name for name, value in json.loads(json.dumps(about)).items() if known.get(name) != value]:
        raise CheckpointError(
            f"Expected the search that {str(secret.parent)!r} was begun with, got another: {', '.join(changed)} "
            "differ. It would repeat noise with other values. Give the same job, grid, records and versions; or delete "
            "the folder, of which nothing was released, and begin again."
        )
    return state
