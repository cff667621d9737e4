"""Preferences of a job: the loss of a pair, what the model says of it before training, and metrics.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from dpfunc.hf.preferences import REFERENCE, CollatePairs, Preference, margins, reference_log_probabilities
from dpfunc.hf.trainer._run import called
from dpfunc.train._collate import PadRight
from dpfunc.train._dataset import Records
from dpfunc.train.config import TASKS, Job


def loss_of_record(job: Job) -> str | Preference:
    """The loss of one record: the name of a task, or that of a pair with the settings of the job."""
    return loss_of_pair(job) if job.task == "preference" else TASKS[job.task].loss


def loss_of_pair(job: Job) -> Preference:
    """The loss of a pair with the settings of the job."""
    chosen = job.preference
    return Preference(chosen.loss, chosen.beta, chosen.label_smoothing)


def with_references(job: Job, model: nn.Module, records: Records, *, shows: bool) -> Records:
    """Pairs with what the model says of them before its first step, each computed alone.

    New adapters add nothing yet, so this is the model below them
    (tests/train/test_preferences.py::test_the_reference_is_the_model_before_training).
    """
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    collate, device = CollatePairs(PadRight(0, job.data.max_length)), next(model.parameters()).device.type

    def referred(record: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**record, REFERENCE: tuple(reference_log_probabilities(model, collate([record]))[0].tolist())}

    # no bar: how fast it grows would tell how many records there are
    shown = Console(stderr=True).status("reference model") if shows else nullcontext()
    with shown, torch.autocast(device, torch.bfloat16, enabled=job.training.bf16):
        train, evaluation = (tuple(map(referred, each)) for each in (records.train, records.evaluation))
    return dataclasses.replace(records, train=train, evaluation=evaluation)


def is_preferred(job: Job, model: Any, batch: Mapping[str, Tensor]) -> bool:
    """True if the chosen answer of the only pair of a batch has gained more probability than the rejected one."""
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=job.training.bf16):
        return bool(margins(called(model, model), {}, batch)[0] > 0)


def without_references(job: Job, records: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Records to look at, not to train on: pairs with zeros in the place of what the reference model says."""
    none = {REFERENCE: (0.0, 0.0)} if job.task == "preference" else {}
    return tuple({**record, **none} for record in records)


def preferred(job: Job) -> Callable[[Any], dict[str, float]]:
    """Metrics of pairs: the share of those in which the chosen answer has the larger reward, the mean of the difference
    of the two rewards, beta * delta, and the loss of the model before training, whose rewards are 0."""
    loss = loss_of_pair(job)

    def measured(prediction: Any) -> dict[str, float]:
        margins = np.asarray(prediction.predictions, dtype=np.float64)
        return {
            "reward_accuracy": float((margins > 0).mean()),
            "reward_margin": float(loss.beta * margins.mean()),
            "loss_of_reference": float(loss.loss(torch.zeros(1))[0]),
        }

    return measured
