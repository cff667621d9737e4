"""Runs of the candidates of a search, which say nothing, and their scores; all of a search on public records.

May import: its folder, features and below. Privacy depends on it: yes.

The score of a model is a sum to which each held-out record adds a number between 0 and 1.
"""

import contextlib
import copy
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpfunc.rng import Key, fold_in, insecure_key, secure_key, stream
from dpfunc.train import _run_folder as folders
from dpfunc.train._collate import collator
from dpfunc.train._preferences import is_preferred
from dpfunc.train._saved import save_model
from dpfunc.train._search import Candidate, Search
from dpfunc.train.config import PREFERRED, RIGHT, TASKS
from dpfunc.train.run import Prepared, make_trainer


def train_candidate(candidate: Candidate, folder: Path, key: Key | None) -> Any:
    """Train a candidate from its start, and save its model."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    prepared = candidate.prepared
    job = replace(prepared.job, output_dir=str(folder))
    fresh = replace(
        prepared, job=job, records=replace(prepared.records, evaluation=()), model=copy.deepcopy(prepared.model)
    )
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
    how, total = TASKS[prepared.job.task].score, 0.0
    for row in rows:
        batch = {name: value.to(model.device) for name, value in collate([row]).items()}
        if how == PREFERRED:
            total += is_preferred(prepared.job, model, batch)
            continue
        output = model(**batch)
        if how == RIGHT:
            total += float(output.logits[0].argmax() == batch["labels"][0])
        elif math.isfinite(loss := float(output.loss)):
            total += min(1.0, max(0.0, 1 - loss / math.log(output.logits.shape[-1])))
    return total


def noisy(value: float, noise: float, key: Key) -> float:
    """A score with Gaussian noise of standard deviation `noise`; so it costs `Event(1.0, noise, 1)`."""
    return value + noise * float(stream(key).standard_normal())


def evaluate(candidate: Candidate, folder: Path, key: Key) -> float:
    """Train a candidate, and the sum of the scores of its held-out records; print and log nothing."""
    with _quiet():
        model = train_candidate(candidate, folder, key)
        return score(candidate.prepared, model, candidate.prepared.records.evaluation)


def run_public(search: Search, insecure_seed: int | None = None) -> Iterator[float]:
    """Train each candidate once, and give its mean score on the held-out public records, in their order."""
    root = secure_key() if insecure_seed is None else insecure_key(insecure_seed)
    for number, candidate in enumerate(search.candidates):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            value = evaluate(candidate, Path(folder), fold_in(root, "public", number))
        yield value / len(candidate.prepared.records.evaluation)
