"""A projector by its recipe beside the best of a grid, on test images: `python -m benchmarks.recipes.projector_apart`.

Models and data are those of projector.py, with images that it does not read as the test part. For each data set and
form of the projector, accuracies on the test part at epsilon 3:

- majority: the class that is most frequent in training;
- non-private: the best of `PLAIN` without clipping and noise, chosen on validation data;
- tuned: the best private run of a grid (`RATES` x `SCHEDULES`), chosen on validation data; epsilon does not count it;
- recipe: `dpfunc.recipes.recipe("projector", ...)`, with `SEEDS` seeds, and nothing chosen.

The test part is read here, at the end of each run, and nowhere else.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks.pages import row
from benchmarks.recipes.__main__ import EPSILON, SEEDS, accuracy, plan_of, train_private
from benchmarks.recipes.data import Part, examples
from benchmarks.recipes.projector import SETS, Reader, features, parts, recipe_of, starts, without_privacy

RESULT = Path(__file__).resolve().parents[1] / "results" / "recipes_projector_apart.json"
PLAIN = (3e-4, 1e-3, 3e-3)
RATES = (3e-3, 1e-2, 3e-2, 1e-1)
SCHEDULES = ((0.16, 40), (0.5, 100))  # sampling probability, number of steps
Start = Callable[[int], Reader]
"""A new model of a seed."""


REFERENCES = ("majority", "non_private", "tuned", "tuned_settings", "tuned_validation")


def references(start: Start, train: Part, validation: Part, test: Part) -> dict[str, Any]:
    """What the recipe is compared with."""
    plain = [without_privacy(start(0), train, rate) for rate in PLAIN]
    grid = [
        (
            {"lr": rate, "q": q, "steps": steps},
            train_private(start(0), train, 1.0, plan_of(len(train.y), q, steps), rate),
        )
        for q, steps in SCHEDULES
        for rate in RATES
    ]
    reference = max(plain, key=lambda module: accuracy(module, validation, 1.0))
    settings, best = max(grid, key=lambda run: accuracy(run[1], validation, 1.0))
    return {
        "majority": float((test.y == train.y.mode().values).float().mean()),
        "non_private": accuracy(reference, test, 1.0), "tuned": accuracy(best, test, 1.0), "tuned_settings": settings,
        "tuned_validation": [accuracy(module, validation, 1.0) for _, module in grid],
    }  # fmt: skip


def measure(name: str, deep: bool, known: dict[str, Any] | None) -> dict[str, Any]:
    """All accuracies of one data set and form of the projector; with known references, the recipe's alone."""
    started, images = time.perf_counter(), SETS[name]()
    train, validation = parts(name, images)
    test = Part(features(f"{name}-test", images.test_pixels), images.test_y)
    start: Start = partial(starts(images.names, train.x.shape[-1]), deep)
    compared = references(start, train, validation, test) if known is None else {key: known[key] for key in REFERENCES}
    found = recipe_of(start(0), len(train.y), EPSILON)
    plan = found.plan()
    models = [train_private(start(seed), train, 1.0, plan, found.learning_rate) for seed in range(100, 100 + SEEDS)]
    tests = [accuracy(model, test, 1.0) for model in models]
    return {
        "data": name, "layers": 2 if deep else 1, "n": len(train.y), "test": len(test.y),
        "parameters": found.num_parameters, "epsilon": EPSILON, "delta": found.delta,
        "noise_to_signal": found.noise_to_signal, **compared,
        "recipe": tests, "recipe_mean": statistics.mean(tests), "recipe_std": statistics.stdev(tests),
        "recipe_settings": {
            "lr": found.learning_rate, "expected_batch_size": found.expected_batch_size, "steps": found.num_steps,
        },
        "spent": plan.guarantee().epsilon, "seconds": time.perf_counter() - started,
    }  # fmt: skip


def line(result: dict[str, Any]) -> str:
    """One row of the table in docs/recipes.md."""
    values = [f"{result[key]:.3f}" for key in ("noise_to_signal", "majority", "non_private", "tuned")]
    mean, low, high = result["recipe_mean"], min(result["recipe"]), max(result["recipe"])
    facts = [result["data"], str(result["layers"]), str(result["n"]), str(result["parameters"])]
    return row([*facts, *values, f"{mean:.3f} ({low:.3f} - {high:.3f})"])


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--layers", type=click.Choice(["1", "2"]), multiple=True, help="Both by default.")
@click.option(
    "--keep-references", is_flag=True, help="Measure the recipe alone: the others do not depend on its rules."
)
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(names: tuple[str, ...], layers: tuple[str, ...], keep_references: bool, out: Path) -> None:
    """Measure, print, and keep the results; others in the file stay."""
    examples()
    console = Console(width=200)
    torch.set_num_threads(1)
    for form in layers or ("2", "1"):
        for name in names or tuple(SETS):
            kept = json.loads(out.read_text("utf-8")) if out.exists() else []
            known = {(old["data"], old["layers"]): old for old in kept}
            place = name, int(form)
            known[place] = measure(name, form == "2", known[place] if keep_references else None)
            console.print(line(known[place]))
            out.write_text(json.dumps([known[key] for key in sorted(known)], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
