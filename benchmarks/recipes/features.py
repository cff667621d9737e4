"""First results of `dpfunc train` on a table with a rare class and on images: `python -m benchmarks.recipes.features`.

Each job runs as the command runs it, with nothing chosen but the budget, epsilon 3: a table as a CSV, with the ranges
and lists that its makers state; images as files in folders. On held-out records, for each seed: accuracy, balanced
accuracy and cross-entropy, beside the shares of the classes as the prediction for all.
"""

from __future__ import annotations

import csv
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from PIL import Image
from rich.console import Console

from benchmarks.recipes.data import FOLDER, clothes, table
from benchmarks.results import FOLDER as RESULTS
from benchmarks.results import keep
from dpfunc.train.config import job_from_dict
from dpfunc.train.run import run_job

EPSILON = 3.0
SEEDS = 3
SHOWN = ("eval_accuracy", "eval_majority", "eval_balanced_accuracy", "eval_loss", "eval_loss_of_shares")


def rows(path: Path) -> list[list[str]]:
    """Texts of a file of KEEL."""
    lines = path.read_text("utf-8").splitlines()
    return [[part.strip() for part in line.split(",")] for line in lines if line.strip() and not line.startswith("@")]


def write_table(
    folder: Path, found: Sequence[Sequence[str]], numbers: dict[str, list[float]], categories: dict[str, list[str]],
    order: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """A CSV with these columns and the class last; the section `data` of its job."""
    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([[*order, "label"], *found])
    labels = sorted({row[-1] for row in found})
    return {"train": str(folder / "table.csv"), "labels": labels, "numbers": numbers, "categories": categories}


def yeast(folder: Path) -> dict[str, Any]:
    """1,484 proteins, 11 % of them of one kind: eight numbers within 0..1."""
    found = rows(FOLDER / "keel/imbalanced/raw/yeast3.dat")
    names = [f"x{number}" for number in range(len(found[0]) - 1)]
    return write_table(folder, found, {name: [0.0, 1.0] for name in names}, {}, names)


def cars(folder: Path) -> dict[str, Any]:
    """1,728 cars, 4 % of them good: six categories, whose values the makers list."""
    found = rows(FOLDER / "keel/imbalanced/raw/car-good.dat")
    price, size = ["vhigh", "high", "med", "low"], ["small", "med", "big"]
    lists = {
        "buying": price, "maint": price, "doors": ["2", "3", "4", "5more"], "persons": ["2", "4", "more"],
        "boot": size, "safety": ["low", "med", "high"],
    }  # fmt: skip
    return write_table(folder, found, {}, lists, [*lists])


def digits(folder: Path) -> dict[str, Any]:
    """1,797 digits of 8 x 8 pixels."""
    values, labels = table(FOLDER / "digits.csv.gz")
    pixels = (torch.tensor(values).view(-1, 8, 8) * 255 / 16).byte()
    return write_images(folder, pixels, [int(label) for label in labels], 8)


def fashion(folder: Path, count: int = 4000) -> dict[str, Any]:
    """The first 4,000 clothes of Fashion-MNIST."""
    x, y = clothes()
    return write_images(folder, x[:count].view(-1, 28, 28).byte(), y[:count].tolist(), 28)


def write_images(folder: Path, pixels: torch.Tensor, classes: Sequence[int], side: int) -> dict[str, Any]:
    """Files of grey images, in a folder for each class; the section `data` of their job."""
    for number, (image, label) in enumerate(zip(pixels, classes, strict=True)):
        path = folder / "images" / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy()).save(path)
    labels = [str(label) for label in sorted(set(classes))]
    return {"train": str(folder / "images"), "labels": labels, "image_size": [side, side], "grey": True}


# name -> (task, strategies, its data)
JOBS: dict[str, tuple[str, tuple[str, ...], Callable[[Path], dict[str, Any]]]] = {
    "yeast": ("table_classification", ("head", "full"), yeast),
    "cars": ("table_classification", ("head", "full"), cars),
    "digits": ("image_classification", ("head",), digits),
    "fashion": ("image_classification", ("head",), fashion),
}


def measure(name: str, strategy: str, seed: int, folder: Path, data: dict[str, Any], task: str) -> dict[str, float]:
    """Metrics of one run of the command; the seed decides the split as well."""
    job = job_from_dict({
        "task": task, "strategy": strategy, "output_dir": str(folder / f"{name}-{strategy}-{seed}"),
        "data": {**data, "eval_fraction": 0.2}, "privacy": {"dp_epsilon": EPSILON, "dp_delta": 1e-5},
        "training": {"seed": seed, "logging_steps": 10**6, "save_steps": 10**6, "physical_batch_size": 4096},
    })  # fmt: skip
    record = run_job(job, say=lambda line: None)
    measured = json.loads((Path(job.output_dir) / "metrics.json").read_text())
    return {**{each: measured[each] for each in SHOWN}, "epsilon": record["epsilon"]}


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--seeds", default=SEEDS, show_default=True)
@click.option("--out", default=RESULTS / "recipes_features.json", type=click.Path(path_type=Path))
def main(names: tuple[str, ...], seeds: int, out: Path) -> None:
    """Run, print, and keep the results."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for name in names or tuple(JOBS):
        task, strategies, write = JOBS[name]
        with tempfile.TemporaryDirectory() as place:
            data = write(Path(place))
            for strategy in strategies:
                runs = [measure(name, strategy, seed, Path(place), data, task) for seed in range(seeds)]
                mean = {each: sum(run[each] for run in runs) / seeds for each in runs[0]}
                Console(width=200).print(name, strategy, {each: round(value, 3) for each, value in mean.items()})
                keep(
                    out, {"data": name, "strategy": strategy, "runs": runs}, lambda row: (row["data"], row["strategy"])
                )


if __name__ == "__main__":
    main()
