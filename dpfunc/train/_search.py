"""A search: the jobs of a grid, scored on public records, or on private ones, where the best run alone is released.

May import: its folder, features and below. Trusted: yes.

The score of a model is a sum to which each held-out record adds a number between 0 and 1.
"""

import contextlib
import copy
import json
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfunc._utils.files import remove, replace_file, sha256, sweep
from dpfunc._utils.locks import only_process
from dpfunc._utils.validation import expect, fail, positive, refuse, unique_json
from dpfunc.accounting import Guarantee, Ledger, RunCount, calibrate_search, record
from dpfunc.accounting.record import RECORD_FILE, Record, SelectionRecord, listed
from dpfunc.checkpoint.record import versions
from dpfunc.errors import CheckpointError, DPFuncError, InvalidArgument, NotWritten
from dpfunc.plan import Plan
from dpfunc.rng import Key, fold_in, insecure_key, secure_key, stream
from dpfunc.sampling import data_name
from dpfunc.train import _run_folder as folders
from dpfunc.train._config_file import GRID_KEYS
from dpfunc.train._dataset import Records, collator, count_records, read_records
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._model import choose_parameters, key_of, load_base, load_processing
from dpfunc.train._preferences import is_preferred
from dpfunc.train._recipe import with_recipe, with_shape
from dpfunc.train._saved import save_model
from dpfunc.train.config import ADAPTERS, FEATURES, Job, job_to_dict
from dpfunc.train.run import Prepared, check_job, check_packed, make_trainer
from dpfunc.train.tables import same_file
from dpfunc.types import Event, schedule_at

_RIGHT, _LOSS, _PREFERRED = record.SCORES
# What a score is, by task.
MEANING = {
    **dict.fromkeys(("text_classification", *FEATURES), _RIGHT), "causal_lm": _LOSS, "vqa": _LOSS,
    "preference": _PREFERRED,
}  # fmt: skip
_HELD_OUT = 0.2  # of public records, where the job has no share
_SECRET_FOLDER = "search"  # in output_dir, as long as a private search is under way: as secret as the data
_STATE = "state.json"


@dataclass(frozen=True)
class Candidate:
    """One combination of a grid: what distinguishes it, by the keys of the grid; and the plan of one run."""

    values: dict[str, float]
    prepared: Prepared
    plan: Plan
    alone: float  # noise multiplier with which it alone, without a search, would spend the budget


@dataclass(frozen=True)
class Search:
    """A search, ready to begin. The last three are of one on private records alone; another one costs nothing."""

    job: Job
    candidates: tuple[Candidate, ...]
    records: Records  # public; or private, the held-out ones included
    size: int  # public number of private records
    spent: Ledger  # by earlier runs on the private records
    runs: RunCount | None = None
    score_noise: float = 0.0
    cost: Guarantee | None = None  # of all runs, the earlier ones included

    @property
    def counted(self) -> tuple[RunCount, Guarantee]:
        """The distribution of the number of private runs, and what they cost together."""
        if self.runs is None or self.cost is None:
            raise InvalidArgument("Expected a search on private records, got one on public records: use run_public.")
        return self.runs, self.cost


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
    failure: str | None = None  # of the first run that failed


def prepare_search(
    trials: Sequence[tuple[Job, float]], *, public: Path | None = None, runs: RunCount | None = None,
    score_noise: float = 0.0, shows: bool = False,
) -> Search:  # fmt: skip
    """Load everything, and find the noise of each candidate; write nothing.

    On public records each has noise, batch size and steps of the private run (tests/train/test_search.py,
    test_public_runs_have_the_noise_of_the_private_run); a private search costs the budget of the job
    (test_the_whole_search_costs_the_budget).
    """
    job = trials[0][0]
    _check(job, public)
    processing = load_processing(job)
    if public is None:
        positive("score_noise", score_noise)
        records = read_records(job, processing)
        size = job.privacy.public_size(len(records.train))
    else:
        records, size = _public_records(job, public, processing)
    earlier = folders.spent_before(job)
    folders.check_spent_units(job)
    found = load(trials, processing, records, size, spent=earlier, runs=runs, score_noise=score_noise, shows=shows)
    spent = earlier or Ledger(adjacency=job.privacy.adjacency)
    if runs is None:
        return Search(job, tuple(_on_public(candidate) for candidate in found), records, size, spent)
    cost = record.search_cost(runs, [each.plan.ledger() for each in found], score_noise, found[0].plan.delta, spent)
    return Search(job, found, records, size, spent, runs, score_noise, cost)


def _check(job: Job, public: Path | None) -> None:
    """Check that records have a score, to which each unit adds at most 1, and that a private search is private."""
    privacy, data, private = job.privacy, job.data, public is None
    check_packed(job)
    refuse(
        (job.task not in MEANING, fail(f"a task whose runs can be compared ({', '.join(MEANING)})", "task", job.task)),
        (data.unit_column is not None,
         fail("no data.unit_column in a search", "unit_column", data.unit_column,
              "The scored records of one person would change the score by more than 1. Choose the rates on public "
              "records, one a person.")),
        (not privacy.dp_enabled or privacy.dp_epsilon is None,
         fail(f"dp_epsilon, the budget of {'the whole search' if private else 'the private run'}", "dp_epsilon",
              privacy.dp_epsilon)),
        (private and (data.eval is not None or not data.eval_fraction),
         "Expected data.eval_fraction > 0, and no data.eval, for --private: runs are compared on a part of the "
         "private table, e.g. eval_fraction: 0.1. With a public table to compare on, search with --public."),
        (private and job.training.report_to is not None,
         fail("no training.report_to for --private", "report_to", job.training.report_to, "It shows each run.")),
        (private and privacy.dp_log_unreleased,
         fail("no dp_log_unreleased for --private", "dp_log_unreleased", True)),
    )  # fmt: skip
    if private:
        record.refuse_replaced("dp_adjacency", privacy.adjacency)


def _public_records(job: Job, public: Path, processing: Any) -> tuple[Records, int]:
    """As many public records as there are private ones, and the number of these."""
    refuse(
        (same_file(public, Path(job.data.train)),
         f"Expected a table of public records, got --public {public}, which is the private data.train. What is "
         "chosen by private records costs privacy: search without --public, and the search is counted."),
    )  # fmt: skip
    size = job.privacy.dp_dataset_size or count_records(job)
    share = job.data.eval_fraction or _HELD_OUT
    data = replace(job.data, train=str(public), eval=None, spent=None, eval_fraction=share)
    records = read_records(replace(job, data=data), processing)
    expect(records.evaluation, "public records to compare on", "data.eval_fraction", share, "The table is too small.")
    order = stream(key_of(job, "public records")).permutation(len(records.train))[:size]
    return replace(records, train=tuple(records.train[row] for row in order)), size


def load(
    trials: Sequence[tuple[Job, float]], processing: Any, records: Records, size: int, *, spent: Ledger | None = None,
    runs: RunCount | None = None, score_noise: float = 0.0, shows: bool = False,
) -> tuple[Candidate, ...]:  # fmt: skip
    """Load the models of a grid, find the noise, and fill in what the recipe gives for the epsilon of one run.

    The noise is that with which all runs together cost the budget, or, without `runs`, each alone.
    """
    models: dict[int, tuple[nn.Module, Records]] = {}
    alone: list[Plan] = []  # plans with which one run would spend the whole budget
    jobs = [with_shape(job) for job, _ in trials]
    for job in jobs:
        if job.lora.rank not in models:
            model = choose_parameters(load_base(job, processing), job, processing)
            models[job.lora.rank] = model, compute_frozen(job, model, records, shows=shows)[0]
        own, _ = with_recipe(job, models[job.lora.rank][0], size)
        alone.append(
            own.privacy.plan(size, own.batch_size, own.training.num_steps(size), spent if runs is None else None)
        )
    plans = alone if runs is None else _within_budget(jobs[0], alone, runs, score_noise, spent)
    found = []
    for (_, factor), job, one, plan in zip(trials, jobs, alone, plans, strict=True):
        model, kept = models[job.lora.rank]
        filled = _filled(job, factor, model, size, plan)
        values = {key: getattr(getattr(filled, section), name) for key, (section, name) in GRID_KEYS.items()}
        if filled.strategy not in ADAPTERS:
            del values["rank"]
        found.append(
            Candidate(values, Prepared(filled, model, processing, kept, plan, plan.num_steps), plan, noise_of(one))
        )
    return tuple(found)


def _within_budget(job: Job, alone: list[Plan], runs: RunCount, score_noise: float, spent: Ledger | None) -> list[Plan]:
    """Plans with more noise: the best of a random number of runs, each with a score, costs the budget of the job."""
    before = spent or Ledger(adjacency=job.privacy.adjacency)
    score = Ledger((Event(1.0, score_noise, 1),), before.adjacency)

    def scaled(scale: float) -> list[Plan]:
        return [replace(plan, noise_multiplier=scale * noise_of(plan), epsilon=None) for plan in alone]

    return scaled(calibrate_search(
        runs, lambda scale: [*(plan.ledger() for plan in scaled(scale)), score],
        epsilon=job.privacy.dp_epsilon or 0.0, delta=alone[0].delta, spent=before,
    ))  # fmt: skip


def _filled(job: Job, factor: float, model: nn.Module, size: int, plan: Plan) -> Job:
    """The job of one run, with the values of the recipe for its epsilon, and without what would publish anything."""
    privacy = replace(job.privacy, dp_epsilon=plan.guarantee().epsilon)
    by_recipe, _ = with_recipe(replace(job, privacy=privacy), model, size)
    found = by_recipe.training
    training = replace(
        found,
        learning_rate=factor * (found.learning_rate or 0.0),
        head_rate=None if found.head_rate is None else factor * found.head_rate,
        steps=plan.num_steps, epochs=None, eval_steps=None, report_to=None, save_steps=plan.num_steps,
    )  # fmt: skip
    return replace(
        job, training=training, privacy=replace(by_recipe.privacy, dp_epsilon=None, dp_noise_multiplier=noise_of(plan))
    )


def _on_public(candidate: Candidate) -> Candidate:
    """The candidate with what its privacy arguments say about the number of records left out."""
    prepared = candidate.prepared
    there, batch = len(prepared.records.train), prepared.job.batch_size
    refuse(
        (there < batch,
         f"Expected at least {batch} public records to train on, the batch size of a candidate, got {there}. Take a "
         "larger public table, or smaller batches: --grid batch_size=..."),
    )  # fmt: skip
    privacy = replace(prepared.job.privacy, dp_dataset_size=None, dp_allow_large_delta=True)
    return replace(candidate, prepared=replace(prepared, job=replace(prepared.job, privacy=privacy)))


def noise_of(plan: Plan) -> float:
    """Noise multiplier of a plan of a job, which is the same in all steps."""
    return schedule_at(plan.noise_multiplier, 0)


def train_candidate(candidate: Candidate, folder: Path, key: Key | None) -> Any:
    """Train a candidate from its start, and save its model; print and log nothing."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    prepared = candidate.prepared
    job = replace(prepared.job, output_dir=str(folder))
    fresh = replace(
        prepared, job=job, records=replace(prepared.records, evaluation=()), model=copy.deepcopy(prepared.model)
    )
    with _quiet():
        trainer = make_trainer(fresh, key)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.train()
        save_model(folder / folders.MODEL, job, trainer.model, prepared.processing)
    return trainer.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context without warnings, logs or progress bars: their number would reveal the number of runs."""
    with (
        contextlib.ExitStack() as held, warnings.catch_warnings(action="ignore"),
        open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):  # fmt: skip
        held.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        yield


@torch.no_grad()
def score(prepared: Prepared, model: Any, rows: Sequence[Mapping[str, Any]]) -> float:
    """The sum of the scores of records, each computed alone and between 0 and 1; private, see `noisy`."""
    # tests/train/test_search.py::test_one_record_changes_the_score_by_at_most_one
    model.train(False)
    collate = collator(prepared.job, prepared.processing)
    total = 0.0
    for row in rows:
        batch = {name: value.to(model.device) for name, value in collate([row]).items()}
        if prepared.job.task == "preference":
            total += is_preferred(prepared.job, model, batch)
            continue
        output = model(**batch)
        if MEANING[prepared.job.task] == _RIGHT:
            total += float(output.logits[0].argmax() == batch["labels"][0])
        elif math.isfinite(loss := float(output.loss)):
            total += min(1.0, max(0.0, 1 - loss / math.log(output.logits.shape[-1])))
    return total


def noisy(value: float, noise: float, key: Key) -> float:
    """A score with Gaussian noise of standard deviation `noise`; so it costs `Event(1.0, noise, 1)`."""
    return value + noise * float(stream(key).standard_normal())


def _evaluate(candidate: Candidate, folder: Path, key: Key) -> float:
    """Train a candidate, and the sum of the scores of its held-out records."""
    return score(candidate.prepared, train_candidate(candidate, folder, key), candidate.prepared.records.evaluation)


def run_public(search: Search, insecure_seed: int | None = None) -> Iterator[float]:
    """Train each candidate once, and give its mean score on the held-out public records, in their order."""
    root = secure_key() if insecure_seed is None else insecure_key(insecure_seed)
    for number, candidate in enumerate(search.candidates):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            value = _evaluate(candidate, Path(folder), fold_in(root, "public", number))
        yield value / len(candidate.prepared.records.evaluation)


def tuned(values: Mapping[str, Any], chosen: Job) -> dict[str, Any]:
    """The values of a job file with those of a candidate, for `dpfunc train`."""

    def given(section: object, *names: str) -> dict[str, Any]:
        return {name: getattr(section, name) for name in names if getattr(section, name) is not None}

    kept = {
        **{name: value for name, value in (values.get("training") or {}).items() if name != "epochs"},
        **given(chosen.training, "learning_rate", "head_rate", "batch_size", "steps", "physical_batch_size"),
    }
    if chosen.strategy not in ADAPTERS:
        return {**values, "training": kept}
    return {**values, "training": kept, "lora": (values.get("lora") or {}) | given(chosen.lora, "rank", "top_layers")}


def search_lines(search: Search) -> list[str]:
    """The plan of a private search in lines, from public numbers."""
    runs, cost = search.counted
    most, steps = runs.quantile(0.99), sum(each.plan.num_steps for each in search.candidates) / len(search.candidates)
    counted = f", with {search.spent.num_steps} steps of earlier runs" if search.spent.num_steps else ""
    return [
        f"runs: {runs.mean:g} on average, with probability 0.99 at most {most}; each of a random candidate",
        f"steps: {runs.mean * steps:.0f} on average, with probability 0.99 at most about {most * steps:.0f}",
        f"score: {MEANING[search.job.task]}, plus noise of standard deviation {search.score_noise:g}",
        *(f"candidate {listed(each.values)}: noise multiplier {each.plan.noise_multiplier:.4g} (without a search "
          f"{each.alone:.4g}); one run would cost epsilon={each.plan.guarantee().epsilon:.4g}"
          for each in search.candidates),
        f"the whole search{counted}: epsilon={cost.epsilon:.4g} at delta={cost.delta:g} ({cost.method}), "
        f"{cost.adjacency}",
    ]  # fmt: skip


def outcome_lines(outcome: Outcome, folder: str, insecure_seed: int | None) -> list[str]:
    """The result of a private search in lines: all of it is released."""
    found, nothing = outcome
    lines = [f"Spent by the whole search: epsilon={found.epsilon:.4g} at delta={found.delta:g}, one record protected."]
    if insecure_seed is not None:
        lines.append(f"BUT anybody can guess the noise: --insecure-seed {insecure_seed}. Nothing is protected.")
    if found.chosen is None:
        lines.append(f"No model was released: {nothing}.")
    else:
        best, noise = listed(found.candidates[found.chosen]), f"noise of standard deviation {found.score_noise:g}"
        lines += [
            f"Best: {best}; score {found.chosen_score:.4g}, with {noise}.",
            f"Saved: {folder}/{folders.MODEL}. The other runs were deleted.",
        ]
    return [
        *lines,
        f"Accounting: {folder}/{RECORD_FILE}.",
        f"Not covered by epsilon: {'; '.join((*record.SEARCH_NOT_COVERED, *record.NOT_COVERED[:2]))}.",
    ]


def check_search_folder(job: Job, resume: bool) -> None:
    """Check, before a table is read, that a private search can begin or go on in the folder of its job."""
    if not resume:
        check_job(job, False, None)
    elif not (Path(job.output_dir) / _SECRET_FOLDER / _STATE).is_file():
        raise CheckpointError(
            f"Expected an interrupted search in {job.output_dir!r}, found none. Begin without --resume."
        )


def run_search(search: Search, *, resume: bool = False, insecure_seed: int | None = None) -> Outcome:
    """Do the runs of a private search, and release the best one.

    How many runs there are, and what the others were, is not told, and their files are deleted. A run that fails has
    the lowest score. Until the end nothing is released: an interrupted search has cost nothing, if nobody read its
    folder; it is resumed with the same key, number of runs, candidates, batches and noise.

    Guarantees:
        tests/train/test_search.py::test_the_best_run_alone_is_released,
        ::test_a_killed_search_goes_on_with_the_same_result.
    """
    job, (runs, cost) = search.job, search.counted
    folder = Path(job.output_dir)
    secret = folder / _SECRET_FOLDER
    check_search_folder(job, resume)
    with only_process(folder):
        about = {**_about(search), "insecure_seed": insecure_seed}
        if resume:
            state = _resumed(secret, about)
            if (folder / RECORD_FILE).is_file():  # it is written last: only the secret folder is left to be deleted
                return _finished(secret, state, SelectionRecord.from_json((folder / RECORD_FILE).read_bytes()))
        else:
            folders.check_folder(job, False, None)  # again: another process may have ended there
            state = _State(secure_key() if insecure_seed is None else insecure_key(insecure_seed))
        secret.mkdir(mode=0o700, exist_ok=True)
        sweep(secret)
        _write(secret, state, about)
        if (budget := folders.budget_of(job)) is not None:
            budget.reserve(cost, state.key, unit=folders.unit_of(job), before=search.spent)
        uniform = float(stream(fold_in(state.key, "number of runs")).random())
        while state.done < runs.quantile(uniform):
            state = _after_a_run(search, secret, state)
            _write(secret, state, about)
        return _finished(secret, state, _release(search, state, folder, insecure_seed))


def interrupted_search(job: Job) -> str:
    """Message after the user interrupts a private search: its cost, and how it goes on."""
    folder = Path(job.output_dir)
    goes_on = "--resume goes on, with the same key and number of runs; or delete the folder."
    if (folder / folders.MODEL).exists() or (folder / RECORD_FILE).exists():
        return f"Interrupted while the best run was released: the whole budget counts as spent. {goes_on}"
    if not (folder / _SECRET_FOLDER / _STATE).is_file():
        return "Interrupted before the first run: nothing was spent."
    return (
        f"Interrupted. Nothing was released, so nothing was spent, unless others can read {folder / _SECRET_FOLDER}: "
        f"keep it as secret as the data. {goes_on}"
    )


def _after_a_run(search: Search, secret: Path, state: _State) -> _State:
    """The state after one run more, in a folder that the best run so far does not use."""
    slot = "b" if state.slot == "a" else "a"
    remove(secret / slot)  # of an interrupted or a worse run
    key = fold_in(state.key, "run", state.done)
    number = int(stream(fold_in(key, "candidate")).integers(len(search.candidates)))
    done = state.done + 1
    try:
        value = _evaluate(search.candidates[number], secret / slot, fold_in(key, "training"))
    except NotWritten:  # no fault of the run: the search goes on from here
        raise
    except (DPFuncError, ArithmeticError, RuntimeError, ValueError) as error:
        # A run that fails counts as the worst: without it the number of runs would depend on the data.
        return replace(state, done=done, failure=state.failure or f"{type(error).__name__}: {error}")
    found = noisy(value, search.score_noise, fold_in(key, "score"))
    if state.score is not None and found <= state.score:
        return replace(state, done=done)
    return replace(state, done=done, slot=slot, candidate=number, score=found)


def _release(search: Search, state: _State, folder: Path, insecure_seed: int | None) -> SelectionRecord:
    """Write the best run, and the record of the search, into the folder; again the same after an interruption."""
    (runs, cost), stated = search.counted, search.job.privacy.dp_dataset_size is not None
    exact = [] if stated or search.spent.adjacency != "add_remove" else [record.EXACT_SIZE]
    settings: dict[str, str] | None = None
    best = folder / _SECRET_FOLDER / (state.slot or "") / folders.MODEL
    if state.candidate is not None:
        settings = _settings(best.parent, search.candidates[state.candidate].plan.ledger())
    weights = () if settings is None else tuple(map(sha256, sorted(best.rglob("*.safetensors"))))
    found = SelectionRecord(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        unit="one record of the table",  # the held-out ones too: not those of training alone
        epsilon=cost.epsilon, delta=cost.delta, target_epsilon=search.job.privacy.dp_epsilon or 0.0, runs=runs,
        candidates=tuple(candidate.values for candidate in search.candidates),
        ledgers=tuple(candidate.plan.ledger() for candidate in search.candidates),
        score=MEANING[search.job.task], score_noise=search.score_noise, chosen=state.candidate,
        chosen_score=state.score, spent=search.spent,
        noise_key=record.GUESSABLE if state.key.guessable else record.SECRET,
        dataset_size=search.size, dataset_size_is=record.SIZES[stated], versions=versions(),
        not_covered=(*exact, *record.SEARCH_NOT_COVERED, *record.NOT_COVERED), settings=settings, weights=weights,
    )  # fmt: skip
    if state.candidate is not None:
        # not their times, which tell when in the search the best run was
        shutil.copytree(best, folder / folders.MODEL, copy_function=shutil.copyfile, dirs_exist_ok=True)
        for path in (folder / folders.MODEL, *(folder / folders.MODEL).rglob("*")):
            os.utime(path)
        filled = replace(search.candidates[state.candidate].prepared.job, output_dir=search.job.output_dir)
        folders.write_job(search.job, filled, {}, folder, insecure_seed)
    replace_file(folder / RECORD_FILE, found.to_json() + "\n")
    return found


def _settings(slot: Path, counted: Ledger) -> dict[str, str]:
    """The settings of a run, which is refused unless it took the steps that the search counts."""
    own = Record.from_json((slot / RECORD_FILE).read_bytes())
    refuse(
        (own.ledger != counted, CheckpointError(
            f"Expected a run with the steps that the search counts for it, {counted}, got {own.ledger}. Nothing was "
            "released. Report this.")),
    )  # fmt: skip
    return {name: getattr(own, name) for name in record.SETTINGS}


def _finished(secret: Path, state: _State, found: SelectionRecord) -> Outcome:
    """Delete the other runs and the key; the file from which a killed search resumes is deleted last."""
    for path in secret.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _STATE:
            path.unlink()
    (secret / _STATE).unlink()
    secret.rmdir()
    return found, None if state.candidate is not None else state.failure or "no run was drawn"


def _about(search: Search) -> dict[str, Any]:
    """Facts that must be equal in an interrupted search and the one that continues it, as JSON values."""
    runs, _ = search.counted
    return {
        "candidates": [job_to_dict(candidate.prepared.job) for candidate in search.candidates],
        "mean_runs": runs.mean, "shape": str(runs.shape), "score_noise": search.score_noise,
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
        found = unique_json(path.read_bytes())
        values, known = found["state"], dict(found["about"])
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
