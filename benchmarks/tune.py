"""What a search pays on a small data set: `python -m benchmarks.tune`.

BBC News, a head on the frozen features of all-MiniLM-L6-v2, epsilon 3 in all: two fifths of the texts are private, two
fifths are taken as public, one fifth is the test part, which no search reads. Compared are the recipe without a search,
its learning rate times 0.3 and 3, a private search over the three, and a public one. Each run has its own secret
noise. The commands are those of `dpfunc tune`; frozen layers are computed once for all runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks.recipes.data import ROOT, news
from benchmarks.results import FOLDER, write
from dpfunc.accounting import RunCount
from dpfunc.hf.pooled import load_mean_pooled
from dpfunc.train._config_file import FACTORS, parse_grid, trials
from dpfunc.train._dataset import read_records
from dpfunc.train._model import load_processing
from dpfunc.train._private_search import run_search
from dpfunc.train._search import Candidate, load, noise_of, prepare_private, prepare_public
from dpfunc.train._search_runs import run_public, score, train_candidate

RESULT = FOLDER / "tune.json"
EPSILON, DELTA, MEAN_RUNS, SHAPE, SCORE_NOISE, HELD_OUT = 3.0, 1e-4, 8.0, 1.0, 3.0, 0.1
SHARES = {"private": 0.4, "public": 0.8, "test": 1.0}  # where each part ends


def write_parts(pairs: list[tuple[str, str]], folder: Path, ends: Mapping[str, float]) -> list[str]:
    """A table of each part, which ends at a share of the pairs in a fixed order; and the classes."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    start = 0
    for part, share in ends.items():
        end = round(len(pairs) * share)
        lines = [json.dumps({"text": pairs[row][0], "label": pairs[row][1]}) for row in order[start:end]]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        start = end
    return sorted({label for _, label in pairs})


def values_of(folder: Path, labels: list[str], held_out: float) -> dict[str, Any]:
    """The job, as in a file."""
    return {
        "task": "text_classification", "strategy": "head", "output_dir": str(folder / "run"),
        "model": {"path": str(ROOT / ".cache" / "model")},
        "data": {"train": str(folder / "private.jsonl"), "labels": labels, "max_length": 96, "eval_fraction": held_out},
        "privacy": {"dp_epsilon": EPSILON, "dp_delta": DELTA},
    }  # fmt: skip


def one_run(candidate: Candidate) -> float:
    """Accuracy on the test part, which `candidate` has as held-out records."""
    with tempfile.TemporaryDirectory() as folder:
        model = train_candidate(candidate, Path(folder) / "run", None)
    return tested(candidate, model)


def tested(candidate: Candidate, model: Any) -> float:
    records = candidate.prepared.records.evaluation
    return score(candidate.prepared, model, records) / len(records)


def summary(found: Sequence[float]) -> dict[str, Any]:
    return {"accuracy": list(found), "mean": statistics.mean(found), "low": min(found), "high": max(found)}


def measure(seeds: int, console: Console, keep: Callable[[dict[str, Any]], None]) -> None:
    """All runs; what was measured is kept after each part."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        labels = write_parts(news(), folder, SHARES)
        grid = parse_grid([], None)
        whole = values_of(folder, labels, 0.0)
        whole["data"]["eval"] = str(folder / "test.jsonl")
        tested_trials = trials(whole, {}, grid)
        processing = load_processing(tested_trials[0][0])
        records = read_records(tested_trials[0][0], processing)
        alone = load(tested_trials, processing, records, len(records.train), shows=True)
        split = trials(values_of(folder, labels, HELD_OUT), {}, grid)
        search = prepare_private(split, RunCount(MEAN_RUNS, SHAPE), SCORE_NOISE, shows=True)
        first = search.candidates[0]
        keep({
            "n": len(records.train), "test": len(records.evaluation), "epsilon": EPSILON, "delta": DELTA,
            "mean_runs": MEAN_RUNS, "most_runs_99": search.runs.quantile(0.99), "score_noise": SCORE_NOISE,
            "held_out": HELD_OUT, "factors": list(FACTORS), "noise_alone": first.alone,
            "noise_in_search": noise_of(first.plan),
            "epsilon_of_one_run_in_search": first.plan.guarantee().epsilon,
            "epsilon_of_search": search.cost.epsilon,
        })  # fmt: skip
        fixed = {}
        for candidate, factor in zip(alone, FACTORS, strict=True):
            fixed[f"{factor:g}"] = summary([one_run(candidate) for _ in range(seeds)])
            console.print(factor, fixed[f"{factor:g}"])
        keep({"without_search": fixed})
        chosen, accuracy = [], []
        for number in range(seeds):
            job = dataclasses.replace(search.job, output_dir=str(folder / f"search-{number}"))
            record = run_search(dataclasses.replace(search, job=job))[0]
            chosen.append(FACTORS[record.chosen] if record.chosen is not None else None)
            accuracy.append(tested(alone[0], load_mean_pooled(str(folder / f"search-{number}" / "model"))))
            console.print("private", chosen[-1], accuracy[-1])
        keep({"private_search": {"chosen": chosen, **summary(accuracy)}})
        public = prepare_public(trials(whole, {}, grid), folder / "public.jsonl", shows=True)
        chosen, accuracy = [], []
        for _ in range(seeds):
            scores = list(run_public(public))
            best = max(range(len(scores)), key=scores.__getitem__)
            chosen.append(FACTORS[best])
            accuracy.append(one_run(alone[best]))
            console.print("public", chosen[-1], accuracy[-1])
            keep({"public_search": {"chosen": chosen, **summary(accuracy)}})


@click.command(help=__doc__)
@click.option("--seeds", default=5, show_default=True, help="Runs of each.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(seeds: int, out: Path) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {}

    def keep(part: dict[str, Any]) -> None:
        result.update(part)
        write(out, result)

    measure(seeds, Console(width=200), keep)


if __name__ == "__main__":
    main()
