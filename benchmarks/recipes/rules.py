"""Rates on validation parts, from which rules are made: `python -m benchmarks.recipes.rules`.

For each data set with `chosen_on`: accuracy on the validation part at multiples of the rate that the recipe gives, in
closed form (closed.py), mean of `SEEDS` runs. With `--batches`: of networks, at the recipe's rate and at several
sampling probabilities. Test parts are not read. The validation part of fashion-5k is larger here: 6,000 images of the
same file that are in no other part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks.recipes import closed
from benchmarks.recipes.__main__ import accuracy, network, recipe_of
from benchmarks.recipes.data import SETS, Data, Part, images, load
from benchmarks.results import FOLDER, keep, row

RESULT, BATCHES = FOLDER / "recipes_rules.json", FOLDER / "recipes_batches.json"
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
EPSILONS = (3.0, 1.0)
PROBS = (0.1, 0.25, 0.5)
SEEDS = 2
FULL = ("digits", "fashion-5k", "letter", "mnist-5k", "penbased", "satimage", "spambase")


def runs(data: Data, strategy: str, epsilon: float, q: float | None = None, multiple: float = 1.0) -> float:
    """Accuracy on the validation part with the recipe, or with another batch or rate; mean of `SEEDS` runs."""
    scale, found = data.train.x.shape[1] ** 0.5, recipe_of(strategy, data, epsilon)
    part, n = Part(data.train.x * scale, data.train.y), found.dataset_size
    found = found if q is None else dataclasses.replace(found, expected_batch_size=round(q * n))
    sigma, share = float(found.plan().noise_multiplier), found.expected_batch_size / n
    rate = multiple * found.learning_rate
    models = [
        closed.train(network(strategy, data, seed), part, share, found.num_steps, rate, sigma, seed + 1)
        for seed in range(SEEDS)
    ]
    return sum(accuracy(model, data.validation, scale) for model in models) / SEEDS


def measure(data: Data, strategy: str, epsilon: float) -> dict[str, Any]:
    """Accuracies at multiples of the recipe's rate."""
    found = recipe_of(strategy, data, epsilon)
    return {
        "data": data.name, "strategy": strategy, "epsilon": epsilon, "parameters": found.num_parameters,
        "noise_to_signal": found.noise_to_signal, "rate": found.learning_rate, "multiples": MULTIPLES,
        "validation": [runs(data, strategy, epsilon, multiple=multiple) for multiple in MULTIPLES],
    }  # fmt: skip


def measure_batches(data: Data) -> dict[str, Any]:
    """Accuracies of a network at the recipe's rate and at several sampling probabilities."""
    found = recipe_of("full", data)
    return {
        "data": data.name, "n": found.dataset_size, "epsilon": found.epsilon, "probs": PROBS,
        "recipe": found.expected_batch_size / found.dataset_size,
        "validation": [runs(data, "full", found.epsilon, q) for q in PROBS],
    }  # fmt: skip


def line(result: dict[str, Any]) -> str:
    """One row of the table in docs/recipes.md."""
    cells = [
        result["data"], result["strategy"], f"{result['epsilon']:g}", f"{result['noise_to_signal']:.3f}",
        f"{result['rate']:.3g}", *(f"{value:.3f}" for value in result["validation"]),
    ]  # fmt: skip
    return row(cells)


def line_of_batches(result: dict[str, Any]) -> str:
    """One row of the table of batches in docs/recipes.md."""
    values = [f"{value:.3f}" for value in result["validation"]]
    return row([result["data"], result["n"], *values, f"{result['recipe']:.2g}"])


def loaded(name: str) -> Data:
    """A data set, with the larger validation part of fashion-5k."""
    data = load(name)
    return dataclasses.replace(data, validation=Part(*images(5000, 11000))) if name == "fashion-5k" else data


def place(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a result in its file: strategies, then data sets in the order of their table, then large budgets."""
    return result.get("strategy", ""), list(SETS).index(result["data"]), -result["epsilon"]


@click.command(help=__doc__)
@click.option("--strategy", type=click.Choice(["full", "head"]), multiple=True, help="All by default.")
@click.option("--batches", is_flag=True, help="Measure the batches of networks instead of rates.")
@click.option("--out", type=click.Path(path_type=Path), help="File of the results; those of other strategies stay.")
def main(strategy: tuple[str, ...], batches: bool, out: Path | None) -> None:
    """Measure, print, and write the results."""
    console = Console(width=200)
    torch.set_num_threads(1)
    for name in FULL if batches else ():
        result = measure_batches(loaded(name))
        console.print(line_of_batches(result))
        keep(out or BATCHES, result, place)
    names = {"full": FULL, "head": [name for name in SETS if SETS[name][1]]}
    for each in () if batches else strategy or ("full", "head"):
        for name in names[each]:
            for epsilon in EPSILONS:
                result = measure(loaded(name), each, epsilon)
                console.print(line(result))
                keep(out or RESULT, result, place)


if __name__ == "__main__":
    main()
