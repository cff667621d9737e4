"""One case, all contestants: parity first, then time in interleaved rounds, then memory in a process each."""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.engines.cases import ALL_CASES
from benchmarks.engines.contestants import (
    NO_SUM,
    PLAIN,
    Contestant,
    microbatch_of,
    opacus_module,
    prepare,
    reason,
)
from benchmarks.engines.parity import TOLERANCE, Truth
from benchmarks.engines.problem import Problem
from benchmarks.engines.timing import interleaved, summary
from benchmarks.engines.worker import ask
from dpfunc.clipping.bounds import SLACK

Say = Callable[[str], object]
LARGEST_TRIED = 2048


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        rounds: timed rounds; 0 measures no time. threads: of torch. microbatch: of engines whose name carries none.
        memory: whether to measure it. quick: tiny sizes. device: "cpu" or "cuda".
        patience: seconds; a contestant whose step takes longer is not timed.
    """

    rounds: int = 12
    threads: int = 2
    microbatch: str = "none"
    memory: bool = True
    quick: bool = False
    device: str = "cpu"
    patience: float = 120.0


TruthOf = Callable[[str], Truth]


def truths(problem: Problem) -> TruthOf:
    """What is right for a contestant, and for its layers where it brings its own; each computed once."""
    bounds = (problem.clip_norm, problem.clip_norm * (1 - SLACK), math.inf)
    kept: dict[bool, Truth] = {}

    def truth(name: str) -> Truth:
        own_layers = problem.stand_in is not None and name.startswith("opacus")
        if own_layers not in kept:
            module = opacus_module(problem.copy()) if own_layers else problem.module
            kept[own_layers] = Truth.of(module, problem, bounds)
        return kept[own_layers]

    return truth


def seconds_of_a_step(contestant: Contestant) -> float:
    """One step, and its clearing up."""
    start = time.perf_counter()
    contestant.step()
    seconds = time.perf_counter() - start
    contestant.clear()
    return seconds


def admit(name: str, problem: Problem, truths: tuple[TruthOf, TruthOf], settings: Settings, at_end: ExitStack) -> Any:
    """Set a contestant up and compare its sum with the truth.

    Where float32 is off by more than is allowed, float64 decides: in networks with kinks (ReLU, max pooling) the last
    digit of an activation can switch a unit, for everybody in the same way. What was set up is closed `at_end`.

    Returns:
        `(contestant or None, record)`; the record's status is "ok", "wrong: <relative error>" or "x: <reason>".
    """
    try:
        contestant = prepare(name, problem.copy(), settings.microbatch)
        at_end.callback(contestant.close)
        if name in NO_SUM:
            return contestant, {"status": "ok"}
        start = time.perf_counter()
        result = contestant.step()
        first = time.perf_counter() - start  # engines look at a new loss and at new shapes
        error = truths[0](name).error(contestant.sums(result), contestant.bound)
        record = {"status": "ok", "relative_error": error, **contestant.facts}
        contestant.clear()
        if not record["relative_error"] <= TOLERANCE:
            wide = prepare(name, problem.double(), settings.microbatch)
            at_end.callback(wide.close)
            record["relative_error_float64"] = truths[1](name).error(wide.sums(wide.step()), wide.bound)
    except Exception as caught:  # noqa: BLE001  (a contestant may fail in any way; that is its result)
        return None, {"status": reason(caught)}
    record["first_step_seconds"] = first
    error = record.get("relative_error_float64", record["relative_error"])
    if not error <= TOLERANCE:
        return None, {**record, "status": f"wrong: {error:.2g}"}
    if first > settings.patience and (seconds := seconds_of_a_step(contestant)) > settings.patience:
        return None, {**record, "status": f"x: one step takes {seconds:.0f} s"}
    return contestant, record


def time_case(admitted: dict[str, Contestant], settings: Settings, say: Say) -> dict[str, dict[str, Any]]:
    """Time of each contestant, with ratios to the plain step of the same round."""

    def after(name: str) -> None:
        admitted[name].clear()
        say(f"time {name}")

    steps = {name: contestant.step for name, contestant in admitted.items()}
    seconds = interleaved(steps, settings.rounds, device=settings.device, after=after)
    return {name: summary(values, seconds[PLAIN]) for name, values in seconds.items()}


def spec(case: str, contestant: str, settings: Settings) -> dict[str, Any]:
    """What a worker process is told."""
    return {
        "case": case,
        "contestant": contestant,
        "quick": settings.quick,
        "threads": settings.threads,
        "microbatch": settings.microbatch,
        "device": settings.device,
    }


def memory_case(case: str, names: Sequence[str], settings: Settings, say: Say) -> dict[str, dict[str, Any]]:
    """Memory of each contestant, with the ratio of its peak to that of the plain step."""
    found = {}
    for name in names:
        found[name] = ask(spec(case, name, settings))
        say(f"memory {name}")
    base = found[PLAIN].get("peak_mib")
    for numbers in found.values():
        if base and "peak_mib" in numbers:
            numbers["ratio"] = numbers["peak_mib"] / base
    return found


def run_case(case: str, contestants: Sequence[str], settings: Settings, say: Say = lambda text: None) -> dict[str, Any]:
    """Everything about one case.

    Args:
        case: a name in ALL_CASES. contestants: names; the plain step is always among them.
        say: told what was done, for a progress bar.

    Returns:
        The case's record for the result file.
    """
    torch.set_num_threads(settings.threads)
    torch.backends.cudnn.allow_tf32 = False  # float32 for everybody, so that parity can be checked
    names = [PLAIN, *(name for name in dict.fromkeys(contestants) if name != PLAIN)]
    record: dict[str, Any] = {"title": ALL_CASES[case].title, "load_1min": round(os.getloadavg()[0], 2)}
    problem = ALL_CASES[case].problem(quick=settings.quick).to(settings.device)
    # Half of the samples are clipped and half are not: both are in what is compared.
    problem = replace(problem, clip_norm=statistics.median_low(Truth.of(problem.module, problem, ()).norms))
    record.update(problem.sizes(), clip_norm=problem.clip_norm)
    record.update(rounds=settings.rounds, microbatch=settings.microbatch)
    with warnings.catch_warnings(), ExitStack() as at_end:
        warnings.simplefilter("ignore")  # hooks on layers whose input needs no gradient, and the like
        both = truths(problem), truths(problem.double())
        admitted, results = {}, {}
        for name in names:
            contestant, results[name] = admit(name, problem, both, settings, at_end)
            if contestant is not None:
                admitted[name] = contestant
            say(f"parity {name}")
        if settings.rounds:
            for name, numbers in time_case(admitted, settings, say).items():
                results[name]["time"] = numbers
    if settings.memory:
        for name, numbers in memory_case(case, list(admitted), settings, say).items():
            results[name]["memory"] = numbers
    return {**record, "contestants": results}


def largest_batches(
    case: str, contestants: Sequence[str], settings: Settings, limit_mib: float, say: Say = lambda text: None
) -> dict[str, Any]:
    """The largest batch of each contestant whose allocated memory, model included, stays within a limit."""
    found = {}
    for name in contestants:
        size = microbatch_of(name, settings.microbatch)
        if size == "none":
            found[name] = ask({**spec(case, name, settings), "limit_mib": limit_mib, "largest_tried": LARGEST_TRIED})
        else:
            found[name] = {"status": f"x: any batch, in microbatches of {size}"}
        say(f"largest batch {name}")
    return {"case": case, "limit_mib": limit_mib, "microbatch": settings.microbatch, "contestants": found}
