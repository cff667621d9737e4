"""Time and memory of clip groups that are summed during the backward pass: `python -m benchmarks.groups`.

Each round takes, in turn: a step without privacy; a clipped sum with one group, whose factors are known after the
backward pass; a clipped sum with a group for each layer, summed as soon as its gradients are known. Seconds are
processor seconds of one thread, and the best of the rounds: other work on the machine lengthens the others. Memory is
the peak of torch's allocator in one more step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dpfunc
from benchmarks.engines import report
from benchmarks.engines.__main__ import check_cases
from benchmarks.engines.cases import ALL_CASES
from benchmarks.engines.contestants import plain
from benchmarks.engines.memory import MIB, allocated
from dpfunc.clipped import make_clipped_grad
from dpfunc.clipping import AllParameters, Flat, PerLayer

RESULT = Path(__file__).parent / "results" / "groups.json"
GROUPINGS = {"one group": AllParameters(), "a group a layer": PerLayer()}


def measure(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Seconds and peak bytes of each kind of step, and their ratios to the plain one."""
    problem = ALL_CASES[name].problem(quick=quick)
    loss_fn, params = problem.functional()
    batch = (problem.inputs, problem.targets)

    def private(groups: Any) -> Callable[[], object]:
        clipped_grad = make_clipped_grad(loss_fn, Flat(1.0, groups=groups), engine=dpfunc.engines.auto())
        return lambda: clipped_grad(params, batch)

    baseline = plain(problem.copy())
    steps = {"plain": baseline.step, **{kind: private(groups) for kind, groups in GROUPINGS.items()}}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for number in range(rounds + 2):  # the first ones warm up, and are audited
        for kind, step in steps.items():
            start = time.process_time()
            step()
            if number > 1:
                seconds[kind].append(time.process_time() - start)
    baseline.clear()
    peaks = {kind: allocated(step)[1].peak for kind, step in steps.items()}
    best = {kind: min(values) for kind, values in seconds.items()}
    return {
        "batch_size": problem.batch_size,
        "best_seconds": {kind: round(value, 5) for kind, value in best.items()},
        "peak_mib": {kind: round(value / MIB, 1) for kind, value in peaks.items()},
        "time": {kind: round(best[kind] / best["plain"], 3) for kind in GROUPINGS},
        "memory": {kind: round(peaks[kind] / peaks["plain"], 3) for kind in GROUPINGS},
    }


def table(cases: dict[str, Any]) -> Table:
    """One line a case."""
    ratios = [f"{what}, {kind}" for what in ("time", "memory") for kind in GROUPINGS]
    shown = Table("case", "plain ms", *ratios)
    for name, case in cases.items():
        numbers = (case[what][kind] for what in ("time", "memory") for kind in GROUPINGS)
        shown.add_row(name, f"{case['best_seconds']['plain'] * 1e3:.0f}", *(f"{value:.2f}" for value in numbers))
    return shown


@click.command(help=__doc__.splitlines()[0])
@click.option("--cases", default="w1,w2n,w4,w4f,bert,gpt2", callback=check_cases, show_default=True)
@click.option("--rounds", default=5, type=click.IntRange(1), show_default=True)
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures.")
@click.option("--out", default=RESULT, type=click.Path(dir_okay=False, path_type=Path), show_default=True)
def main(cases: list[str], rounds: int, quick: bool, out: Path) -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    console = Console()
    found = {name: measure(name, rounds, quick) for name in track(cases, "Cases", console=Console(stderr=True))}
    console.print(table(found))
    result = {"machine": report.machine(torch.get_num_threads(), "cpu"), "quick": quick, "rounds": rounds,
              "cases": found}  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Written to {out}")


if __name__ == "__main__":
    main()
