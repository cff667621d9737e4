"""How well the engine `auto` keeps rows apart, and what it takes in one pass: `python -m benchmarks.rows`.

Tables: the losses of tests/_support/isolation, which mix rows or seem to, over several steps; the museum of faults of
other libraries; random losses of tests/_support/row_programs.py, whose rows must not depend on those beside them; how
far one record moves their clipped sums, beside the sensitivity; and, with --survey, a file of
`python -m benchmarks.survey --out FILE`.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.measure import ROOT
from benchmarks.results import FOLDER, printed, write
from dpfunc import clipped_grad
from dpfunc.clipping import Flat
from dpfunc.engines import auto
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import insecure_key

sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/_support", "tests/engines")]
RESULT = FOLDER / "rows.json"
MUSEUM = "tests/**/test_museum*.py"


class Told(logging.Handler):
    """What the engine says of how it computes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def isolation(every: int, console: Console) -> dict[str, Any]:
    """Outcomes of losses that mix rows, or seem to; and which honest ones are computed by the loop."""
    from isolation.truth import outcomes, tolerance_of
    from isolation.zoo import ZOO

    counts: Counter[str] = Counter()
    told, looped = Told(), []
    logging.getLogger("dpfunc").addHandler(told)
    for loss in track(list(ZOO.values())[::every], "losses", console=console):
        told.messages.clear()
        words = {outcome.told(tolerance_of(loss)).split()[0] for outcome in outcomes(loss, "auto")}
        worst = next(word for word in ("WRONG", "RAISED", "refused", "equal") if word in words)
        counts[f"{'honest' if loss.honest else 'mixing'}, {worst}"] += 1
        if loss.honest and any("engine loop" in message for message in told.messages):
            looped.append(loss.name)
    logging.getLogger("dpfunc").removeHandler(told)
    return {**dict(sorted(counts.items())), "honest, by the loop": len(looped), "names": looped}


def programs(count: int, first: int, console: Console) -> dict[str, Any]:
    """Outcomes of random losses, and the largest difference of a row from itself beside others and alone."""
    from test_row_programs import judged

    counts: Counter[str] = Counter()
    worst = 0.0
    for seed in track(range(first, first + count), "programs", console=console):
        word, off = judged(seed)
        counts[word if off < 1e-8 else "WRONG"] += 1
        worst = max(worst, off)
    return {**counts, "largest difference": worst}


def museum() -> dict[str, Any]:
    """Outcomes of the tests of faults that other libraries have."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *map(str, sorted(ROOT.rglob(MUSEUM)))]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", text)}


def moved(count: int, first: int, console: Console) -> dict[str, Any]:
    """How far one record moves the clipped sum of a random loss: removed, and replaced; of the sensitivity."""
    from row_programs import batch_of, made

    counts: Counter[str] = Counter()
    worst = {"removed": 0.0, "replaced": 0.0}
    for seed in track(range(first, first + count), "records", console=console):
        program, (params, batch) = made(seed), batch_of(seed)
        (_, others), row = batch_of(seed + 10**6), seed % len(batch)
        left = torch.arange(len(batch)) != row
        replaced = torch.where(left[:, None], batch.flatten(1), others.flatten(1)).reshape(batch.shape)
        rule, key = Flat(10.0 ** (seed % 5 - 3)), insecure_key(seed)
        # a removed record leaves the place of the others as it is: their random numbers are those of their places
        ways = {"removed": (batch, left, 1), "replaced": (replaced, left | True, 2)}
        try:
            whole, _ = clipped_grad(program, params, batch, rule, engine=auto(), key=key)
            for way, (rows, mask, times) in ways.items():
                other, _ = clipped_grad(program, params, rows, rule, engine=auto(), key=key, mask_B=mask)
                off = sum(float((whole.sums[n] - other.sums[n]).double().square().sum()) for n in params) ** 0.5
                worst[way] = max(worst[way], off / (times * whole.sensitivity))
                counts[f"{way}, {'within' if off <= times * whole.sensitivity else 'BEYOND'}"] += 1
        except (UnsupportedModel, InvalidArgument):
            counts["refused"] += 1
    return {**counts, **{f"largest, {way}": value for way, value in worst.items()}}


def survey(path: Path) -> dict[str, Any]:
    """Engines of the models of a survey, the largest difference, and why some are not in one pass or groups."""
    rows = [row for row in json.loads(path.read_text())["cases"] if "engine" in row]
    slow = {row["case"]: row["reason"][:160] for row in rows if row["engine"] in ("loop", "refused")}
    largest = max(row.get("parity") or 0.0 for row in rows)
    return {**Counter(row["engine"] for row in rows), "largest difference": largest, "reasons": slow}


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--programs", "count", default=5000, type=click.IntRange(1), help="Random losses.")
@click.option("--first", default=10_000, type=click.IntRange(0), help="Their first seed.")
@click.option("--every", default=1, type=click.IntRange(1), help="Only every so many of the losses of the tests.")
@click.option("--survey", "path", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A survey's file.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path, dir_okay=False), help="The result file.")
def main(count: int, first: int, every: int, path: Path | None, out: Path) -> None:
    warnings.simplefilter("ignore")  # of torch, about the losses
    logging.getLogger("dpfunc").propagate = False
    torch.set_num_threads(1)
    console = Console()
    found = {
        "losses": isolation(every, console), "museum": museum(), "programs": programs(count, first, console),
        "records": moved(max(1, count // 10), first, console), **({"survey": survey(path)} if path else {}),
    }  # fmt: skip
    for title, values in found.items():
        cells = {n: json.dumps(v, indent=1) if isinstance(v, (list, dict)) else v for n, v in values.items()}
        printed((title, "count"), cells.items())
    write(out, found)


if __name__ == "__main__":
    main()
