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
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import dpfunc
from benchmarks.pages import row
from benchmarks.recipes.__main__ import EPSILON, SEEDS, accuracy, delta_of, train_private
from benchmarks.recipes.data import Part, examples
from benchmarks.recipes.projector import SETS, features, parts, recipe_of, starts, without_privacy

RESULT = Path(__file__).resolve().parents[1] / "results" / "recipes_projector_apart.json"
PLAIN = (3e-4, 1e-3, 3e-3)
RATES = (3e-3, 1e-2, 3e-2, 1e-1)
SCHEDULES = ((0.16, 40), (0.5, 100))  # sampling probability, number of steps


def plan_of(n: int, sampling_prob: float, num_steps: int) -> dpfunc.Plan:
    """The plan of one run of the grid."""
    return dpfunc.Plan.for_budget(
        epsilon=EPSILON, delta=delta_of(n), dataset_size=n, expected_batch_size=sampling_prob * n,
        num_steps=num_steps, clip=dpfunc.clipping.Automatic(),
    )  # fmt: skip


def measure(name: str, deep: bool) -> dict[str, Any]:
    """All accuracies of one data set and form of the projector."""
    started, images = time.perf_counter(), SETS[name]()
    train, validation = parts(name, images)
    start, n = partial(starts(images.names, train.x.shape[-1]), deep), len(train.y)
    plain = [without_privacy(start(0), train, rate) for rate in PLAIN]
    grid = [
        ({"lr": rate, "q": q, "steps": steps}, train_private(start(0), train, 1.0, plan_of(n, q, steps), rate))
        for q, steps in SCHEDULES
        for rate in RATES
    ]
    reference = max(plain, key=lambda module: accuracy(module, validation, 1.0))
    settings, best = max(grid, key=lambda run: accuracy(run[1], validation, 1.0))
    found = recipe_of(start(0), n, EPSILON)
    plan = found.plan()
    models = [train_private(start(seed), train, 1.0, plan, found.learning_rate) for seed in range(100, 100 + SEEDS)]
    test = Part(features(f"{name}-test", images.test_pixels), images.test_y)
    tests = [accuracy(model, test, 1.0) for model in models]
    return {
        "data": name, "layers": 2 if deep else 1, "n": n, "test": len(test.y), "parameters": found.num_parameters,
        "epsilon": EPSILON, "delta": found.delta, "noise_to_signal": found.noise_to_signal,
        "majority": float((test.y == train.y.mode().values).float().mean()),
        "non_private": accuracy(reference, test, 1.0), "tuned": accuracy(best, test, 1.0), "tuned_settings": settings,
        "tuned_validation": [accuracy(module, validation, 1.0) for _, module in grid],
        "recipe": tests, "recipe_mean": statistics.mean(tests), "recipe_std": statistics.stdev(tests),
        "recipe_settings": {"lr": found.learning_rate, "q": found.expected_batch_size / n, "steps": found.num_steps},
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
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(names: tuple[str, ...], layers: tuple[str, ...], out: Path) -> None:
    """Measure, print, and keep the results; others in the file stay."""
    examples()
    console = Console(width=200)
    torch.set_num_threads(1)
    for form in layers or ("2", "1"):
        for name in names or tuple(SETS):
            result = measure(name, form == "2")
            console.print(line(result))
            kept = json.loads(out.read_text("utf-8")) if out.exists() else []
            known = {(old["data"], old["layers"]): old for old in kept} | {(name, result["layers"]): result}
            out.write_text(json.dumps([known[key] for key in sorted(known)], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
