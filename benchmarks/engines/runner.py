"""Measure cases x contestants: what `measure.compete` is told, the truth, and the options of all such commands."""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.engines import contestants
from benchmarks.engines.contestants import JAX_MODES, OURS, PLAIN
from benchmarks.engines.problem import Problem, Truth
from benchmarks.measure import AGAINST, Spec, TakesNoPart, compete
from benchmarks.results import read, show, write

CASES = "benchmarks.engines.cases"


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        rounds: timed rounds; 0 measures no time. threads: of torch. memory: whether to measure it. quick: tiny sizes.
        device: "cpu" or "cuda". patience: seconds; a contestant whose step takes longer is not timed.
        against: a checkout of dpfunc, whose engines take part as well, in the same rounds.
    """

    rounds: int
    threads: int
    memory: bool
    quick: bool
    device: str
    patience: float
    against: Path | None


class Truths:
    """What is right for a contestant, or for its layers where it brings its own; computed once, in float64 too."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kept: dict[tuple[bool, bool], Truth] = {}
        self.lock = Lock()  # contestants are set up at the same time on a GPU

    def error(self, name: str, sums: Any, double: bool) -> float:
        own_layers, clip_norm = self.problem.stand_in is not None and name.startswith("opacus"), self.problem.clip_norm
        bounds = (clip_norm, clip_norm * contestants.INNER, math.inf)
        with self.lock:
            if (own_layers, double) not in self.kept:
                problem = self.problem.double() if double else self.problem.copy()
                module = contestants.opacus_module(problem) if own_layers else problem.module
                self.kept[own_layers, double] = Truth.of(module, problem, bounds)
        inner = name.partition("/")[0].removesuffix(AGAINST) in OURS
        bound = bounds[2] if name == contestants.JAX_PLAIN else bounds[inner]
        found = {key: torch.from_numpy(np.asarray(value)) for key, value in sums.items()}
        return self.kept[own_layers, double].error(found, bound)


def spec_of(name: str, problem: Problem, spec: Spec, folder: Path, against: Path | None) -> Spec | TakesNoPart:
    if name.partition("/")[0] not in JAX_MODES:
        return {**spec, "contestant": name, "dpfunc": str(against) if name.endswith(AGAINST) else None}
    try:
        return contestants.jax_spec(name, problem, spec, folder)
    except TakesNoPart as why:
        return why


def run_case(case: str, names: Sequence[str], settings: Settings, cases: str = CASES) -> dict[str, Any]:
    """The record of a case, a name in ALL_CASES of the module `cases`, with contestants, the plain step among them."""
    torch.set_num_threads(settings.threads)
    torch.backends.cudnn.allow_tf32 = False  # as in the processes that are measured
    spec: dict[str, Any] = {
        "module": "benchmarks.engines.contestants", "cases": cases, "case": case, "quick": settings.quick,
        "threads": settings.threads, "device": settings.device,
    }  # fmt: skip
    problem = contestants.problem_of(spec)
    # Half of the samples are clipped and half are not: both are in what is compared.
    spec["clip_norm"] = statistics.median_low(Truth.of(problem.module, problem, ()).norms)
    problem = replace(problem, clip_norm=spec["clip_norm"])
    names = list(dict.fromkeys([PLAIN, *names]))
    if settings.against is not None:
        names += [name + AGAINST for name in names if name.partition("/")[0] in OURS]
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as folder:
        specs = {name: spec_of(name, problem, spec, Path(folder), settings.against) for name in names}
        found = compete(
            specs, settings.rounds, base=PLAIN, error=Truths(problem).error, memory=settings.memory,
            patience=settings.patience, device=settings.device,
        )  # fmt: skip
    return {
        "title": contestants.case_of(spec).title, "load_1min": load, **problem.sizes(), "clip_norm": problem.clip_norm,
        "rounds": settings.rounds, "contestants": found,
    }  # fmt: skip


def measures(result: Path, rounds: int = 5) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        def called(out: Path, **values: Any) -> None:
            settings = Settings(**{field.name: values.pop(field.name) for field in fields(Settings)})
            against = settings.against
            if settings.device == "cuda" and not torch.cuda.is_available():
                raise click.UsageError("no GPU is there: leave out --device.")
            if against is not None and not (against / "dpfunc").is_dir():
                raise click.UsageError(f"{against} is no checkout of dpfunc: it has no folder dpfunc.")
            if against is not None and out == result:
                raise click.UsageError("A comparison with another dpfunc is no result to keep: name a file with --out.")
            command(settings=settings, out=out, **values)

        for option in reversed(options):
            called = option(called)
        return called

    return decorated


def measure_cases(
    names: Sequence[str], contestants: Sequence[str], settings: Settings, out: Path, *,
    cases: str = CASES, kept: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure cases, print a table of each, and write the result file after each; `kept` are records to keep."""
    console, found = Console(width=None if sys.stdout.isatty() else 130), dict(kept or {})
    for case in track(names, "Cases", console=Console(stderr=True)):
        found[case] = run_case(case, contestants, settings, cases)
        console.print(show(case, found[case]))
        write(out, {"quick": settings.quick, "cases": found}, threads=settings.threads, device=settings.device)
    console.print(f"Written to {out}")
    return read(out)
