"""How much memory a step needs: the exact peak of torch's allocator, and the process's resident memory beside it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch.autograd.profiler import profile

MIB = 2**20
T = TypeVar("T")


class Allocated(NamedTuple):
    """Bytes over what was allocated at the start: the largest value while a function ran, and what it left."""

    peak: int
    left: int


def _on_cpu(function: Callable[[], T]) -> tuple[T, Allocated]:
    # The profiler reports each allocation and each release with its size; releases of what was there before are not
    # reported, so the running sum starts at 0 and never goes below.
    with profile(use_cpu=True, profile_memory=True) as profiler:
        result = function()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak = running = 0
    for event in events:
        running += event.nbytes()
        peak = max(peak, running)
    return result, Allocated(peak, running)


def _on_cuda(function: Callable[[], T]) -> tuple[T, Allocated]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return result, Allocated(torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before)


def allocated(function: Callable[[], T], device: str = "cpu") -> tuple[T, Allocated]:
    """Run a function; its result, and what it allocated through torch.

    Memory that libraries take without torch's allocator is not seen; `peak_resident` sees it, with everything else.
    """
    gc.collect()
    return _on_cuda(function) if device.startswith("cuda") else _on_cpu(function)


def peak_resident() -> int:
    """The largest resident memory of this process so far, in bytes (0 where the system does not tell).

    Not `getrusage`: that starts from the size of the process that started this one.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
