"""What trust costs, in one process: `python -m benchmarks.overhead`.

Each round takes, in turn: a step without privacy; an audit of one row; a whole step of `clipped_grad`. `audits` is the
share of a whole step that audits take on average: what they may take (`TIME_SHARE`), or less where the rows that a step
may compare need less. `first` is the first step of a new `clipped_grad`, with its audits, where torch has run the model
before. All are medians of the rounds. The step before a timed one is of its own kind: after another one other memory is
free.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.engines import report
from benchmarks.engines.__main__ import check_cases
from benchmarks.engines.cases import ALL_CASES
from benchmarks.engines.contestants import ours, plain
from dpfunc.engines import auto
from dpfunc.engines.guards.audit import ROWS_IN, TIME_SHARE, Audits, audit, credited_by

RESULT = Path(__file__).parent / "results" / "overhead.json"


def measure(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Seconds of each kind of step of one case, and the ratios."""
    problem = ALL_CASES[name].problem(quick=quick)
    loss_fn, params = problem.functional()
    batch = (problem.inputs, problem.targets)

    seed = torch.default_generator.get_state()
    per_sample = auto()(loss_fn, params, batch)
    credited = credited_by(per_sample, per_sample.sq_norms(), seed, repeatable=True)
    if credited is None:
        raise RuntimeError(f"{name}: each row was computed alone.")
    whole = ours(problem, "auto", "none").step
    first = statistics.median(seconds(ours(problem, "auto", "none").step) for _ in range(3))
    kinds: dict[str, Callable[[], object]] = {
        "plain": plain(problem.copy()).step,
        "audit": lambda: audit(loss_fn, params, batch, credited, [0], Audits()),
        "whole": whole,
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, step in kinds.items():
            step()
            times[kind].append(seconds(step))
    median = {kind: statistics.median(values) for kind, values in times.items()}
    share = median["audit"] / median["whole"]
    best = {kind: min(values) for kind, values in times.items()}
    return {
        "batch_size": problem.batch_size,
        "rounds": rounds,
        "seconds": {kind: round(value, 6) for kind, value in median.items()},
        "best_seconds": {kind: round(value, 6) for kind, value in best.items()},
        "audits": round(min(TIME_SHARE, share * max(1, problem.batch_size // ROWS_IN)), 4),
        "first": round(first / median["whole"], 2),
    }


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def table(cases: dict[str, Any]) -> Table:
    """One line a case."""
    shown = Table("case", "plain ms", "whole ms", "audits %", "first / later")
    for name, case in cases.items():
        numbers = [case["seconds"][kind] * 1e3 for kind in ("plain", "whole")]
        shown.add_row(name, *(f"{value:.1f}" for value in (*numbers, case["audits"] * 100, case["first"])))
    return shown


@click.command(help=__doc__.splitlines()[0])
@click.option("--cases", default="all", callback=check_cases, help="Names with commas, or all.", show_default=True)
@click.option("--rounds", default=5, type=click.IntRange(1), show_default=True)
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures.")
@click.option("--out", default=RESULT, type=click.Path(dir_okay=False, path_type=Path), show_default=True)
def main(cases: list[str], rounds: int, quick: bool, out: Path) -> None:
    """Measure, print and write."""
    console = Console()
    found = {name: measure(name, rounds, quick) for name in track(cases, "Cases", console=Console(stderr=True))}
    console.print(table(found))
    result = {"machine": report.machine(torch.get_num_threads(), "cpu"), "quick": quick, "cases": found}
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Written to {out}")


if __name__ == "__main__":
    main()
