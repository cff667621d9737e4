"""One case, all contestants: what `measure.compete` is told, and the truth that sums are compared with."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines import contestants
from benchmarks.engines.contestants import JAX_MODES, OURS, PLAIN
from benchmarks.engines.parity import Truth
from benchmarks.engines.problem import Problem
from benchmarks.measure import AGAINST, Spec, TakesNoPart, compete

Say = Callable[[str], object]


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        rounds: timed rounds; 0 measures no time. threads: of torch. memory: whether to measure it. quick: tiny sizes.
        device: "cpu" or "cuda". patience: seconds; a contestant whose step takes longer is not timed.
        against: a checkout of dpfunc, whose engines take part as well, in the same rounds.
    """

    rounds: int = 12
    threads: int = 1
    memory: bool = True
    quick: bool = False
    device: str = "cpu"
    patience: float = 120.0
    against: Path | None = None


class Truths:
    """What is right for a contestant, or for its layers where it brings its own; computed once, in float64 too."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kept: dict[tuple[bool, bool], Truth] = {}

    def error(self, name: str, sums: Any, double: bool) -> float:
        """How far the sums of a contestant are off."""
        own_layers, clip_norm = self.problem.stand_in is not None and name.startswith("opacus"), self.problem.clip_norm
        bounds = (clip_norm, clip_norm * contestants.INNER, math.inf)
        if (own_layers, double) not in self.kept:
            problem = self.problem.double() if double else self.problem.copy()
            module = contestants.opacus_module(problem) if own_layers else problem.module
            self.kept[own_layers, double] = Truth.of(module, problem, bounds)
        inner = name.partition("/")[0].removesuffix(AGAINST) in OURS
        bound = bounds[2] if name == contestants.JAX_PLAIN else bounds[inner]
        found = {key: torch.from_numpy(np.asarray(value)) for key, value in sums.items()}
        return self.kept[own_layers, double].error(found, bound)


def spec_of(name: str, problem: Problem, spec: Spec, folder: Path, against: Path | None) -> Spec | TakesNoPart:
    """What the process of a contestant is told."""
    if name.partition("/")[0] not in JAX_MODES:
        return {**spec, "contestant": name, "dpfunc": str(against) if name.endswith(AGAINST) else None}
    try:
        return contestants.jax_spec(name, problem, spec, folder)
    except TakesNoPart as why:
        return why


def run_case(
    case: str,
    names: Sequence[str],
    settings: Settings,
    say: Say = lambda text: None,
    cases: str = "benchmarks.engines.cases",
) -> dict[str, Any]:
    """Everything about one case.

    Args:
        case: a name in ALL_CASES of the module `cases`. names: contestants; the plain step is always among them.
        say: told what was done, for a progress bar.

    Returns:
        The case's record for the result file.
    """
    torch.set_num_threads(settings.threads)
    spec: dict[str, Any] = {
        "module": "benchmarks.engines.contestants", "cases": cases, "case": case, "quick": settings.quick,
        "threads": settings.threads, "device": settings.device,
    }  # fmt: skip
    problem = contestants.problem_of(spec)
    # Half of the samples are clipped and half are not: both are in what is compared.
    spec["clip_norm"] = statistics.median_low(Truth.of(problem.module, problem, ()).norms)
    problem = replace(problem, clip_norm=spec["clip_norm"])
    record: dict[str, Any] = {
        "title": contestants.case_of(spec).title, "load_1min": round(os.getloadavg()[0], 2), **problem.sizes(),
        "clip_norm": problem.clip_norm, "rounds": settings.rounds,
    }  # fmt: skip
    names = list(dict.fromkeys([PLAIN, *names]))
    if settings.against is not None:
        names += [name + AGAINST for name in names if name.partition("/")[0] in OURS]
    with tempfile.TemporaryDirectory() as folder:
        specs = {name: spec_of(name, problem, spec, Path(folder), settings.against) for name in names}
        record["contestants"] = compete(
            specs, settings.rounds, base=PLAIN, error=Truths(problem).error, memory=settings.memory,
            patience=settings.patience, say=say,
        )  # fmt: skip
    return record
