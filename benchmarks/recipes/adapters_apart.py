"""Adapters by their recipe beside the best of a grid, on test parts: `python -m benchmarks.recipes.adapters_apart`.

The loop is that of adapters.py, on the data and tokens of trainer.py: adapters at query and value of the highest layer
of all-MiniLM-L6-v2, mean pooling and a new head. The best of `GRID` is chosen on the validation part, which epsilon
does not count, and the test part is read once, after that. Beside it stand the runs of `dpfunc train` and `DPTrainer`
with the budget alone, from the results of trainer.py. A run takes one to four minutes of one core.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.pages import row
from benchmarks.recipes.__main__ import EPSILON, delta_of
from benchmarks.recipes.adapters import STEPS, lower_states, parts_of, share_right, train
from benchmarks.recipes.trainer import RESULT as RECIPES
from benchmarks.recipes.trainer import pairs_of

RESULT = Path(__file__).resolve().parents[1] / "results" / "recipes_adapters_apart.json"
TOKENS = {"bbc": 32, "rotten": 32}
GRID: tuple[dict[str, Any], ...] = (
    {"rate": 1e-3},
    {"rate": 3e-3},
    {"rate": 1e-2},
    {"rate": 1e-3, "head_multiple": 0.5},
    {"rate": 3e-3, "head_multiple": 0.5},
    {"rate": 1e-3, "head_multiple": 2.0},
    {"rate": 3e-3, "head_multiple": 2.0},
    {"rate": 1e-3, "steps": 100},
)
"""Rates of the adapters; that of the head as a multiple of the recipe's for a head alone; numbers of steps."""


def measure(name: str) -> dict[str, Any]:
    """The best of the grid on the test part of one data set."""
    started, pairs = time.perf_counter(), pairs_of(name)
    y, (rows, validation, test) = parts_of(pairs)
    top, states = lower_states([text for text, _ in pairs], TOKENS[name])
    delta, runs = delta_of(len(rows)), []
    for settings in track(GRID, name):
        params, head_rate = train(top, states, y, rows, rank=4, train="B", delta=delta, **settings)
        right = share_right(top, params, states, y, validation)
        runs.append({"settings": {**settings, "head_rate": head_rate}, "validation": right, "params": params})
    best = max(runs, key=lambda run: run["validation"])
    return {
        "data": name, "tokens": TOKENS[name], "n": len(rows), "test": len(test), "epsilon": EPSILON, "delta": delta,
        "tuned": share_right(top, best["params"], states, y, test), "tuned_settings": best["settings"],
        "validation": [run["validation"] for run in runs], "seconds": time.perf_counter() - started,
    }  # fmt: skip


def recipes_of(name: str) -> list[dict[str, Any]]:
    """Results of the recipe on the same data and tokens, by way."""
    place = (name, "lora", TOKENS[name])
    found = json.loads(RECIPES.read_text("utf-8"))
    return [each for each in found if (each["data"], each["strategy"], each["settings"]["max_length"]) == place]


def line(result: dict[str, Any]) -> str:
    """One row of the table in docs/recipes.md."""
    settings = result["tuned_settings"]
    ways = [
        f"{statistics.mean(each['accuracy']):.3f} ({each['way']}, {len(each['accuracy'])} runs)"
        for each in recipes_of(result["data"])
    ]
    tuned = f"adapters {settings['rate']:g}, head {settings['head_rate']:.3g}, {settings.get('steps', STEPS)} steps"
    cells = [result["data"], str(result["tokens"]), str(result["n"]), f"{result['tuned']:.3f}", tuned, ", ".join(ways)]
    return row(cells)


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(names: tuple[str, ...], out: Path) -> None:
    """Measure, print, and keep the results; others in the file stay."""
    console = Console(width=200)
    torch.set_num_threads(1)
    for name in names or tuple(TOKENS):
        result = measure(name)
        console.print(line(result))
        kept = json.loads(out.read_text("utf-8")) if out.exists() else []
        known = {old["data"]: old for old in kept} | {name: result}
        out.write_text(json.dumps([known[key] for key in sorted(known)], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
