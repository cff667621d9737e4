"""First results with a recipe on texts, tables and images, at epsilon 1, 3 and 8: `python -m benchmarks.recipes`.

For each data set and epsilon, on the test part: accuracy, cross-entropy, balanced accuracy (mean over classes of the
share that is found) and calibration error (ECE, 15 bins). Contestants:

- constant: the shares of the classes in training, for each record. They are private; a private count is not measured.
- non-private: the head on `unit_rows`, fitted to convergence, its weight decay chosen on validation data.
- Opacus: DP-SGD as in Opacus' tutorials: `Flat(1.2)`, SGD with rate 0.1, batches of 512, 20 epochs, a linear
  layer with a bias on rows of unit variance; its algorithm in closed form, not its engine.
- tuned: the best of a grid (`RATES` x `BOUNDS` x `STEPS`) of private runs on `unit_rows`, chosen by the
  cross-entropy of validation data, which epsilon does not count; then run with other seeds.
- recipe: `recipe("head", ...)`, nothing chosen.
- network: `recipe("full", ...)` on rows of unit variance, one hidden layer; at epsilon 3 alone. (The result has the
  rule before it, too: normalised, `Automatic` with twice the rate.)

All are run in closed form (closed.py), which tests/benchmarks/test_recipes.py compares with the library. The rules were
chosen on one half of the sets (`chosen_on` in data.py), the other half had no part in them (docs/recipes.md).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import gt
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import pictures
from benchmarks.recipes import closed
from benchmarks.recipes.closed import Setting
from benchmarks.recipes.data import SETS, Data, Part, chosen_on, load
from benchmarks.results import DOCS, FOLDER, fill, keep, markdown, read
from dpfunc.accounting import calibrate_noise
from dpfunc.recipes import Recipe, recipe, unit_rows

RESULT, PAGE = FOLDER / "recipes.json", DOCS / "recipes.md"
PICTURE = DOCS / "results" / "recipes.svg"
EPSILONS = (1.0, 3.0, 8.0)
SEEDS = 5
OTHER_SEEDS = 2  # of the other contestants
RATES, BOUNDS, STEPS, PROB = (0.1, 0.2, 0.4), (0.5, 1.0), (100, 300), 0.5
DECAYS = (1e-5, 1e-4, 1e-3)
OPACUS = {"bound": 1.2, "rate": 0.1, "batch": 512, "epochs": 20}
HIDDEN = 64
BINS = 15
MEASURES = ("accuracy", "cross_entropy", "balanced", "calibration")
NETWORK_EPSILON = 3.0
CONTESTANTS = ("constant", "non-private", "Opacus", "tuned", "recipe")

Scores = dict[str, list[float]]
noise = cache(calibrate_noise)


def delta_of(n: int) -> float:
    """1e-5, or less where the data set is large."""
    return min(1e-5, n**-1.1)


def spread_rows(x: Tensor) -> Tensor:
    """Rows of unit variance: what a layer norm, or pixels less their mean, give."""
    return F.normalize(x, dim=1) * math.sqrt(x.shape[1])


def with_one(x: Tensor) -> Tensor:
    """Rows with the input of a bias."""
    return torch.cat([spread_rows(x), torch.ones(len(x), 1)], 1)


def measured(logits: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, cross-entropy, balanced accuracy and calibration error of predictions."""
    probabilities = logits.softmax(1)
    sure, predicted = probabilities.max(1)
    right = (predicted == y).float()
    found = [float(right[y == label].mean()) for label in y.unique()]
    bins = (sure * BINS).long().clamp(max=BINS - 1)
    gaps = [float((right[bins == each] - sure[bins == each]).sum().abs()) for each in bins.unique()]
    return {
        "accuracy": float(right.mean()), "cross_entropy": float(F.cross_entropy(logits, y)),
        "balanced": statistics.mean(found), "calibration": sum(gaps) / len(y),
    }  # fmt: skip


def scores(logits: Iterable[Tensor], y: Tensor) -> Scores:
    """Each measure of each run."""
    runs = [measured(each, y) for each in logits]
    return {name: [run[name] for run in runs] for name in MEASURES}


def recipe_of(data: Data, epsilon: float, network: nn.Module | None = None) -> Recipe:
    """The recipe for a head on a data set, or for a whole network."""
    n, k = data.train.x.shape
    facts: dict[str, Any] = {"dataset_size": n, "epsilon": epsilon, "delta": delta_of(n)}
    if network is None:
        return recipe("head", num_parameters=data.classes * (k + 1), num_classes=data.classes, **facts)
    return recipe("full", num_parameters=sum(p.numel() for p in network.parameters()), **facts)


def setting_of(found: Recipe) -> Setting:
    """Rate, bound and noise of a recipe."""
    q = found.expected_batch_size / found.dataset_size
    sigma = noise(epsilon=found.epsilon, delta=found.delta, sampling_prob=q, num_steps=found.num_steps)
    return Setting(found.learning_rate, found.clip.clip_norm, sigma)


def by_recipe(data: Data, rows: Part, epsilon: float) -> tuple[list[Tensor], dict[str, Any]]:
    """Weights of the head with each seed, and what the recipe says."""
    found = recipe_of(data, epsilon)
    q = found.expected_batch_size / found.dataset_size
    setting = setting_of(found)
    weights = [closed.head(rows, data.classes, q, found.num_steps, [setting], seed)[0] for seed in range(SEEDS)]
    settings = (found.learning_rate, found.expected_batch_size, found.num_steps)
    said = dict(zip(("lr", "expected_batch_size", "steps"), settings, strict=True))
    return weights, {"noise_to_signal": found.noise_to_signal, "recipe_settings": said}


def grid(data: Data, rows: Part, epsilons: Sequence[float]) -> dict[float, tuple[int, Setting]]:
    """Of each epsilon the number of steps and the setting with the least cross-entropy on validation data."""
    delta, x, y = delta_of(len(rows.y)), unit_rows(data.validation.x), data.validation.y
    best: dict[float, tuple[float, int, Setting]] = {}
    for steps in STEPS:
        sigmas = {each: noise(epsilon=each, delta=delta, sampling_prob=PROB, num_steps=steps) for each in epsilons}
        tried = [
            (each, Setting(rate, bound, sigma)) for each, sigma in sigmas.items() for rate in RATES for bound in BOUNDS
        ]
        weights = closed.head(rows, data.classes, PROB, steps, [setting for _, setting in tried], 1000 + steps)
        for (epsilon, setting), weight in zip(tried, weights, strict=True):
            loss = float(F.cross_entropy(x @ weight.T, y))
            if epsilon not in best or loss < best[epsilon][0]:
                best[epsilon] = loss, steps, setting
    return {epsilon: (steps, setting) for epsilon, (_, steps, setting) in best.items()}


def by_tutorial(data: Data, epsilon: float) -> list[Tensor]:
    """Weights of Opacus' tutorial with each seed."""
    n = len(data.train.y)
    q = min(1.0, OPACUS["batch"] / n)
    steps = round(OPACUS["epochs"] / q)
    sigma = noise(epsilon=epsilon, delta=delta_of(n), sampling_prob=q, num_steps=steps)
    setting = Setting(OPACUS["rate"], OPACUS["bound"], sigma, "sgd")
    rows = Part(with_one(data.train.x), data.train.y)
    return [closed.head(rows, data.classes, q, steps, [setting], 2000 + seed)[0] for seed in range(OTHER_SEEDS)]


def without_privacy(data: Data, rows: Part) -> Tensor:
    """Weights of the head that is best on validation data."""
    x, y = unit_rows(data.validation.x), data.validation.y
    fits = [closed.fitted(rows, data.classes, decay) for decay in DECAYS]
    return min(fits, key=lambda weight: float(F.cross_entropy(x @ weight.T, y)))


def networks(data: Data, epsilon: float) -> dict[str, Scores]:
    """Scores of networks, at one epsilon."""
    if epsilon != NETWORK_EPSILON:
        return {}
    rows, logits = Part(spread_rows(data.train.x), data.train.y), []
    for seed in range(OTHER_SEEDS):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            width = rows.x.shape[1]
            module = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, data.classes))
        found = recipe_of(data, epsilon, module)
        q = found.expected_batch_size / found.dataset_size
        closed.network(module, rows, q, found.num_steps, setting_of(found), 3000 + seed)
        logits.append(module(spread_rows(data.test.x)).detach())
    return {"network": scores(logits, data.test.y)}


def measure(name: str) -> Iterable[dict[str, Any]]:
    """The result of a data set for each epsilon."""
    data, started = load(name), time.perf_counter()
    rows, test, y = Part(unit_rows(data.train.x), data.train.y), unit_rows(data.test.x), data.test.y
    n, k = data.train.x.shape
    shares = torch.bincount(data.train.y, minlength=data.classes) / n
    constant = scores([shares.clamp_min(0.5 / n).log().expand(len(y), -1)], y)
    reference = scores([test @ without_privacy(data, rows).T], y)
    for epsilon, (steps, setting) in grid(data, rows, EPSILONS).items():
        tuned = [
            closed.head(rows, data.classes, PROB, steps, [setting], seed)[0] for seed in range(10, 10 + OTHER_SEEDS)
        ]
        weights, facts = by_recipe(data, rows, epsilon)
        yield {
            "data": name, "kind": data.kind, "chosen_on": chosen_on(name), "n": n, "features": k,
            "classes": data.classes, "rarest": float(shares.min()), "epsilon": epsilon, "delta": delta_of(n), **facts,
            "tuned_settings": {"lr": setting.rate, "bound": setting.bound, "steps": steps},
            "contestants": {
                "constant": constant, "non-private": reference,
                "Opacus": scores([with_one(data.test.x) @ weight.T for weight in by_tutorial(data, epsilon)], y),
                "tuned": scores([test @ weight.T for weight in tuned], y),
                "recipe": scores([test @ weight.T for weight in weights], y),
                **networks(data, epsilon),
            },
            "seconds": time.perf_counter() - started,
        }  # fmt: skip


def mean(result: Mapping[str, Any], contestant: str, measure: str) -> float:
    """Over the runs of a contestant."""
    return statistics.mean(result["contestants"][contestant][measure])


def cell(result: Mapping[str, Any], contestant: str) -> str:
    """Accuracy and cross-entropy; of several runs the accuracies' range as well."""
    accuracy = result["contestants"][contestant]["accuracy"]
    between = f" ({min(accuracy):.3f}-{max(accuracy):.3f})" if len(accuracy) >= SEEDS else ""
    return f"{statistics.mean(accuracy):.3f}{between}, {mean(result, contestant, 'cross_entropy'):.2f}"


def line(result: Mapping[str, Any]) -> list[str]:
    """One row of a table in docs/recipes.md: accuracy and cross-entropy of each contestant."""
    facts = [
        f"{result['data']} ({result['kind']})",
        str(result["n"]),
        str(result["classes"]),
        f"{result['rarest']:.3f}",
    ]
    return [*facts, *(cell(result, each) for each in (*CONTESTANTS, "network"))]


def summary(results: Sequence[Mapping[str, Any]], epsilons: Sequence[float] = EPSILONS) -> str:
    """For each epsilon and contestant: means over the data sets, and how often it is worse than the constant."""
    heads = ("epsilon", "", "accuracy", "balanced", "cross-entropy", "calibration error", "worse than constant")
    lines = []
    for epsilon in epsilons:
        here = [each for each in results if each["epsilon"] == epsilon]
        for contestant in here[0]["contestants"] if here else ():
            cells = [
                f"{statistics.mean(mean(each, contestant, name) for each in here):.{digits}f}"
                for name, digits in (("accuracy", 3), ("balanced", 3), ("cross_entropy", 2), ("calibration", 3))
            ]
            losses = [[mean(each, who, "cross_entropy") for each in here] for who in (contestant, "constant")]
            worse = f"{sum(map(gt, *losses))} of {len(here)}"
            lines.append([f"{epsilon:g}", contestant, *cells, "" if contestant == "constant" else worse])
    return markdown(heads, lines)


def halves(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Results of the sets on which the rules were chosen, and of those that were kept apart."""
    return {half: [each for each in results if each["chosen_on"] == (half == "dev")] for half in ("dev", "apart")}


def tables(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of docs/recipes.md: at epsilon 3 a row for each data set; means."""
    heads, found = ("data", "n", "classes", "rarest class", *CONTESTANTS, "network"), {}
    for half, here in halves(results).items():
        found[half] = markdown(heads, [line(each) for each in here if each["epsilon"] == NETWORK_EPSILON])
        found[f"{half} means"] = summary(here)
    return found


def picture(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean accuracy over the sets that were kept apart, at each epsilon."""
    apart = halves(results)["apart"]
    budgets = sorted({result["epsilon"] for result in apart})
    drawn = {"non-private": (pictures.PLAIN, "--"), "recipe": (pictures.OURS, "o-"), "Opacus": (pictures.THEIRS, "s-")}
    with pictures.figure(path, "Mean accuracy on 11 data sets") as axes:
        for name, (color, style) in {**drawn, "constant": (pictures.PLAIN, ":")}.items():
            found = [
                statistics.mean(mean(each, name, "accuracy") for each in apart if each["epsilon"] == epsilon)
                for epsilon in budgets
            ]
            label = {"recipe": "dpfunc, recipe", "Opacus": "Opacus, its tutorial"}.get(name, name)
            axes.plot(range(len(budgets)), found, style, color=color, label=label)
        axes.set_xticks(range(len(budgets)), [f"{epsilon:g}" for epsilon in budgets])
        axes.set(xlabel="epsilon", ylim=(0.5, 0.9))
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, frameon=False)


def place(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a result in its file; those on which the rules were chosen first."""
    return result["chosen_on"] is False, result["data"], result["epsilon"]


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--half", type=click.Choice(["dev", "apart"]), help="Data sets of one half alone.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(names: tuple[str, ...], half: str | None, out: Path) -> None:
    """Measure, print, and keep the results; those of other data sets in the file stay."""
    console = Console(width=220)
    torch.set_num_threads(1)
    for name in names or tuple(SETS):
        if half is not None and chosen_on(name) != (half == "dev"):
            continue
        for result in measure(name):
            console.print(
                f"{result['epsilon']:g}", result["data"], *(cell(result, each) for each in result["contestants"])
            )
            keep(out, result, place)
    if out == RESULT:
        fill(PAGE, tables(read(out)["rows"]))
        picture(read(out)["rows"], PICTURE)


if __name__ == "__main__":
    main()
