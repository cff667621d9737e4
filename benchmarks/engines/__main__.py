"""`python -m benchmarks.engines`: cases x contestants in one run, into a table and a result file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.engines.cases import ALL_CASES, CASES, LAYER_CASES
from benchmarks.engines.contestants import NAMES, PLAIN, known
from benchmarks.engines.runner import Settings, run_case
from benchmarks.results import FOLDER, read, show, versions, write

RESULT = FOLDER / "engines.json"
Command = Callable[..., Any]


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


def measures(result: Path, rounds: int = 5) -> Callable[[Command], Command]:
    """Options of all commands that measure engines; the command is called with `settings`, `out` and its own."""
    options = (
        click.option("--rounds", default=rounds, type=click.IntRange(0), help="Timed rounds; 0 measures no time."),
        click.option("--threads", default=1, type=click.IntRange(1), help="Threads of torch."),
        click.option("--memory/--no-memory", default=True, help="Memory, in a process for each contestant."),
        click.option("--patience", default=30.0, help="Seconds: whose step takes longer is not timed."),
        click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"])),
        click.option("--against", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
                     help="A checkout of dpfunc: its engines take part in the same rounds."),
        click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures."),
        click.option("--out", default=result, type=click.Path(path_type=Path, dir_okay=False)),
    )  # fmt: skip

    def decorated(command: Command) -> Command:
        def called(
            rounds: int, threads: int, memory: bool, patience: float, device: str, against: Path | None, quick: bool,
            out: Path, **own: Any,
        ) -> None:  # fmt: skip
            if device == "cuda" and not torch.cuda.is_available():
                raise click.UsageError("no GPU is there: leave out --device.")
            if against is not None and not (against / "dpfunc").is_dir():
                raise click.UsageError(f"{against} is no checkout of dpfunc: it has no folder dpfunc.")
            if against is not None and out == result:
                raise click.UsageError("A comparison with another dpfunc is no result to keep: name a file with --out.")
            command(settings=Settings(rounds, threads, memory, quick, device, patience, against), out=out, **own)

        for option in reversed(options):
            called = option(called)
        return called

    return decorated


def measure_cases(
    names: Sequence[str],
    contestants: Sequence[str],
    settings: Settings,
    out: Path,
    *,
    cases: str = "benchmarks.engines.cases",
    kept: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure cases, print a table of each, and write the result file after each; `kept` are records to keep."""
    console, found = Console(width=None if sys.stdout.isatty() else 130), dict(kept or {})
    each = len({PLAIN, *contestants}) * (2 + settings.rounds + settings.memory)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(names) * each)
        for number, case in enumerate(names, 1):
            say = partial(lambda case, what: progress.update(bar, advance=1, description=f"{case} {what}"), case)
            record = run_case(case, contestants, settings, say, cases)
            timed = None if settings.rounds else found.get(case)
            found[case] = record if timed is None else with_memory_of(timed, record)
            progress.update(bar, completed=number * each)
            console.print(show(case, found[case]))
            write(out, {"quick": settings.quick, "cases": found}, threads=settings.threads, device=settings.device)
    console.print(f"Written to {out}")
    return read(out)


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
@click.option("--append", is_flag=True, help="Keep the other cases that the result file holds.")
@measures(RESULT)
def main(cases: list[str], layers: bool, engines: list[str], append: bool, settings: Settings, out: Path) -> None:
    """Measure, print tables, and write the result file after each case; without rounds, keep the times of --append."""
    old = read(out) if append else {}
    for fact, now in {"versions": versions(), "quick": settings.quick}.items() if old else ():
        if old[fact] != now:
            raise click.UsageError(f"{out} was measured with {fact} {old[fact]}, now {now}: leave out --append.")
    chosen = [*cases, *(LAYER_CASES if layers else [])]
    measure_cases(chosen, engines, settings, out, kept=old.get("cases"))


if __name__ == "__main__":
    main()
