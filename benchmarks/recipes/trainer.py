"""What `dpfunc train` reaches with a job that gives the budget alone: `python -m benchmarks.recipes.trainer`.

For each data set and strategy: accuracy on the test part after runs whose batch size, steps and rates come from the
recipe. Nothing is chosen here, and the test part is read once, at the end of each run. Data and parts are those of
data.py. Each run has its own secret noise; frozen layers are computed once for all runs, which does not change them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks.recipes.__main__ import EPSILON, delta_of
from benchmarks.recipes.data import ROOT, SHARES, examples, reviews
from dpfunc.train.config import job_from_dict
from dpfunc.train.frozen import compute_frozen
from dpfunc.train.run import Prepared, make_trainer, prepare

RESULT = Path(__file__).resolve().parents[1] / "results" / "recipes_trainer.json"
SEEDS = {"head": 5, "lora": 2}
LENGTH = {"rotten": 64, "bbc": 96}  # tokens


def pairs_of(name: str) -> list[tuple[str, str]]:
    """Texts with labels."""
    if name == "rotten":
        return reviews()
    examples()
    from data import read_news

    return list(dict.fromkeys(read_news(ROOT / ".cache" / "news")))


def write_tables(pairs: list[tuple[str, str]], folder: Path) -> list[str]:
    """Tables of the training and the test part, split as in data.py; and the classes."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    first, second = (round(len(pairs) * share) for share in (SHARES[0], SHARES[0] + SHARES[1]))
    for part, rows in (("train", order[:first]), ("test", order[second:])):
        lines = [json.dumps({"text": pairs[row][0], "label": pairs[row][1]}) for row in rows]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return sorted({label for _, label in pairs})


def run(prepared: Prepared, folder: Path) -> dict[str, float]:
    """Train from the start with fresh noise, and evaluate."""
    started = time.perf_counter()
    job = dataclasses.replace(prepared.job, output_dir=str(folder))
    fresh = dataclasses.replace(prepared, job=job, model=copy.deepcopy(prepared.model))
    trainer = make_trainer(fresh, None)
    trainer.train()
    measured = trainer.evaluate()
    return {
        "accuracy": measured["eval_accuracy"], "majority": measured["eval_majority"],
        "epsilon": trainer.plan.guarantee().epsilon, "seconds": time.perf_counter() - started,
    }  # fmt: skip


def measure(name: str, strategy: str, seeds: int, max_length: int, console: Console) -> dict[str, Any]:
    """All runs of one data set and strategy."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pairs = pairs_of(name)
        labels = write_tables(pairs, folder)
        delta = delta_of(round(len(pairs) * SHARES[0]))
        job = job_from_dict({
            "task": "text_classification", "strategy": strategy, "output_dir": str(folder / "run"),
            "model": {"path": str(ROOT / ".cache" / "model")},
            "data": {
                "train": str(folder / "train.jsonl"), "eval": str(folder / "test.jsonl"), "labels": labels,
                "max_length": max_length,
            },
            "privacy": {"dp_epsilon": EPSILON, "dp_delta": delta},
        })  # fmt: skip
        prepared = prepare(job)
        records, told = compute_frozen(prepared.job, prepared.model, prepared.records, shows=True)
        console.print(told)
        prepared = dataclasses.replace(prepared, records=records)
        runs = [run(prepared, folder / str(seed)) for seed in range(seeds)]
    training, found = prepared.job.training, prepared.recipe
    return {
        "data": name, "strategy": strategy, "n": len(records.train), "epsilon": EPSILON, "delta": delta,
        "parameters": prepared.num_trained, "noise_to_signal": None if found is None else found.noise_to_signal,
        "settings": {
            "learning_rate": training.learning_rate, "head_rate": training.head_rate, "steps": training.steps,
            "batch_size": training.batch_size, "top_layers": prepared.job.lora.top_layers, "max_length": max_length,
        },
        "majority": runs[0]["majority"], "accuracy": [each["accuracy"] for each in runs],
        "spent": runs[0]["epsilon"], "seconds": statistics.median(each["seconds"] for each in runs),
    }  # fmt: skip


def line(result: dict[str, Any]) -> str:
    """One row of the table in docs/recipes.md."""
    found = result["accuracy"]
    cells = [
        result["data"], result["strategy"], str(result["n"]), str(result["parameters"]), f"{result['majority']:.3f}",
        f"{statistics.mean(found):.3f} ({min(found):.3f} - {max(found):.3f})", str(len(found)),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--strategy", type=click.Choice(list(SEEDS)), multiple=True, help="All by default.")
@click.option("--seeds", type=int, help="Runs of each.")
@click.option("--max-length", type=int, help="Tokens of a text that are used.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(
    names: tuple[str, ...], strategy: tuple[str, ...], seeds: int | None, max_length: int | None, out: Path
) -> None:
    """Measure, print, and keep the results; others in the file stay."""
    console = Console(width=200)
    torch.set_num_threads(1)
    for name in names or tuple(LENGTH):
        for each in strategy or tuple(SEEDS):
            result = measure(name, each, seeds or SEEDS[each], max_length or LENGTH[name], console)
            console.print(line(result))
            kept = json.loads(out.read_text("utf-8")) if out.exists() else []
            kept = [old for old in kept if (old["data"], old["strategy"]) != (name, each)]
            kept = sorted([*kept, result], key=lambda r: (r["data"], r["strategy"]))
            out.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
