"""Rates on validation parts, from which rules are made: `python -m benchmarks.recipes.rules`.

For each data set with `chosen_on`: accuracy on the validation part at multiples of the rate that the recipe gives, in
closed form (closed.py), mean of `SEEDS` runs. Test parts are not read. The validation part of fashion-5k is larger
here: 6,000 images of the same file that are in no other part.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks.pages import row
from benchmarks.recipes import closed
from benchmarks.recipes.__main__ import accuracy, network, recipe_of
from benchmarks.recipes.data import SETS, Data, Part, images, load

RESULT = Path(__file__).resolve().parents[1] / "results" / "recipes_rules.json"
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
EPSILONS = (3.0, 1.0)
SEEDS = 2
FULL = ("digits", "fashion-5k", "letter", "mnist-5k", "penbased", "satimage", "spambase")


def measure(data: Data, strategy: str, epsilon: float) -> dict[str, Any]:
    """Accuracies at multiples of the recipe's rate."""
    scale, found = data.train.x.shape[1] ** 0.5, recipe_of(strategy, data, epsilon)
    part, plan = Part(data.train.x * scale, data.train.y), found.plan()
    n, accuracies = found.dataset_size, []
    for multiple in MULTIPLES:
        runs = [
            closed.train(
                network(strategy, data, seed), part, found.expected_batch_size / n, found.num_steps,
                multiple * found.learning_rate, float(plan.noise_multiplier), seed + 1,
            )
            for seed in range(SEEDS)
        ]  # fmt: skip
        accuracies.append(sum(accuracy(run, data.validation, scale) for run in runs) / SEEDS)
    return {
        "data": data.name, "strategy": strategy, "epsilon": epsilon, "parameters": found.num_parameters,
        "noise_to_signal": found.noise_to_signal, "rate": found.learning_rate, "multiples": MULTIPLES,
        "validation": accuracies,
    }  # fmt: skip


def line(result: dict[str, Any]) -> str:
    """One row of the table in docs/recipes.md."""
    cells = [
        result["data"], result["strategy"], f"{result['epsilon']:g}", f"{result['noise_to_signal']:.3f}",
        f"{result['rate']:.3g}", *(f"{value:.3f}" for value in result["validation"]),
    ]  # fmt: skip
    return row(cells)


@click.command(help=__doc__)
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(out: Path) -> None:
    """Measure, print, and write the results."""
    console = Console(width=200)
    torch.set_num_threads(1)
    results = []
    for strategy, names in (("full", FULL), ("head", [name for name in SETS if SETS[name][1]])):
        for name in names:
            data = load(name)
            if name == "fashion-5k":
                data = dataclasses.replace(data, validation=Part(*images(5000, 11000)))
            for epsilon in EPSILONS:
                results.append(measure(data, strategy, epsilon))
                console.print(line(results[-1]))
                out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
