"""Published figures, run again with the settings of their papers: `python -m benchmarks.published`.

One row a command (`--row NAME`), one run a seed; results are added to `benchmarks/results/published.json`, and the
tables of docs/published.md are written from them. Rows about texts run where `--weights` and `--data` say; without them
their epsilon alone is computed, as it is for rows whose data are not on this machine.
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
from scipy.special import stdtrit

from benchmarks.published import images, texts
from benchmarks.published.rows import ROWS, Row, epsilon_of, noise_of
from benchmarks.recipes.data import fetch_clothes
from benchmarks.results import DOCS, FOLDER, fill, keep, markdown, read, rows_of

RESULT, PAGE = FOLDER / "published.json", DOCS / "published.md"
SEEDS = 5


def command_of(row: Row) -> str:
    """The command that runs a row."""
    found = f"python -m benchmarks.published --row {row.name}"
    return f"{found} --weights {texts.KITS[row.model].weights} --data FOLDER" if row.kind == "texts" else found


def costs_of(row: Row) -> dict[str, Any]:
    """What is known of a row without a run."""
    return {
        "row": row.name, "noise_multiplier": noise_of(row.setting), "delta": row.setting.delta,
        "epsilon": epsilon_of(row.setting),
    }  # fmt: skip


def missing(row: Row, data: Path | None) -> str | None:
    """What to do before a row can run; None if it can."""
    if row.kind == "accounting":
        return "its costs are all that is computed here"
    if row.kind == "images":
        return images.missing(row.name)
    files = " and ".join(texts.FILES[texts.KITS[row.model].task])
    return None if data else f"add --data, a folder with {files}"


def run_seed(row: Row, seed: int, weights: str | None, data: Path | None) -> dict[str, float]:
    """The measure of one run of each library."""
    if row.kind == "texts":
        kit = texts.KITS[row.model]
        return {"ours": texts.run(kit, row.setting, weights or kit.weights, data, seed)}
    found = images.images_of(row.name, row.model)
    ways = {"ours": images.train, "opacus": images.train_by_opacus}
    measured = {}
    for name in ways if row.beside else ("ours",):
        trained = ways[name](images.new_net(row.model, seed), found, row.setting, seed)
        measured[name] = images.accuracy(trained, found)
    return measured


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the runs of both; those of the same seed are the new ones."""
    runs = {each["seed"]: each for each in [*old.get("runs", []), *new.get("runs", [])]}
    return {**new, "runs": [runs[seed] for seed in sorted(runs)]}


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean; None for one run."""
    if len(values) < 2:
        return None
    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def shown(row: Row, values: Sequence[float]) -> str:
    """Mean, interval and number of runs."""
    if not values:
        return ""
    scale, digits = (100, 2) if row.measure == "accuracy" else (1, 2)
    half = interval(values)
    spread = "" if half is None else f" ± {scale * half:.{digits}f}"
    return f"{scale * statistics.mean(values):.{digits}f}{spread} ({len(values)})"


def compared(row: Row, values: Sequence[float]) -> str:
    """Where our mean stands beside the published figure."""
    if row.published is None or not values:
        return ""
    gap, half = statistics.mean(values) - row.published, interval(values)
    if half is None or abs(gap) <= half:
        return "no difference seen" if half is not None else "one run"
    return "above" if gap > 0 else "behind"


def tables(results: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Of docs/published.md: all figures, reasons, settings and commands."""
    of = {each["row"]: each for each in results}
    figures, settings = [], []
    for name, row in ROWS.items():
        result = of[name]
        runs = result.get("runs", [])
        ours = [each["ours"] for each in runs]
        theirs = [each["opacus"] for each in runs if "opacus" in each]
        scale = 100 if row.measure == "accuracy" else 1
        published = "" if row.published is None else f"{scale * row.published:.4g}"
        if theirs:
            published = f"{shown(row, theirs)}, run here"
        source = f"[{row.source}]({row.link})" if row.link else row.source
        stated = "" if row.published_epsilon is None else f"{row.published_epsilon:g}"
        figures.append([
            f"`{name}`", row.title, source, stated, f"{result['epsilon']:.4f}", published,
            shown(row, ours), compared(row, ours),
        ])  # fmt: skip
        setting = row.setting
        minutes = [each["seconds"] / 60 for each in runs]
        settings.append([
            f"`{name}`", f"{setting.batch:g}", setting.steps, f"{result['noise_multiplier']:.4g}", f"{setting.clip:g}",
            "" if row.kind == "accounting" else f"{setting.rate:g}", f"{setting.delta:.2g}",
            f"{statistics.mean(minutes):.1f}" if minutes else "", f"`{command_of(row)}`",
        ])  # fmt: skip
    heads = ("row", "", "by", "their epsilon", "our epsilon", "published", "ours (runs)", "")
    reasons = [[f"`{name}`", row.why] for name, row in ROWS.items() if row.why]
    return {
        "figures": markdown(heads, figures),
        "reasons": markdown(("row", ""), reasons),
        "settings": markdown(("row", "B", "T", "sigma", "C", "rate", "delta", "minutes", "command"), settings),
    }


def place(result: Mapping[str, Any]) -> int:
    """Of a result in its file."""
    return list(ROWS).index(result["row"])


@click.command(help=__doc__)
@click.option("--row", "names", multiple=True, type=click.Choice(list(ROWS)), help="These rows; all by default.")
@click.option("--seed", "seeds", multiple=True, type=int, help="These seeds; 0 to 4 by default.")
@click.option("--costs", is_flag=True, help="No run: epsilon and noise alone.")
@click.option("--fetch", is_flag=True, help="Fetch Fashion-MNIST first, 31 MB, from a package of Debian.")
@click.option("--weights", help="Folder of the model of a row about texts, or its name on the hub.")
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder of its data.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(
    names: tuple[str, ...],
    seeds: tuple[int, ...],
    costs: bool,
    fetch: bool,
    weights: str | None,
    data: Path | None,
    out: Path,
) -> None:
    """Run, print, and keep the results; other seeds and rows in the file stay."""
    console = Console(width=200)
    if fetch:
        fetch_clothes()
    torch.set_num_threads(1)
    for name in names or ROWS:
        row = ROWS[name]
        old = {each["row"]: each for each in rows_of(out)}.get(name, {})
        keep(out, merged(old, costs_of(row)), place)
        console.print(name, f"epsilon {epsilon_of(row.setting):.4f} at {row.setting.delta:.2g}", command_of(row))
        if costs:
            continue
        needs = missing(row, data)
        if needs:
            console.print(name, "is not run:", needs)
            continue
        for seed in seeds or range(SEEDS):
            started = time.process_time()
            measured = run_seed(row, seed, weights, data)
            run = {"seed": seed, **measured, "seconds": time.process_time() - started}
            old = {each["row"]: each for each in rows_of(out)}[name]
            keep(out, merged(old, {**costs_of(row), "runs": [run]}), place)
            console.print(name, run)
    if out == RESULT and len(read(out)["rows"]) == len(ROWS):
        fill(PAGE, tables(read(out)["rows"]))


if __name__ == "__main__":
    main()
