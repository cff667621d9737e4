"""Metrics of a job on its evaluation records, and what to compare them with.

May import: its folder, features and below. Privacy depends on it: no.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpfunc.hf.losses import IGNORED
from dpfunc.train._preferences import preferred
from dpfunc.train.config import CLASSIFIES, Job
from dpfunc.train.tables import json_values

METRICS_FILE = "metrics.json"
_TWIN = "-no-dp"  # the end of the name of its folder


def classification(prediction: Any) -> dict[str, float]:
    """Share of evaluation records, or words, whose most likely class is their label, and its mean over the classes;
    share of the most frequent class; and the cross-entropy of the shares as the prediction for each record."""
    labels = prediction.label_ids
    known = labels != IGNORED
    if not known.any():
        return {}
    right = _scores(prediction).argmax(-1)[known] == labels[known]
    classes, counts = np.unique(labels[known], return_counts=True)
    shares = counts / counts.sum()
    return {
        "accuracy": float(right.mean()), "majority": float(shares.max()),
        "balanced_accuracy": float(np.mean([right[labels[known] == each].mean() for each in classes])),
        "loss_of_shares": float(-(shares * np.log(shares)).sum()),
    }  # fmt: skip


def _scores(prediction: Any) -> Any:
    """The outputs for the labels; T5 and BART give hidden states after them."""
    outputs = prediction.predictions
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _regression(prediction: Any) -> dict[str, float]:
    """Root mean squared error of the predictions, and that of the mean of the labels as the prediction for all."""
    labels = np.asarray(prediction.label_ids, dtype=np.float64)
    errors = np.asarray(_scores(prediction), dtype=np.float64).reshape(labels.shape) - labels
    return {"rmse": float(np.sqrt(np.square(errors).mean())), "rmse_of_mean": float(labels.std())}


# Task -> its metrics besides the loss.
_MEASURES = {**dict.fromkeys(CLASSIFIES, classification), "text_regression": _regression}


def measure_of(job: Job) -> Callable[[Any], dict[str, float]] | None:
    """The metrics of a job besides the loss."""
    return preferred(job) if job.task == "preference" else _MEASURES.get(job.task)


_SHOWN = ("eval_loss", "eval_balanced_accuracy", "eval_accuracy", "eval_rmse", "eval_reward_accuracy")
_TO_COMPARE = {
    "eval_loss_of_reference": "eval_loss of the model before training",
    "eval_majority": "most frequent class of the evaluation records",
    "eval_loss_of_shares": "eval_loss of the shares of their classes for all",
    "eval_rmse_of_mean": "eval_rmse of their mean as the prediction for all",
}


def metric_lines(measured: Mapping[str, float], folder: Path, *, private: bool) -> list[str]:
    """Lines with the metrics, and with what to compare them with."""
    names = [name for name in _SHOWN if name in measured]
    texts = {**{name: name for name in names}, **_TO_COMPARE}
    lines = [f"{text}: {measured[name]:.4g}" for name, text in texts.items() if name in measured]
    if not lines or not private:
        return lines
    name = names[-1]
    reference = json_values(Path(f"{folder}{_TWIN}") / METRICS_FILE).get(name)
    twin = f"non-private reference, {name} of the twin in {folder}{_TWIN}:"
    none = "non-private reference: none. --no-dp trains the twin, which is as private as its records"
    return [*lines, none if reference is None else f"{twin} {reference:.4g}"]
