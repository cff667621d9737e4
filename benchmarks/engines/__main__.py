"""`python -m benchmarks.engines`: cases x contestants in one run, into a table and a result file."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.engines import report
from benchmarks.engines.cases import ALL_CASES, CASES, LAYER_CASES
from benchmarks.engines.contestants import NAMES, PLAIN, known
from benchmarks.engines.runner import Settings, largest_batches, run_case

RESULT = Path(__file__).parents[1] / "results" / "engines.json"


def listed(text: str) -> list[str]:
    """A list from `a,b,c`."""
    return [word.strip() for word in text.split(",") if word.strip()]


def check_cases(context: click.Context, option: click.Parameter, text: str) -> list[str]:
    """Names of cases; `all` is all but the single layers."""
    names = list(CASES) if text == "all" else listed(text)
    unknown = [name for name in names if name not in ALL_CASES]
    if unknown:
        raise click.BadParameter(f"no case {', '.join(unknown)}. There are {', '.join(ALL_CASES)}.")
    return names


def check_engines(context: click.Context, option: click.Parameter, text: str) -> list[str]:
    """Names of contestants."""
    names = listed(text)
    unknown = [name for name in names if not known(name)]
    if unknown:
        raise click.BadParameter(
            f"no contestant {', '.join(unknown)}. There are {', '.join(NAMES)}; an engine may carry its microbatch, "
            "as in auto/4."
        )
    return names


def check_microbatch(context: click.Context, option: click.Parameter, text: str) -> str:
    """`none`, `auto` or a positive number."""
    if text in ("none", "auto") or (text.isdigit() and int(text) > 0):
        return text
    raise click.BadParameter(f"expected none, auto or a positive number, got {text}.")


def start(out: Path, append: bool, settings: Settings) -> dict[str, Any]:
    """The report so far: empty, or what the file holds."""
    fresh: dict[str, Any] = {
        "machine": report.machine(settings.threads, settings.device),
        "versions": report.versions(),
        "quick": settings.quick,
        "cases": {},
        "largest_batch": {},
    }
    if not append or not out.exists():
        return fresh
    old = json.loads(out.read_text())
    for fact in ("versions", "quick"):
        if old[fact] != fresh[fact]:
            raise click.UsageError(
                f"{out} was measured with {fact} {old[fact]}, now {fresh[fact]}: leave out --append."
            )
    return {**fresh, "cases": old["cases"], "largest_batch": old["largest_batch"]}


def told(progress: Progress, bar: TaskID, case: str, what: str) -> None:
    """One step of the bar."""
    progress.update(bar, advance=1, description=f"{case} {what}")


def with_memory_of(known: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The record of a case with its times, and what a run without times measured: memory is the same on any day."""
    contestants = dict(known["contestants"])
    for name, found in measured["contestants"].items():
        if name in contestants and "memory" in found:
            contestants[name] = {**contestants[name], "memory": found["memory"]}
    return {**known, "contestants": contestants}


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option(
    "--cases", default="all", callback=check_cases, help="Names with commas; all; or none with an empty text."
)
@click.option("--layers", is_flag=True, help="The single layers too.")
@click.option("--engines", default=",".join(NAMES), callback=check_engines, help="Contestants, with commas.")
@click.option("--microbatch", default="none", callback=check_microbatch, help="none, auto or a number of samples.")
@click.option(
    "--rounds",
    default=5,
    type=click.IntRange(0),
    help="Timed rounds; 0 measures no time, and keeps the times of --append.",
)
@click.option("--threads", default=1, type=click.IntRange(1), help="Threads of torch.")
@click.option("--memory/--no-memory", default=True, help="Memory, in a process for each contestant.")
@click.option(
    "--largest", default="", callback=check_cases, help="Cases for which the largest batch is looked for, e.g. vgg19."
)
@click.option("--limit-mib", default=2048.0, type=click.FloatRange(0, min_open=True), help="Memory for --largest.")
@click.option("--patience", default=30.0, help="Seconds: whose step takes longer is not timed.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@click.option("--out", default=RESULT, type=click.Path(path_type=Path, dir_okay=False), help="The result file.")
@click.option("--append", is_flag=True, help="Keep the other cases that the result file holds.")
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures.")
def main(
    cases: list[str],
    layers: bool,
    engines: list[str],
    microbatch: str,
    rounds: int,
    threads: int,
    memory: bool,
    largest: list[str],
    limit_mib: float,
    patience: float,
    device: str,
    out: Path,
    append: bool,
    quick: bool,
) -> None:
    """Measure, print tables, and write the result file after each case."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("no GPU is there: leave out --device.")
    settings = Settings(rounds, threads, microbatch, memory, quick, device, patience)
    console = Console(width=None if sys.stdout.isatty() else 120)
    chosen = [*cases, *(LAYER_CASES if layers else [])]
    results = start(out, append, settings)
    contestants = len({PLAIN, *engines})
    each = contestants * (2 + rounds + memory)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(chosen) * each + len(largest) * len(engines))
        for number, case in enumerate(chosen, 1):
            known = results["cases"].get(case)
            record = run_case(case, engines, settings, partial(told, progress, bar, case))
            results["cases"][case] = record if rounds or known is None else with_memory_of(known, record)
            progress.update(bar, completed=number * each)
            console.print(report.case_table(case, results["cases"][case]))
            report.write(results, out)
        for case in largest:
            say = partial(told, progress, bar, case)
            results["largest_batch"][case] = largest_batches(case, engines, settings, limit_mib, say)
            console.print(report.largest_table(results["largest_batch"][case]))
            report.write(results, out)
    console.print(f"Written to {out}")


if __name__ == "__main__":
    main()
