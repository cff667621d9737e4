"""What trust costs, in one process: `python -m benchmarks.overhead`.

Each round takes, in turn: a step without privacy; the gradients of `bookkeeping` with a trace; the same without one; an
audit of one row; a whole step of `clipped_grad`. The two of `bookkeeping` must give the same norms first. `typing` is
what the trace adds to a whole step. `audits` is the share of a whole step that audits take: what they may take
(`TIME_SHARE`), or one row in `STEPS_IN` steps where that is more. `first` is the first step of a new `clipped_grad`,
with its audits, where torch has run the model before. All are medians of the rounds. The step before a timed one is of
its own kind: after another kind other memory is free, and the cost of its page faults would count as that of the trace.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.engines import report
from benchmarks.engines.__main__ import check_cases
from benchmarks.engines.cases import ALL_CASES
from benchmarks.engines.contestants import ours, plain
from dpfunc.engines.bookkeeping import DEFAULT_BUDGET, Bookkeeping, bookkeeping
from dpfunc.engines.guards.audit import ROWS_IN, STEPS_IN, TIME_SHARE, audit, credited_by

RESULT = Path(__file__).parent / "results" / "overhead.json"


def measure(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Seconds of each kind of step of one case, and the ratios."""
    problem = ALL_CASES[name].problem(quick=quick)
    loss_fn, params = problem.functional()
    batch = (problem.inputs, problem.targets)

    engine = bookkeeping(DEFAULT_BUDGET)
    known = engine.sample_axes(loss_fn, params, batch)

    def untraced() -> Any:
        """As a compiled step does: the places are those of an earlier trace, and nothing is followed."""
        with mock.patch.object(sys.modules[Bookkeeping.__module__], "following", return_value=nullcontext()):
            return engine._forward_and_backward(loss_fn, params, batch, known)

    check_parity(engine(loss_fn, params, batch).sq_norms(), untraced().sq_norms(), name)
    per_sample = engine(loss_fn, params, batch)
    credited = credited_by(per_sample, per_sample.sq_norms())
    if credited is None:
        raise RuntimeError(f"{name}: each row was computed alone.")
    whole = ours(problem, "bookkeeping", "none").step
    first = statistics.median(seconds(ours(problem, "bookkeeping", "none").step) for _ in range(3))
    kinds: dict[str, Callable[[], object]] = {
        "plain": plain(problem.copy()).step,
        "traced": lambda: engine(loss_fn, params, batch),
        "untraced": untraced,
        "audit": lambda: audit(loss_fn, params, batch, credited, [0]),
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
    added = [one - other for one, other in zip(times["traced"], times["untraced"], strict=True)]
    return {
        "batch_size": problem.batch_size,
        "rounds": rounds,
        "seconds": {kind: round(value, 6) for kind, value in median.items()},
        "best_seconds": {kind: round(value, 6) for kind, value in best.items()},
        "typing": round(statistics.median(added) / median["whole"], 4),
        "typing_best": round((best["traced"] - best["untraced"]) / best["whole"], 4),
        "audits": round(max(share / STEPS_IN, min(TIME_SHARE, share * (problem.batch_size // ROWS_IN))), 4),
        "first": round(first / median["whole"], 2),
    }


def check_parity(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], name: str) -> None:
    """Both give the same norms."""
    for param, value in one.items():
        if not torch.allclose(value, other[param], rtol=1e-3, atol=1e-8):
            raise RuntimeError(f"{name}: the norms of {param} differ with and without a trace.")


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def table(cases: dict[str, Any]) -> Table:
    """One line a case."""
    shown = Table(
        "case", "plain ms", "whole ms", "traced ms", "untraced ms", "typing %", "of best %", "audits %", "first / later"
    )
    for name, case in cases.items():
        numbers = [case["seconds"][kind] * 1e3 for kind in ("plain", "whole", "traced", "untraced")]
        shares = [case[kind] * 100 for kind in ("typing", "typing_best", "audits")]
        shown.add_row(name, *(f"{value:.1f}" for value in (*numbers, *shares)), f"{case['first']:.1f}")
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
