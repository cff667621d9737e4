"""Score of a model on held-out records: a sum to which each record adds a number between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpfunc._utils.validation import fail
from dpfunc.rng import Key, stream
from dpfunc.train.config import Job
from dpfunc.train.frozen import collator_of
from dpfunc.train.run import Prepared

MEANING = {
    "text_classification": "number of held-out records whose most likely class is their label",
    "causal_lm": "sum over held-out records of 1 - loss / log(vocabulary), at least 0 and at most 1",
    "vqa": "sum over held-out records of 1 - loss / log(vocabulary), at least 0 and at most 1",
}
"""What a score is, by task."""


def check_scored(job: Job) -> None:
    """Check that the records of a job have a score, to which each unit adds at most 1.

    Guarantees:
        tests/train/test_score.py::test_jobs_without_a_score_are_refused.
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

    Args:
        prepared: task, and how records become inputs. model: trained; it is left in evaluation mode.
        records: held out.

    Guarantees:
        tests/train/test_score.py::test_one_record_changes_the_score_by_at_most_one.
    """
    model.train(False)
    device = next(model.parameters()).device
    job = prepared.job
    collate = collator_of(job, records[0] if records else {}, prepared.processing)
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
