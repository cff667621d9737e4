"""First results with and without a recipe, on text, images and tables: `python -m benchmarks.recipes`.

For each data set and strategy, accuracies on the test part:

- majority: the class that is most frequent in training;
- non-private: the best of `RATES` without clipping and noise, chosen on validation data;
- tuned: the best private run of a grid (`RATES` x `PROBS`), chosen on validation data, which epsilon does not count.
  It is run in closed form (closed.py), which tests/benchmarks/test_recipes.py compares with the library;
- plain: batch 256, 100 steps, Adam at 1e-2 on rows of norm 1: what the README said before there were recipes;
- recipe: `dpfunc.recipes.recipe`, with `SEEDS` seeds, and nothing chosen. With `full` it is the loop of the README,
  word for word: its code is read from there and executed, with this model and data set.

The rules were chosen on the validation parts of some data sets (`chosen_on` in data.py). The test parts are read here,
at the end of each run, and nowhere else.
"""

from __future__ import annotations

import contextlib
import io
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpfunc
from benchmarks.recipes import closed
from benchmarks.recipes.data import ROOT, SETS, Data, Part, chosen_on, load
from benchmarks.results import DOCS, FOLDER, fill, keep, row, rows_of
from dpfunc.recipes import Recipe, recipe

RESULT, PAGE = FOLDER / "recipes.json", DOCS / "recipes.md"
HEADS = ("data", "strategy", "n", "parameters", "r", "majority", "non-private", "tuned", "plain", "recipe")
EPSILON = 3.0
SEEDS = 5
STEPS = 100
PROBS = (0.1, 0.5)
RATES = dict.fromkeys(("head", "full"), (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1))
REFERENCES = ("majority", "non_private", "tuned", "tuned_settings", "plain")
HIDDEN = 64
FULL = (
    "fashion-5k", "mnist-5k", "penbased", "optdigits", "texture", "segment", "reuters", "tweets", "phoneme", "signs"
)  # fmt: skip


def network(strategy: str, data: Data, seed: int) -> nn.Module:
    """A linear layer at zero, or a network with one hidden layer at random. Inputs have unit variance."""
    width = data.train.x.shape[1]
    if strategy == "head":
        head = nn.Linear(width, data.classes)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, data.classes))


def accuracy(module: nn.Module, part: Part, scale: float) -> float:
    """Share of rows whose class is predicted."""
    with torch.no_grad():
        return float((module(part.x * scale).argmax(1) == part.y).float().mean())


def train_private(module: nn.Module, part: Part, scale: float, plan: dpfunc.Plan, lr: float) -> nn.Module:
    """A plain loop: Adam, a rate that falls linearly."""
    forward, params = dpfunc.functionalize(module)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(forward(params, x), y, reduction="none")

    dp_step = dpfunc.make_dp_step(loss_fn, plan)
    state = dp_step.init(params, key=dpfunc.secure_key())
    optimizer = torch.optim.Adam(params.values(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=plan.num_steps)
    rows = (part.x * scale, part.y)
    for indices in plan.batches(state):
        grads, state, _ = dp_step(params, dpfunc.take(rows, indices), state)
        for name, p in params.items():
            p.grad = grads[name]
        optimizer.step()
        scheduler.step()
    return dpfunc.with_params(module, params)


def train_readme(module: nn.Module, part: Part, scale: float) -> nn.Module:
    """The loop of the README, word for word but for its first paragraph, which makes a model and a data set."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    if code is None:
        raise LookupError("Expected a loop in README.md, found none.")
    loop = "\n\n".join(each for each in code[1].split("\n\n") if not each.startswith("x = "))
    names: dict[str, Any] = {"model": module, "dataset": TensorDataset(part.x * scale, part.y)}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(loop, "README.md", "exec"), names)
    trained: nn.Module = names["model"]
    return trained


def delta_of(n: int) -> float:
    """1e-5, or less where the data set is large."""
    return min(1e-5, n**-1.1)


def plan_of(n: int, q: float, num_steps: int = STEPS) -> dpfunc.Plan:
    """The plan of a hand-tuned run."""
    return dpfunc.Plan.for_budget(
        epsilon=EPSILON, delta=delta_of(n), dataset_size=n, expected_batch_size=q * n, num_steps=num_steps,
        clip=dpfunc.clipping.Automatic(),
    )  # fmt: skip


def recipe_of(strategy: str, data: Data, epsilon: float = EPSILON) -> Recipe:
    """The recipe for a data set: n, the number of parameters and of classes, and the budget."""
    n = len(data.train.y)
    d = sum(p.numel() for p in network(strategy, data, 0).parameters())
    classes = data.classes if strategy == "head" else None
    return recipe(strategy, dataset_size=n, num_parameters=d, epsilon=epsilon, delta=delta_of(n), num_classes=classes)


def references(data: Data, strategy: str) -> dict[str, Any]:
    """What a recipe is compared with: runs without privacy, runs of a grid, and one as the README was before."""
    n, width = data.train.x.shape
    scale = width**0.5  # unit variance: what a layer norm gives
    train = Part(data.train.x * scale, data.train.y)
    plain, tuned = [], []
    for lr in RATES[strategy]:
        model = closed.train(network(strategy, data, 0), train, 0.2, 3 * STEPS, lr, noise_multiplier=None)
        plain.append((accuracy(model, data.validation, scale), lr, model))
    for q in PROBS:
        plan = plan_of(n, q)
        for lr in RATES[strategy]:
            model = closed.train(network(strategy, data, 0), train, q, STEPS, lr, float(plan.noise_multiplier))
            tuned.append((accuracy(model, data.validation, scale), lr, q, model))
    reference, best = max(plain, key=lambda run: run[0]), max(tuned, key=lambda run: run[0])
    before = train_private(network(strategy, data, 0), data.train, 1.0, plan_of(n, min(1.0, 256 / n)), 1e-2)
    return {
        "majority": data.majority,
        "non_private": accuracy(reference[2], data.test, scale),
        "tuned": accuracy(best[3], data.test, scale), "tuned_settings": {"lr": best[1], "q": best[2]},
        "plain": accuracy(before, data.test, 1.0),
    }  # fmt: skip


def facts_of(found: Recipe, tests: Sequence[float], started: float) -> dict[str, Any]:
    """What a recipe said and cost, and what it reached."""
    settings = (found.learning_rate, found.expected_batch_size, found.num_steps)
    return {
        "parameters": found.num_parameters, "epsilon": EPSILON, "delta": found.delta,
        "noise_to_signal": found.noise_to_signal,
        "recipe": tests, "recipe_mean": statistics.mean(tests), "recipe_std": statistics.stdev(tests),
        "recipe_settings": dict(zip(("lr", "expected_batch_size", "steps"), settings, strict=True)),
        "spent": found.plan().guarantee().epsilon, "seconds": time.perf_counter() - started,
    }  # fmt: skip


def spread(values: Sequence[float]) -> str:
    """Mean, lowest and highest."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} - {max(values):.3f})"


def measure(name: str, strategy: str, known: dict[str, Any] | None) -> dict[str, Any]:
    """All lines of one data set and strategy; with known references, the recipe's alone."""
    data, started = load(name), time.perf_counter()
    n, width = data.train.x.shape
    scale, found = width**0.5, recipe_of(strategy, data)
    compared = references(data, strategy) if known is None else {key: known[key] for key in REFERENCES}
    starts = [network(strategy, data, seed) for seed in range(100, 100 + SEEDS)]
    models = [
        train_readme(start, data.train, scale)
        if strategy == "full"
        else train_private(start, data.train, scale, found.plan(), found.learning_rate)
        for start in starts
    ]
    tests = [accuracy(model, data.test, scale) for model in models]
    return {
        "data": name, "kind": data.kind, "chosen_on": chosen_on(name, strategy), "strategy": strategy, "n": n,
        "classes": data.classes, **compared, **facts_of(found, tests, started),
    }  # fmt: skip


def line(result: dict[str, Any]) -> str:
    """One row of the table in docs/recipes.md."""
    values = [f"{result[key]:.3f}" for key in ("noise_to_signal", "majority", "non_private", "tuned", "plain")]
    facts = [f"{result['data']} ({result['kind']})", result["strategy"], result["n"], result["parameters"]]
    return row([*facts, *values, spread(result["recipe"])])


def place(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a result in its file; heads first, and those on which the rules were chosen."""
    return result["strategy"] != "head", result["chosen_on"] is False, result["data"]


def jobs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Data sets with strategies; those on which the rules were chosen first."""
    wanted = [name for name in SETS if name in names]
    return [(name, "head") for name in wanted] + [(name, "full") for name in wanted if name in FULL]


def tables(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of docs/recipes.md: data sets on which the rules were chosen, and those that were kept apart."""
    lines = {
        "dev": [line(each) for each in results if each["chosen_on"]],
        "apart": [line(each) for each in results if not each["chosen_on"]],
    }
    return {name: table(HEADS, found) for name, found in lines.items()}


def table(heads: Sequence[str], lines: Sequence[str]) -> str:
    """Lines under their heads."""
    return "\n".join([row(heads), "|---" * len(heads) + "|", *lines])


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--strategy", type=click.Choice(list(RATES)), multiple=True, help="All by default.")
@click.option(
    "--keep-references", is_flag=True, help="Measure the recipe alone: the others do not depend on its rules."
)
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(names: tuple[str, ...], strategy: tuple[str, ...], keep_references: bool, out: Path) -> None:
    """Measure, print, and keep the results; those of other data sets in the file stay."""
    console = Console(width=200)
    torch.set_num_threads(1)
    for name, each in jobs(names or tuple(SETS)):
        if each not in (strategy or RATES):
            continue
        known = {(old["data"], old["strategy"]): old for old in rows_of(out)}
        result = measure(name, each, known[name, each] if keep_references else None)
        console.print(line(result))
        keep(out, result, place)
        if out == RESULT:
            fill(PAGE, tables(rows_of(out)))


if __name__ == "__main__":
    main()
