"""Metrics of a run on its evaluation records, beside those of the simplest guess and of the twin without privacy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpfunc.hf.losses import IGNORED
from dpfunc.train.config import CLASSIFIES
from dpfunc.train.tables import json_values

METRICS = "metrics.json"
_TWIN = "-no-dp"  # the end of the name of its folder


def classification(prediction: Any) -> dict[str, float]:
    """Share of evaluation records, or words, whose most likely class is their label, and its mean over the classes;
    share of the most frequent class; and the cross-entropy of the shares as the prediction for each record."""
    labels = prediction.label_ids
    known = labels != IGNORED
    if not known.any():
        return {}
    right = prediction.predictions.argmax(-1)[known] == labels[known]
    classes, counts = np.unique(labels[known], return_counts=True)
    shares = counts / counts.sum()
    return {
        "accuracy": float(right.mean()), "majority": float(shares.max()),
        "balanced_accuracy": float(np.mean([right[labels[known] == each].mean() for each in classes])),
        "loss_of_shares": float(-(shares * np.log(shares)).sum()),
    }  # fmt: skip


def regression(prediction: Any) -> dict[str, float]:
    """Root mean squared error of the predictions, and that of the mean of the labels as the prediction for all."""
    labels = np.asarray(prediction.label_ids, dtype=np.float64)
    errors = np.asarray(prediction.predictions, dtype=np.float64).reshape(labels.shape) - labels
    return {"rmse": float(np.sqrt(np.square(errors).mean())), "rmse_of_mean": float(labels.std())}


MEASURES = {**dict.fromkeys(CLASSIFIES, classification), "text_regression": regression}
"""Task -> its metrics besides the loss."""


def metric_lines(measured: Mapping[str, float], folder: Path, *, private: bool) -> list[str]:
    """Lines with the metrics, and with what to compare them with."""
    names = [name for name in ("eval_loss", "eval_balanced_accuracy", "eval_accuracy", "eval_rmse") if name in measured]
    lines = [f"{name}: {measured[name]:.4g}" for name in names]
    if "eval_majority" in measured:
        lines.append(f"most frequent class of the evaluation records: {measured['eval_majority']:.4g}")
        lines.append(f"eval_loss of the shares of their classes for all: {measured['eval_loss_of_shares']:.4g}")
    if "eval_rmse_of_mean" in measured:
        lines.append(f"eval_rmse of their mean as the prediction for all: {measured['eval_rmse_of_mean']:.4g}")
    if not lines or not private:
        return lines
    name = names[-1]
    reference = json_values(Path(f"{folder}{_TWIN}") / METRICS).get(name)
    twin = f"non-private reference, {name} of the twin in {folder}{_TWIN}:"
    none = "non-private reference: none. --no-dp trains the twin, which is as private as its records"
    return [*lines, none if reference is None else f"{twin} {reference:.4g}"]
