"""A search: the jobs of a grid, trained and scored on public records, or on private ones (`private_search`).

The score of a model is a sum to which each held-out record adds a number between 0 and 1.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfunc._utils.validation import fail, positive
from dpfunc.accounting import Guarantee, Ledger, RunCount, calibrate_search
from dpfunc.accounting.record import refuse_replaced, search_cost
from dpfunc.errors import InvalidArgument
from dpfunc.plan import Plan
from dpfunc.rng import Key, fold_in, insecure_key, secure_key, stream
from dpfunc.train._config_file import GRID_KEYS, Trial
from dpfunc.train._dataset import Records, collator, count_records, read_records
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._model import choose_parameters, key_of, load_base, load_processing
from dpfunc.train._recipe import with_recipe, with_shape
from dpfunc.train._run_folder import MODEL, check_spent_units, spent_before
from dpfunc.train.config import ADAPTERS, FEATURES, Job
from dpfunc.train.run import Prepared, make_trainer, save_model
from dpfunc.train.tables import same_file
from dpfunc.types import Event, schedule_at

_LOSS = "sum over held-out records of 1 - loss / log(vocabulary), at least 0 and at most 1"
_RIGHT = "number of held-out records whose most likely class is their label"
MEANING = {
    **dict.fromkeys(("text_classification", *FEATURES), _RIGHT),
    "causal_lm": _LOSS,
    "vqa": _LOSS,
}
"""What a score is, by task."""
_HELD_OUT = 0.2  # of public records, where the job has no share


@dataclass(frozen=True)
class Candidate:
    """One combination of a grid: what distinguishes it, by the keys of the grid; and the plan of one run."""

    values: dict[str, float]
    prepared: Prepared
    plan: Plan
    alone: float
    """Noise multiplier with which it alone, without a search, would spend the budget."""


@dataclass(frozen=True)
class Search:
    """A search, ready to begin. The last three are of one on private records alone; another one costs nothing."""

    job: Job
    candidates: tuple[Candidate, ...]
    records: Records
    """Public; or private, the held-out ones included."""
    size: int
    """Public number of private records."""
    spent: Ledger
    """By earlier runs on the private records."""
    runs: RunCount | None = None
    score_noise: float = 0.0
    cost: Guarantee | None = None
    """Of all runs, the earlier ones included."""

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """Cost of training each candidate once on the private records."""
        return tuple(candidate.plan.ledger() for candidate in self.candidates)


def prepare_search(
    trials: Sequence[Trial], *, public: Path | None = None, runs: RunCount | None = None, score_noise: float = 0.0,
    shows: bool = False,
) -> Search:  # fmt: skip
    """Load everything, and find the noise of each candidate; write nothing.

    On public records each candidate has noise, batch size and steps of the private run, on as many records at most
    (tests/train/test_search.py::test_public_runs_have_the_noise_of_the_private_run). On private records the whole
    search costs the budget of the job (tests/train/test_private_search.py::test_the_whole_search_costs_the_budget).
    """
    job = trials[0].job
    _check_scored(job)
    if not job.privacy.dp_enabled or job.privacy.dp_epsilon is None:
        whose = "the whole search" if public is None else "the private run"
        raise fail(f"dp_epsilon, the budget of {whose}", "dp_epsilon", job.privacy.dp_epsilon)
    processing = load_processing(job)
    if public is None:
        _check_private(job)
        positive("score_noise", score_noise)
        records = read_records(job, processing)
        size = job.privacy.public_size(len(records.train))
    else:
        records, size = _public_records(job, public, processing)
    earlier = spent_before(job)
    check_spent_units(job)
    found = load(trials, processing, records, size, spent=earlier, runs=runs, score_noise=score_noise, shows=shows)
    spent = earlier or Ledger(adjacency=job.privacy.adjacency)
    if runs is None:
        return Search(job, tuple(_on_public(candidate) for candidate in found), records, size, spent)
    ledgers = [candidate.plan.ledger() for candidate in found]
    cost = search_cost(runs, ledgers, score_noise, found[0].plan.delta, spent)
    return Search(job, found, records, size, spent, runs, score_noise, cost)


def _check_scored(job: Job) -> None:
    """Check that the records of a job have a score, to which each unit adds at most 1."""
    if job.task not in MEANING:
        raise fail(f"a task whose runs can be compared ({', '.join(MEANING)})", "task", job.task)
    if job.data.unit_column is not None:
        raise fail(
            "no data.unit_column in a search", "unit_column", job.data.unit_column,
            "The scored records of one person would change the score by more than 1. Choose the rates on public "
            "records, one a person.",
        )  # fmt: skip


def _check_private(job: Job) -> None:
    """Refuse a job whose search would not be private, or would tell more than its best run."""
    refuse_replaced("dp_adjacency", job.privacy.adjacency)
    if job.data.eval is not None or not job.data.eval_fraction:
        raise InvalidArgument(
            "Expected data.eval_fraction > 0, and no data.eval, for --private: runs are compared on a part of the "
            "private table, e.g. eval_fraction: 0.1. With a public table to compare on, search with --public."
        )
    if job.training.report_to is not None:
        raise fail("no training.report_to for --private", "report_to", job.training.report_to, "It shows each run.")
    if job.privacy.dp_log_unreleased:
        raise fail("no dp_log_unreleased for --private", "dp_log_unreleased", True)


def _public_records(job: Job, public: Path, processing: Any) -> tuple[Records, int]:
    """As many public records as there are private ones, and the number of these."""
    if same_file(public, Path(job.data.train)):
        raise InvalidArgument(
            f"Expected a table of public records, got --public {public}, which is the private data.train. What is "
            "chosen by private records costs privacy: search without --public, and the search is counted."
        )
    given = job.privacy.dp_dataset_size
    size = count_records(job) if given is None else given
    share = job.data.eval_fraction or _HELD_OUT
    data = dataclasses.replace(job.data, train=str(public), eval=None, spent=None, eval_fraction=share)
    records = read_records(dataclasses.replace(job, data=data), processing)
    if not records.evaluation:
        raise fail("public records to compare on", "data.eval_fraction", share, "The table is too small.")
    order = stream(key_of(job, "public records")).permutation(len(records.train))[:size]
    return dataclasses.replace(records, train=tuple(records.train[row] for row in order)), size


def load(
    trials: Sequence[Trial], processing: Any, records: Records, size: int, *, spent: Ledger | None = None,
    runs: RunCount | None = None, score_noise: float = 0.0, shows: bool = False,
) -> tuple[Candidate, ...]:  # fmt: skip
    """Load the models of a grid, find the noise, and fill in what the recipe gives.

    Candidates have a noise multiplier instead of an epsilon: with which all runs together cost the budget, or, without
    `runs`, each alone. A learning rate that the recipe gives is that for the epsilon of one run.
    """
    models: dict[int, tuple[nn.Module, Records]] = {}
    jobs = [with_shape(trial.job) for trial in trials]
    for job in jobs:
        if job.lora.rank not in models:
            model = choose_parameters(load_base(job, processing), job)
            models[job.lora.rank] = model, compute_frozen(job, model, records, shows=shows)[0]
    alone = [_alone(job, models[job.lora.rank][0], size, spent if runs is None else None) for job in jobs]
    plans = alone if runs is None else _within_budget(jobs[0], alone, runs, score_noise, spent)
    found = []
    for trial, job, own, plan in zip(trials, jobs, alone, plans, strict=True):
        model, kept = models[job.lora.rank]
        filled = _filled(job, trial.factor, model, size, plan)
        values = {key: getattr(getattr(filled, section), name) for key, (section, name) in GRID_KEYS.items()}
        if filled.strategy not in ADAPTERS:
            del values["rank"]
        prepared = Prepared(filled, model, processing, kept, plan, plan.num_steps)
        found.append(Candidate(values, prepared, plan, noise_of(own)))
    return tuple(found)


def _alone(job: Job, model: nn.Module, size: int, spent: Ledger | None) -> Plan:
    """The plan with which one run would spend the whole budget."""
    filled, _ = with_recipe(job, model, size)
    return filled.privacy.plan(size, filled.batch_size, filled.training.num_steps(size), spent)


def _within_budget(job: Job, alone: list[Plan], runs: RunCount, score_noise: float, spent: Ledger | None) -> list[Plan]:
    """Plans with more noise: the best of a random number of runs, each with a score, costs the budget of the job."""
    before = spent or Ledger(adjacency=job.privacy.adjacency)
    score = Ledger((Event(1.0, score_noise, 1),), before.adjacency)

    def scaled(scale: float) -> list[Plan]:
        return [dataclasses.replace(plan, noise_multiplier=scale * noise_of(plan), epsilon=None) for plan in alone]

    scale = calibrate_search(
        runs, lambda scale: [*(plan.ledger() for plan in scaled(scale)), score],
        epsilon=job.privacy.dp_epsilon or 0.0, delta=alone[0].delta, spent=before,
    )  # fmt: skip
    return scaled(scale)


def _filled(job: Job, factor: float, model: nn.Module, size: int, plan: Plan) -> Job:
    """The job of one run, with the values of the recipe for its epsilon, and without what would publish anything."""
    privacy = dataclasses.replace(job.privacy, dp_epsilon=plan.guarantee().epsilon)
    by_recipe, _ = with_recipe(dataclasses.replace(job, privacy=privacy), model, size)
    training = by_recipe.training
    training = dataclasses.replace(
        training,
        learning_rate=factor * (training.learning_rate or 0.0),
        head_rate=None if training.head_rate is None else factor * training.head_rate,
        steps=plan.num_steps, epochs=None, eval_steps=None, report_to=None, save_steps=plan.num_steps,
    )  # fmt: skip
    noise = dataclasses.replace(by_recipe.privacy, dp_epsilon=None, dp_noise_multiplier=noise_of(plan))
    return dataclasses.replace(job, training=training, privacy=noise)


def _on_public(candidate: Candidate) -> Candidate:
    """The candidate with what its privacy arguments say about the number of records left out."""
    prepared = candidate.prepared
    there, batch = len(prepared.records.train), prepared.job.batch_size
    if there < batch:
        raise InvalidArgument(
            f"Expected at least {batch} public records to train on, the batch size of a candidate, got {there}. Take a "
            "larger public table, or smaller batches: --grid batch_size=..."
        )
    privacy = dataclasses.replace(prepared.job.privacy, dp_dataset_size=None, dp_allow_large_delta=True)
    job = dataclasses.replace(prepared.job, privacy=privacy)
    return dataclasses.replace(candidate, prepared=dataclasses.replace(prepared, job=job))


def noise_of(plan: Plan) -> float:
    """Noise multiplier of a plan of a job, which is the same in all steps."""
    return schedule_at(plan.noise_multiplier, 0)


def evaluate(candidate: Candidate, folder: Path, key: Key) -> float:
    """Train a candidate, and the sum of the scores of its held-out records."""
    model = train_candidate(candidate, folder, key)
    return score(candidate.prepared, model, candidate.prepared.records.evaluation)


def train_candidate(candidate: Candidate, folder: Path, key: Key | None) -> Any:
    """Train a candidate from its start, and save its model; print and log nothing."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    prepared = candidate.prepared
    job = dataclasses.replace(prepared.job, output_dir=str(folder))
    records = dataclasses.replace(prepared.records, evaluation=())
    fresh = dataclasses.replace(prepared, job=job, records=records, model=copy.deepcopy(prepared.model))
    with _quiet():
        trainer = make_trainer(fresh, key)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.train()
        save_model(folder / MODEL, trainer.model, prepared.processing)
    return trainer.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warning, log, progress bar or other output inside: how many there are would tell the number of runs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")  # as the docstring says
            yield
    finally:
        logging.disable(before)


def score(prepared: Prepared, model: nn.Module, records: Sequence[Mapping[str, Any]]) -> float:
    """The sum of the scores of records, each of them between 0 and 1; private, see `noisy`.

    Each is computed alone, so one more changes no other summand
    (tests/train/test_search.py::test_one_record_changes_the_score_by_at_most_one).
    """
    model.train(False)
    device = next(model.parameters()).device
    collate = collator(prepared.job, prepared.processing)
    total = 0.0
    with torch.no_grad():
        for record in records:
            batch = {name: value.to(device) for name, value in collate([record]).items()}
            total += _score_of_one(prepared.job.task, model, batch)
    return total


def _score_of_one(task: str, model: Any, batch: Mapping[str, Any]) -> float:
    """Score of the one record in a batch."""
    output = model(**batch)
    if MEANING[task] == _RIGHT:
        return float(output.logits[0].argmax() == batch["labels"][0])
    loss = float(output.loss)
    return min(1.0, max(0.0, 1 - loss / math.log(output.logits.shape[-1]))) if math.isfinite(loss) else 0.0


def noisy(value: float, noise: float, key: Key) -> float:
    """A score with Gaussian noise of standard deviation `noise`; so it costs `Event(1.0, noise, 1)`."""
    return value + noise * float(stream(key).standard_normal())


def run_public(search: Search, insecure_seed: int | None = None) -> Iterator[float]:
    """Train each candidate once, and give its mean score on the held-out public records, in their order."""
    root = secure_key() if insecure_seed is None else insecure_key(insecure_seed)
    for number, candidate in enumerate(search.candidates):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            value = evaluate(candidate, Path(folder), fold_in(root, "public", number))
        yield value / len(candidate.prepared.records.evaluation)


def tuned(values: Mapping[str, Any], chosen: Job) -> dict[str, Any]:
    """The values of a job file with those of a candidate, for `dpfunc train`."""
    rates = ("learning_rate", "head_rate", "batch_size", "steps", "physical_batch_size")
    kept = {name: value for name, value in (values.get("training") or {}).items() if name != "epochs"}
    found = {**values, "training": {**kept, **_given(chosen.training, rates)}}
    if chosen.strategy in ADAPTERS:
        found["lora"] = {**(values.get("lora") or {}), **_given(chosen.lora, ("rank", "top_layers"))}
    return found


def _given(section: object, names: Sequence[str]) -> dict[str, Any]:
    """The values of a section that are not None."""
    return {name: getattr(section, name) for name in names if getattr(section, name) is not None}
