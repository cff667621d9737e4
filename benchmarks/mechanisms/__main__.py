"""What each mechanism gains at the same epsilon, on four data sets of the recipes: `python -m benchmarks.mechanisms`.

Linear heads on `unit_rows`, in closed form; accuracy and cross-entropy on test parts, five seeds. There
are runs of three lengths:

- recipe: the batches, steps and bound of `recipe("head", ...)`, half of the records in a step, 100 epochs and more;
- 1 epoch and 8 epochs of 32 batches: what is left where more epochs take too long.

Contestants of the recipe's run:

- recipe: nothing chosen. All others choose by the cross-entropy of validation data, which epsilon does not count, among
  five rates of Adam (1/4 to 4 times the recipe's) and four constant ones of SGD.
- rate chosen: the recipe with the best of these.
- adaptive clipping: the bound follows the median of the norms (Andrew et al. 2021), its count is paid for.
- AdamW-BC: the variance of the noise is taken off the second moment.
- averaged: a constant rate, and the mean of the weights of the second half.
- views: the mean gradient of four shifts of an image (of mnist alone) by up to one pixel is clipped.
- allocation: one random batch in each epoch instead of Poisson samples.
- correlated: the matrix with the least mean squared error of prefix sums, which is a public number.

Of the short runs each family of matrices has its member with the least mean error. All but `BandMF, cycles` visit the
same batches in the same order and gain nothing from sampling; independent noise has Poisson samples.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch.nn import functional as F

from benchmarks import pictures
from benchmarks.mechanisms.heads import Way, rates_of, shifted, train
from benchmarks.mechanisms.noises import FAMILIES, Budget, NoiseOf, allocated, best, best_of_all, independent
from benchmarks.recipes.__main__ import delta_of, measured, recipe_of
from benchmarks.recipes.data import Data, Part, load
from benchmarks.results import DOCS, FOLDER, fill, keep, markdown, read
from dpfunc.recipes import Recipe, unit_rows

RESULT, PAGE = FOLDER / "mechanisms.json", DOCS / "mechanisms.md"
PICTURE = DOCS / "results" / "prefix_errors.svg"
SETS = ("bbc", "mnist", "satimage", "phoneme")
EPSILONS = (1.0, 3.0, 8.0)
SEEDS = 5
BATCHES, EPOCHS = 32, (1, 8)
VIEWS, IMAGES = 4, ("mnist",)
T_OF = 2.776  # 0.975 quantile of Student's t with SEEDS - 1 degrees of freedom
MEASURES = ("accuracy", "cross_entropy")
ADAM = Way()
SGD = Way("sgd", falling=False)
RUNS = ("recipe", *(f"{each} epoch{'s' if each > 1 else ''}" for each in EPOCHS))
BASES = {"recipe": "rate chosen", "1 epoch": "independent", "8 epochs": "independent"}

Choice = tuple[NoiseOf, Sequence[Way]]


def lengths(found: Recipe) -> dict[str, Budget]:
    """The budgets of the three lengths of a run."""
    halves = Budget(found.epsilon, found.delta, 2, math.ceil(found.num_steps / 2))
    return {
        "recipe": halves,
        **{
            name: Budget(found.epsilon, found.delta, BATCHES, each) for name, each in zip(RUNS[1:], EPOCHS, strict=True)
        },
    }


def contestants(run: str, budget: Budget, images: bool) -> dict[str, Choice]:
    """Noise and ways to choose from, of each contestant."""
    plain, both = independent(budget), (ADAM, SGD)
    if run == "recipe":
        name, matrix = best_of_all(budget)
        return {
            "rate chosen": (plain, both),
            "adaptive clipping": (plain, (Way(adaptive=True), Way("sgd", falling=False, adaptive=True))),
            "AdamW-BC": (plain, (Way(corrected=True),)),
            "averaged": (plain, (Way(falling=False, averaged=True), Way("sgd", falling=False, averaged=True))),
            **({"views": (plain, (Way(views=VIEWS), Way("sgd", falling=False, views=VIEWS)))} if images else {}),
            "allocation": (allocated(budget), both),
            "correlated": (_said(matrix, name), both),
        }
    return {
        "independent": (plain, both),
        "allocation": (allocated(budget), both),
        **{name: (best(name, budget), both) for name in FAMILIES},
    }


def _said(noise: NoiseOf, name: str) -> NoiseOf:
    return NoiseOf(noise.sampler, noise.cycle, noise.strategy, noise.std, f"{name}, {noise.says}")


def scores(weights: Iterable[torch.Tensor], part: Part) -> dict[str, list[float]]:
    """Accuracy and cross-entropy of each weight."""
    found = [measured(unit_rows(part.x) @ weight.T, part.y) for weight in weights]
    return {name: [each[name] for each in found] for name in MEASURES}


def chosen(
    data: Data, rows: Part, budget: Budget, noise: NoiseOf, ways: Sequence[Way], found: Recipe
) -> tuple[Way, float]:
    """The way and the rate with the least cross-entropy on validation data."""
    x, y = unit_rows(data.validation.x), data.validation.y
    tried: list[tuple[float, Way, float]] = []
    for way in ways:
        rates = rates_of(found.learning_rate, found.num_steps, budget.steps, way.optimizer)
        weights = train(rows, data.classes, budget, noise, found.clip.clip_norm, rates, way, seed=1000)
        losses = [float(F.cross_entropy(x @ weight.T, y)) for weight in weights]
        tried += [(loss, way, rate) for loss, rate in zip(losses, rates, strict=True)]
    _, way, rate = min(tried, key=lambda each: each[0])
    return way, rate


def measure(data: Data, epsilon: float, only: Sequence[str] = ()) -> Iterable[dict[str, Any]]:
    """The results of a data set at one epsilon: one for each contestant of each run."""
    plain, n = Part(unit_rows(data.train.x), data.train.y), len(data.train.y)
    views = Part(unit_rows(shifted(data.train.x)), data.train.y) if data.name in IMAGES else plain
    found = recipe_of(data, epsilon)
    for run, budget in lengths(found).items():
        for name, (noise, ways) in contestants(run, budget, data.name in IMAGES).items():
            if only and name not in only:
                continue
            started = time.process_time()
            rows = views if any(each.views > 1 for each in ways) else plain
            way, rate = chosen(data, rows, budget, noise, ways, found)
            settings = {name: (way, rate)}
            if (run, name) == ("recipe", "rate chosen"):
                settings["recipe"] = ADAM, found.learning_rate
            for each, (by, at) in settings.items():
                weights = [
                    train(rows, data.classes, budget, noise, found.clip.clip_norm, (at,), by, seed)[0]
                    for seed in range(SEEDS)
                ]
                yield {
                    "data": data.name, "n": n, "epsilon": epsilon, "delta": delta_of(n), "run": run,
                    "steps": budget.steps, "epochs": budget.epochs, "contestant": each, "says": noise.says,
                    "noise_multiplier": noise.std, "prefix_error": noise.mean_error(budget.steps),
                    "optimizer": by.optimizer, "rate": at, **scores(weights, data.test),
                    "seconds": time.process_time() - started,
                }  # fmt: skip


def spread(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean."""
    return T_OF * statistics.stdev(values) / math.sqrt(len(values))


def difference(
    rows: Sequence[Mapping[str, Any]], bases: Mapping[str, Mapping[str, Any]], name: str
) -> tuple[float, float]:
    """Mean over the data sets of the difference to the base, and half of its 95 % interval over seeds."""
    gaps, squares = [], []
    for row in rows:
        base = bases[row["data"]]
        gaps.append(statistics.mean(row[name]) - statistics.mean(base[name]))
        squares.append((statistics.variance(row[name]) + statistics.variance(base[name])) / SEEDS)
    return statistics.mean(gaps), 1.96 * math.sqrt(sum(squares)) / len(rows)


def verdict(accuracy: tuple[float, float], loss: tuple[float, float]) -> str:
    """What the intervals of both differences say."""
    better = accuracy[0] > accuracy[1] or -loss[0] > loss[1]
    worse = -accuracy[0] > accuracy[1] or loss[0] > loss[1]
    if better and worse:
        return "both"
    return "better" if better else "worse" if worse else "no difference seen"


def summary(results: Sequence[Mapping[str, Any]], run: str) -> str:
    """For each epsilon and contestant of a run: means over the data sets, and differences to the base."""
    heads = ("epsilon", "", "accuracy", "difference", "cross-entropy", "difference", "noise of prefix sums", "")
    lines = []
    for epsilon in EPSILONS:
        here = [each for each in results if each["run"] == run and each["epsilon"] == epsilon]
        bases = {each["data"]: each for each in here if each["contestant"] == BASES[run]}
        for name in dict.fromkeys(each["contestant"] for each in here):
            rows = [each for each in here if each["contestant"] == name]
            means = [statistics.mean(statistics.mean(row[kind]) for row in rows) for kind in MEASURES]
            gaps = [difference(rows, bases, kind) for kind in MEASURES]
            ratio = statistics.geometric_mean(row["prefix_error"] / bases[row["data"]]["prefix_error"] for row in rows)
            is_base = name == BASES[run]
            shown = ["" if is_base else f"{gap:+.3f} ± {half:.3f}" for gap, half in gaps]
            sets = "" if len(rows) == len(bases) else f" ({', '.join(row['data'] for row in rows)})"
            lines.append([
                f"{epsilon:g}", name + sets, f"{means[0]:.3f}", shown[0], f"{means[1]:.3f}", shown[1], f"{ratio:.2f}",
                "" if is_base else verdict(*gaps),
            ])  # fmt: skip
    return markdown(heads, lines)


def details(results: Sequence[Mapping[str, Any]], epsilon: float = 3.0) -> str:
    """Accuracy of each contestant on each data set, with its interval."""
    lines = []
    for run in RUNS:
        here = [each for each in results if each["run"] == run and each["epsilon"] == epsilon]
        for name in dict.fromkeys(each["contestant"] for each in here):
            of = {each["data"]: each for each in here if each["contestant"] == name}
            shown = {
                data: f"{statistics.mean(row['accuracy']):.3f} ± {spread(row['accuracy']):.3f}"
                for data, row in of.items()
            }
            cells = [shown.get(data, "") for data in SETS]
            lines.append([run, name, *cells])
    return markdown(("run", "", *SETS), lines)


def curves(epsilon: float = 3.0, delta: float = 1e-5) -> dict[str, dict[str, list[float]]]:
    """Standard deviations of the prefix sums of each family, in sensitivities of a step: run -> family -> steps."""
    found: dict[str, dict[str, list[float]]] = {}
    for run, epochs in zip(RUNS[1:], EPOCHS, strict=True):
        budget = Budget(epsilon, delta, BATCHES, epochs)
        chosen_ones = {"independent": independent(budget), **{name: best(name, budget) for name in FAMILIES}}
        found[run] = {name: noise.errors(budget.steps).tolist() for name, noise in chosen_ones.items()}
    return found


def errors_table(epsilons: Sequence[float] = EPSILONS, delta: float = 1e-5) -> str:
    """Root of the mean and of the largest squared error of prefix sums, over that of independent noise."""
    lines = []
    for run, epochs in zip(RUNS[1:], EPOCHS, strict=True):
        for name in FAMILIES:
            cells = []
            for epsilon in epsilons:
                budget = Budget(epsilon, delta, BATCHES, epochs)
                base, noise = independent(budget).errors(budget.steps), best(name, budget)
                ours = noise.errors(budget.steps)
                mean = math.sqrt((ours**2).mean() / (base**2).mean())
                cells.append(f"{mean:.2f}, {ours.max() / base.max():.2f} ({noise.says})")
            lines.append([run, name, *cells])
    return markdown(("run", "", *(f"epsilon {each:g}" for each in epsilons)), lines)


def picture(path: Path = PICTURE) -> None:
    """Error curves of eight epochs."""
    of = curves()[RUNS[-1]]
    drawn = {
        "independent": (pictures.PLAIN, "--"), "BandMF, cycles": (pictures.OURS, "-"), "BLT": (pictures.THEIRS, "-"),
        "BandMF": ("C2", "-"), "BISR": ("C3", "-"), "lambda-CGD": ("C4", "-"), "BSR": ("C5", ":"),
    }  # fmt: skip
    with pictures.figure(path, "Noise of the sum of all steps so far", height=3.8) as axes:
        for name, (color, style) in drawn.items():
            axes.plot(range(1, len(of[name]) + 1), of[name], style, color=color, label=name)
        axes.set(xlabel="step of 8 epochs, epsilon 3", ylabel="in sensitivities")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, frameon=False)


def tables(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of docs/mechanisms.md."""
    return {**{run: summary(results, run) for run in RUNS}, "details": details(results), "errors": errors_table()}


def place(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a result in its file."""
    names: list[str] = [
        "recipe",
        "rate chosen",
        "adaptive clipping",
        "AdamW-BC",
        "averaged",
        "views",
        "independent",
        "allocation",
    ]
    names += ["correlated", *FAMILIES]
    return SETS.index(result["data"]), result["epsilon"], RUNS.index(result["run"]), names.index(result["contestant"])


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--only", multiple=True, help="These contestants alone.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(names: tuple[str, ...], only: tuple[str, ...], out: Path) -> None:
    """Measure, print, and keep the results; those of other data sets in the file stay."""
    console = Console(width=220)
    torch.set_num_threads(1)
    for name in names or SETS:
        data = load(name)
        for epsilon in EPSILONS:
            for result in measure(data, epsilon, only):
                means = (statistics.mean(result[kind]) for kind in MEASURES)
                shown = (result[key] for key in ("data", "epsilon", "run", "contestant", "says", "optimizer"))
                console.print(*shown, *(f"{mean:.3f}" for mean in means), f"{result['seconds']:.1f} s")
                keep(out, result, place)
    if out == RESULT:
        fill(PAGE, tables(read(out)["rows"]))
        picture()


if __name__ == "__main__":
    main()
