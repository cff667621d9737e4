"""Interleaved rounds: every contestant once a round, in rotating order, so that a slow moment hits all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.engines.jax_peer import Elsewhere

Steps = Mapping[str, Callable[[], object]]


def seconds_of(step: Callable[[], object], device: str) -> float:
    """How long one call takes, by the clock of the process that takes it; on a GPU between two events on its stream."""
    gc.collect()  # outside of the time: hooks leave cycles behind that hold tensors
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    result = step()
    seconds = time.perf_counter() - start
    return result.seconds if isinstance(result, Elsewhere) else seconds


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of one round."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def interleaved(
    steps: Steps, rounds: int, *, device: str = "cpu", after: Callable[[str], object] = lambda name: None
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, after one round that warms up.

    Args:
        steps: name -> one step. after: called with the name after each step, outside of its time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()  # what is there now is not looked at again by the collections before each step
    try:
        for number in range(rounds + 1):
            for name in rotated(list(steps), number):
                taken = seconds_of(steps[name], device)
                if number:
                    seconds[name].append(taken)
                after(name)
    finally:
        gc.unfreeze()
    return seconds


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def summary(seconds: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of the seconds, and of the ratios to the plain step of the same round."""
    ratios = [mine / its for mine, its in zip(seconds, base, strict=True)]
    return {
        "median_seconds": statistics.median(seconds),
        "best_seconds": min(seconds),
        "seconds_quartiles": quartiles(seconds),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": quartiles(ratios),
    }
