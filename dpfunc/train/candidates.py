"""Candidates of a search: the jobs of a grid with their models, records and noise; their training and their scores.

The score of a model on held-out records is a sum to which each record adds a number between 0 and 1.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfunc._utils.validation import fail
from dpfunc.accounting import Ledger
from dpfunc.plan import Plan
from dpfunc.rng import Key, stream
from dpfunc.train.config import ADAPTERS, Job
from dpfunc.train.dataset import Records, collator
from dpfunc.train.frozen import compute_frozen
from dpfunc.train.grid import KEYS, Trial
from dpfunc.train.model import choose_parameters, load_base
from dpfunc.train.recipe import with_recipe, with_shape
from dpfunc.train.run import Prepared, make_trainer, save_model
from dpfunc.train.run_folder import MODEL
from dpfunc.types import schedule_at

MEANING = {
    "text_classification": "number of held-out records whose most likely class is their label",
    "causal_lm": "sum over held-out records of 1 - loss / log(vocabulary), at least 0 and at most 1",
    "vqa": "sum over held-out records of 1 - loss / log(vocabulary), at least 0 and at most 1",
}
"""What a score is, by task."""


@dataclass(frozen=True)
class Candidate:
    """One combination of a grid, with all values of its job.

    Args:
        values: what distinguishes it, by the keys of the grid. prepared: model and records. plan: of one run.
    """

    values: dict[str, float]
    prepared: Prepared
    plan: Plan


def load(
    trials: Sequence[Trial], processing: Any, records: Records, size: int,
    noise: Callable[[list[Plan]], list[Plan]], *, spent: Ledger | None = None, shows: bool,
) -> tuple[Candidate, ...]:  # fmt: skip
    """Load the models of a grid, find the noise, and fill in what the recipe gives.

    Args:
        trials: of one job. processing: of its model. records: to train on and to score.
        size: public number of private records.
        noise: plans with which each candidate alone would spend the budget -> plans of one run of each.
        spent: earlier runs that these plans count.
        shows: draw a progress bar while frozen layers are computed.

    Returns:
        Candidates whose privacy arguments have a noise multiplier instead of an epsilon. A learning rate that the
        recipe gives is that for the epsilon of one run.
    """
    models: dict[int, tuple[nn.Module, Records]] = {}
    jobs = []
    for trial in trials:
        job = with_shape(trial.job)
        jobs.append(job)
        if job.lora.rank not in models:
            model = choose_parameters(load_base(job, processing), job)
            models[job.lora.rank] = model, compute_frozen(job, model, records, shows=shows)[0]
    plans = noise([_alone(job, models[job.lora.rank][0], size, spent) for job in jobs])
    found = []
    for trial, job, plan in zip(trials, jobs, plans, strict=True):
        model, kept = models[job.lora.rank]
        filled = _filled(job, trial.factor, model, size, plan)
        values = {key: getattr(getattr(filled, section), name) for key, (section, name) in KEYS.items()}
        if filled.strategy not in ADAPTERS:
            del values["rank"]
        found.append(Candidate(values, Prepared(filled, model, processing, kept, plan, plan.num_steps), plan))
    return tuple(found)


def _alone(job: Job, model: nn.Module, size: int, spent: Ledger | None) -> Plan:
    """The plan with which one run would spend the whole budget."""
    filled, _ = with_recipe(job, model, size)
    return filled.privacy.plan(size, filled.batch_size, filled.training.num_steps(size), spent)


def _filled(job: Job, factor: float, model: nn.Module, size: int, plan: Plan) -> Job:
    """The job of one run, with the values of the recipe for its epsilon, and without what would publish anything."""
    privacy = dataclasses.replace(job.privacy, dp_epsilon=plan.guarantee().epsilon)
    filled, _ = with_recipe(dataclasses.replace(job, privacy=privacy), model, size)
    training = filled.training
    training = dataclasses.replace(
        training,
        learning_rate=factor * (training.learning_rate or 0.0),
        head_rate=None if training.head_rate is None else factor * training.head_rate,
        steps=plan.num_steps, epochs=None, eval_steps=None, report_to=None, save_steps=plan.num_steps,
    )  # fmt: skip
    noise = dataclasses.replace(privacy, dp_epsilon=None, dp_noise_multiplier=noise_of(plan))
    return dataclasses.replace(job, training=training, privacy=noise)


def noise_of(plan: Plan) -> float:
    """Noise multiplier of a plan of a job, which is the same in all steps."""
    return schedule_at(plan.noise_multiplier, 0)


def shown(candidate: Candidate) -> str:
    """The values of a candidate in one line."""
    return ", ".join(f"{name}={value:.4g}" for name, value in candidate.values.items())


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


def check_scored(job: Job) -> None:
    """Check that the records of a job have a score, to which each unit adds at most 1.

    Guarantees:
        tests/train/test_candidates.py::test_jobs_without_a_score_are_refused.
    """
    if job.task not in MEANING:
        raise fail(f"a task whose runs can be compared ({', '.join(MEANING)})", "task", job.task)
    if job.data.unit_column is not None:
        raise fail(
            "no data.unit_column in a search", "unit_column", job.data.unit_column,
            "The scored records of one person would change the score by more than 1. Choose the rates on public "
            "records, one a person.",
        )  # fmt: skip


def score(prepared: Prepared, model: nn.Module, records: Sequence[Mapping[str, Any]]) -> float:
    """The sum of the scores of records, each of them between 0 and 1. It is private: see `noisy`.

    Each record is computed alone, so that one record more or less changes no other summand: the sum changes by at most
    1. A loss that is not finite scores 0.

    Guarantees:
        tests/train/test_candidates.py::test_one_record_changes_the_score_by_at_most_one.
    """
    model.train(False)
    device = next(model.parameters()).device
    job = prepared.job
    collate = collator(job, prepared.processing)
    total = 0.0
    with torch.no_grad():
        for record in records:
            batch = {name: value.to(device) for name, value in collate([record]).items()}
            total += _one(job.task, model, batch)
    return total


def _one(task: str, model: Any, batch: Mapping[str, Any]) -> float:
    """Score of the one record in a batch."""
    output = model(**batch)
    if task == "text_classification":
        return float(output.logits[0].argmax() == batch["labels"][0])
    loss = float(output.loss)
    return min(1.0, max(0.0, 1 - loss / math.log(output.logits.shape[-1]))) if math.isfinite(loss) else 0.0


def noisy(value: float, noise: float, key: Key) -> float:
    """A score with Gaussian noise of standard deviation `noise`; so it costs `Event(1.0, noise, 1)`.

    >>> from dpfunc.rng import insecure_key
    >>> noisy(100.0, 5.0, insecure_key(7)) == noisy(100.0, 5.0, insecure_key(7))
    True
    """
    return value + noise * float(stream(key).standard_normal())
