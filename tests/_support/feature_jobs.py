"""Jobs over a small table and over small images, whose classes a head can tell apart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

TRAINING = "{steps: 6, save_steps: 2, logging_steps: 6, batch_size: 40, learning_rate: 0.3}"
COLUMNS = "numbers: {age: [18, 90], hours: [0, 80]}, categories: {work: [private, public, self]}"
TABLE = f"""
task: table_classification
output_dir: run
strategy: head
data: {{train: people.csv, label_column: income, labels: [low, high], {COLUMNS}, eval_fraction: 0.2}}
privacy: {{dp_epsilon: 8, dp_delta: 1.0e-3, dp_max_grad_norm: 1.0}}
training: {TRAINING}
"""
IMAGES = f"""
task: image_classification
output_dir: run
strategy: head
data: {{train: photos, labels: [flat, bars], image_size: [8, 8], eval_fraction: 0.2}}
privacy: {{dp_epsilon: 8, dp_delta: 1.0e-3, dp_max_grad_norm: 1.0}}
training: {TRAINING}
"""
JOBS = {"table": TABLE, "images": IMAGES}


def people(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of people: income is high with age, hours, and work of one's own."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        age, hours, work = draw.randint(18, 80), draw.randint(0, 70), draw.choice(["private", "public", "self"])
        high = age / 80 + hours / 70 + 0.5 * (work == "self") + draw.gauss(0, 0.1) > 1.3
        rows.append({"age": age, "hours": hours, "work": work, "income": "high" if high else "low"})
    return rows


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows with a header."""
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_photos(folder: Path, count: int = 100, seed: int = 0) -> Path:
    """Grey noise, half of it with bars over it, as .png and .jpg in a folder for each class."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(seed)
    for number in range(count):
        pixels = draw.integers(60, 120, (12, 10, 3))
        bars = number % 2
        pixels[:: 1 + bars] += 100 * bars
        path = folder / ("bars" if bars else "flat") / f"{number}.{'png' if number % 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return folder


def write_job(folder: Path, kind: str) -> Path:
    """A folder with the records and a job, whose paths are relative to it."""
    if kind == "table":
        write_csv(folder / "people.csv", people(160))
    else:
        write_photos(folder / "photos")
    (folder / "job.yaml").write_text(JOBS[kind])
    return folder / "job.yaml"


def write_encoder(folder: Path) -> Path:
    """A tiny image encoder of random weights, and its processor."""
    import torch
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder
