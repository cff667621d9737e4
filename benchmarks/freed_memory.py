"""What keeping freed memory saves: `python -m benchmarks.freed_memory`.

Memory that glibc has given back to the system comes back page by page, zeroed, one page fault each. How much is given
back depends on what is freed last, so that equal steps take different times. The step without privacy and the clipped
sum run in processes as the system has it, and in others with the variables of `benchmarks.measure.KEEPS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from benchmarks.engines.__main__ import check_cases
from benchmarks.engines.cases import ALL_CASES
from benchmarks.measure import compete
from benchmarks.results import FOLDER, show, write

RESULT = FOLDER / "freed_memory.json"
STEPS, MEMORIES = {"plain": "plain", "private": "auto"}, ("given back", "kept")
HEADS = ("case", "step", "given back, ms", "kept, ms", "saved", "page faults", "kept", "resident, MiB", "kept")


def measure(case: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Both steps with both kinds of memory, in turn."""
    spec = {
        "module": "benchmarks.engines.contestants", "cases": "benchmarks.engines.cases", "case": case, "quick": quick,
        "device": "cpu",
    }  # fmt: skip
    specs = {
        f"{step}, {freed}": {**spec, "contestant": contestant, "freed": freed}
        for step, contestant in STEPS.items() for freed in MEMORIES
    }  # fmt: skip
    contestants = compete(specs, rounds, base="plain, given back")
    return {"title": ALL_CASES[case].title, "rounds": rounds, "contestants": contestants}


def rows(cases: Mapping[str, Any]) -> list[list[str]]:
    """One line for each step of each case."""
    lines = []
    for case, record in cases.items():
        for step in STEPS:
            one, other = (record["contestants"][f"{step}, {freed}"] for freed in MEMORIES)
            seconds = [each["time"]["median_seconds"] for each in (one, other)]
            counts = [each[number] for number in ("page_faults", "resident_mib") for each in (one, other)]
            saved = f"{100 * (1 - seconds[1] / seconds[0]):.0f} %"
            shown = [*(f"{1e3 * value:.0f}" for value in seconds), saved, *(f"{value:.0f}" for value in counts)]
            lines.append([case, step, *shown])
    return lines


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--cases", default="w1,bert,w4,w2n,w3", callback=check_cases, help="Names with commas.")
@click.option("--rounds", default=5, type=click.IntRange(1))
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures.")
@click.option("--out", default=RESULT, type=click.Path(dir_okay=False, path_type=Path))
def main(cases: list[str], rounds: int, quick: bool, out: Path) -> None:
    """Measure, print and write."""
    console, found = Console(), {}
    for case in track(cases, "Cases", console=Console(stderr=True)):
        found[case] = measure(case, rounds, quick)
        console.print(show(case, found[case]))
    write(out, {"quick": quick, "cases": found})


if __name__ == "__main__":
    main()
