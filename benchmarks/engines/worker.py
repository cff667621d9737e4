"""The memory of one contestant, in a process of its own: `python -m benchmarks.engines.worker '{"case": ...}'`."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines.cases import ALL_CASES
from benchmarks.engines.contestants import prepare, reason
from benchmarks.engines.memory import MIB, allocated, peak_resident
from benchmarks.engines.report import with_freed_memory_given_back

ROOT = Path(__file__).parents[2]
MARK = "result: "


def step_memory(spec: Mapping[str, Any], batch_size: int | None) -> dict[str, Any]:
    """Peak of one step over the built model, in MiB.

    With `batch_size` None it is the case's own, and a first step warms up; else the first step is measured.
    `prepared_mib` is what setting the contestant up keeps (copies of parameters); `total_mib` is model, batch,
    prepared and peak together. A contestant in a process of its own measures itself.
    """
    case, device = ALL_CASES[spec["case"]], spec["device"]
    built, model = allocated(lambda: case.problem(quick=spec["quick"], batch_size=batch_size).to(device), device)
    contestant, prepared = allocated(lambda: prepare(spec["contestant"], built, spec["microbatch"]), device)
    if contestant.memory is not None:
        try:
            return contestant.memory()
        finally:
            contestant.close()
    if batch_size is None:
        contestant.step()
        contestant.clear()
    _, used = allocated(contestant.step, device)
    numbers = {
        "peak_mib": used.peak,
        "prepared_mib": prepared.left,
        "total_mib": model.left + prepared.left + used.peak,
        "resident_mib": peak_resident(),
    }
    return {name: value / MIB for name, value in numbers.items()}


def largest_batch(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The largest batch whose total stays within `limit_mib`: doubling, then bisection to within 1/32.

    Returns:
        `largest_batch` (0 when not even one sample fits), its `total_mib`, and how many batches were tried.
    """
    totals: dict[int, float] = {0: 0.0}

    def fits(batch_size: int) -> bool:
        totals[batch_size] = step_memory(spec, batch_size)["total_mib"]
        return totals[batch_size] <= spec["limit_mib"]

    good, bad = 0, 1
    while bad <= spec["largest_tried"] and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 32):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return {"largest_batch": good, "total_mib": totals[good], "tried": len(totals) - 1}


def answer(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for, or the reason why there is none."""
    torch.set_num_threads(spec["threads"])
    gc.freeze()  # what imports made need not be looked at again by each collection
    try:
        result = largest_batch(spec) if "limit_mib" in spec else step_memory(spec, None)
    except Exception as error:  # noqa: BLE001  (a contestant may fail in any way; that is its result)
        return {"status": reason(error)}
    finally:
        gc.unfreeze()
    return {"status": "ok", **result}


def ask(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run `answer` in a new process."""
    command = [sys.executable, "-m", "benchmarks.engines.worker", json.dumps(spec)]
    # resident memory tells what a step takes only where freed memory goes back
    variables = with_freed_memory_given_back()
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("USDT")]
    last = said[-1] if said else "nothing was said; perhaps the system had no memory left"
    return {"status": f"x: the process ended with code {done.returncode}: {last[:150]}"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of contestants: only their results are read
    print(MARK + json.dumps(answer(json.loads(sys.argv[1]))))
