"""What keeping freed memory saves: `python -m benchmarks.freed_memory`.

Memory that glibc has given back to the system comes back page by page, zeroed, one page fault each. How much is given
back depends on what is freed last, so that equal steps take different times. Each of the steps here runs in a process
of its own, once as the system has it, and once with the variables of `benchmarks.engines.report.KEEPS`: the step
without privacy, and the private one (clipped sum, without noise). Medians of the rounds after two that warm up;
page faults are those of a step, resident memory is the peak of the process.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
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
from benchmarks.engines.memory import MIB, peak_resident

RESULT = Path(__file__).parent / "results" / "freed_memory.json"
ROOT = Path(__file__).parents[1]
STEPS, MEMORIES = ("plain", "private"), ("given back", "kept")
MARK, WARM_UP = "result: ", 2
HEADS = ("case", "step", "given back, ms", "kept, ms", "saved", "page faults", "kept", "resident, MiB", "kept")


def measure(case: str, step: str, rounds: int, quick: bool) -> dict[str, float]:
    """Seconds and page faults of a step, in this process."""
    problem = ALL_CASES[case].problem(quick=quick)
    contestant = plain(problem) if step == "plain" else ours(problem, "auto", "none")
    seconds, faults = [], []
    for _ in range(WARM_UP + rounds):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        contestant.step()
        seconds.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "page_faults": statistics.median(faults[WARM_UP:]),
        "resident_mib": peak_resident() / MIB,
    }


def ask(case: str, step: str, memory: str, rounds: int, quick: bool) -> dict[str, float]:
    """Run `measure` in a new process."""
    variables = report.with_freed_memory_given_back()
    if memory == "kept":
        variables |= report.KEEPS
    command = [sys.executable, "-m", "benchmarks.freed_memory", "--one", json.dumps([case, step, rounds, quick])]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    return next(json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK))


def rows(found: dict[str, Any]) -> list[list[str]]:
    """One line for each step of each case."""
    lines = []
    for case, steps in found.items():
        for step, both in steps.items():
            one, other = (both[memory] for memory in MEMORIES)
            lines.append(
                [
                    case, step, *(f"{1e3 * each['seconds']:.0f}" for each in (one, other)),
                    f"{100 * (1 - other['seconds'] / one['seconds']):.0f} %",
                    *(f"{each[number]:.0f}" for number in ("page_faults", "resident_mib") for each in (one, other)),
                ]
            )  # fmt: skip
    return lines


@click.command(help=__doc__.splitlines()[0])
@click.option(
    "--cases", default="w1,bert,w4,w2n,w3", callback=check_cases, help="Names with commas.", show_default=True
)
@click.option("--rounds", default=5, type=click.IntRange(1), show_default=True)
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures.")
@click.option("--one", hidden=True, help="Measure this here: case, step, rounds and quick as JSON.")
@click.option("--out", default=RESULT, type=click.Path(dir_okay=False, path_type=Path), show_default=True)
def main(cases: list[str], rounds: int, quick: bool, one: str | None, out: Path) -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    if one is not None:
        print(MARK + json.dumps(measure(*json.loads(one))))
        return
    console, found = Console(), {}
    for case in track(cases, "Cases", console=Console(stderr=True)):
        found[case] = {
            step: {memory: report.rounded(ask(case, step, memory, rounds, quick)) for memory in MEMORIES}
            for step in STEPS
        }
    table = Table(*HEADS)
    for row in rows(found):
        table.add_row(*row)
    console.print(table)
    report.write({"machine": report.machine(1, "cpu"), "quick": quick, "rounds": rounds, "cases": found}, out)
    console.print(f"Written to {out}")


if __name__ == "__main__":
    main()
