"""Metrics of a run on its evaluation records, beside the most frequent class and the twin without privacy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

METRICS = "metrics.json"
_TWIN = "-no-dp"  # the end of the name of its folder


def classification(prediction: Any) -> dict[str, float]:
    """Share of the evaluation records whose most likely class is their label, and that of the most frequent label.

    >>> from types import SimpleNamespace
    >>> logits, labels = np.array([[1, 0], [0, 1], [1, 0]]), np.array([0, 1, 1])
    >>> {k: round(v, 2) for k, v in classification(SimpleNamespace(predictions=logits, label_ids=labels)).items()}
    {'accuracy': 0.67, 'majority': 0.67}
    """
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    counts = np.unique(prediction.label_ids, return_counts=True)[1]
    return {"accuracy": float(right.mean()), "majority": float(counts.max() / counts.sum())}


def metric_lines(measured: Mapping[str, float], folder: Path, *, private: bool) -> list[str]:
    """Lines with the metrics, and with what to compare them with.

    Args:
        measured: as `evaluate` gives them. folder: of the run; its twin is beside it, if it was trained.
        private: False for the twin itself.
    """
    lines = [f"{name}: {measured[name]:.4g}" for name in ("eval_loss", "eval_accuracy") if name in measured]
    if "eval_majority" in measured:
        lines.append(f"most frequent class of the evaluation records: {measured['eval_majority']:.4g}")
    if not lines or not private:
        return lines
    name = "eval_accuracy" if "eval_accuracy" in measured else "eval_loss"
    reference = _measured_by(Path(f"{folder}{_TWIN}")).get(name)
    lines.append(
        "non-private reference: none. --no-dp trains the twin, which is as private as its records"
        if reference is None else
        f"non-private reference, {name} of the twin in {folder}{_TWIN}: {reference:.4g}"
    )  # fmt: skip
    return lines


def _measured_by(folder: Path) -> dict[str, float]:
    """The metrics of a finished run; empty if there is none that can be read."""
    try:
        found = json.loads((folder / METRICS).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
