"""Epsilon by each accountant, its time, and its distance from the truth: `python benchmarks/accountant.py`.

Times are processor time of one process without caches, the best of several rounds, after the imports. The truth is an
inversion of the Laplace transform, or a closed form; it shares no code with the accountants. PRV and most of Renyi come
from opacus.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import scipy
from rich.console import Console
from rich.table import Table

from dpfunc.accounting import Ledger, calibrate_noise, epsilon
from dpfunc.accounting.accountant import cached_epsilon
from dpfunc.accounting.rdp import step_curve
from dpfunc.errors import DPFuncError
from dpfunc.types import Event

RESULT = Path(__file__).parent / "results" / "accountant.json"
ROUNDS = 5
SLOW = 5.0  # seconds; not repeated

# name: events, delta, adjacency, truth (None: not known to 1e-5)
CASES: dict[str, tuple[list[tuple[float, float, int]], float, Any, float | None]] = {
    "q=.01, sigma=1, T=1000": ([(0.01, 1.0, 1000)], 1e-5, "add_remove", 1.8282367),
    "the same, delta=1e-12": ([(0.01, 1.0, 1000)], 1e-12, "add_remove", 3.914298),
    "the same, delta=1e-30": ([(0.01, 1.0, 1000)], 1e-30, "add_remove", 9.3418956),
    "q=1e-4, sigma=1, T=1e7": ([(1e-4, 1.0, 10**7)], 1e-5, "add_remove", 1.6196342),
    "q=.2, sigma=.5, T=1e5, delta=1e-10": ([(0.2, 0.5, 10**5)], 1e-10, "add_remove", 18368.764),
    "q=1e-4, sigma=.3, T=1": ([(1e-4, 0.3, 1)], 1e-5, "add_remove", 0.5900464585),
    "q=1e-4, sigma=.3, T=1e4, delta=1e-12": ([(1e-4, 0.3, 10**4)], 1e-12, "add_remove", 29.39003),
    "three kinds": ([(0.001, 0.8, 1000), (0.1, 4.0, 50), (0.01, 1.2, 500)], 1e-5, "add_remove", 1.18141),
    "q=.01, sigma=.5, T=1000, replace-one": ([(0.01, 0.5, 1000)], 1e-5, "replace_one", None),
    "1,000 kinds, one step each": ([(0.01, 2 - 1.2 * i / 1000, 1) for i in range(1000)], 1e-5, "add_remove", None),
}


def best_time(compute: Callable[[], object]) -> float:
    """Processor seconds of the best round."""
    times: list[float] = []
    while len(times) < ROUNDS and (not times or times[-1] < SLOW):
        cached_epsilon.cache_clear()
        step_curve.cache_clear()
        start = time.process_time()
        compute()
        times.append(time.process_time() - start)
    return min(times)


def measure(ledger: Ledger, delta: float, method: str, truth: float | None) -> dict[str, Any]:
    """Epsilon, time and excess of one method; or why it has no answer."""
    try:
        found = epsilon(ledger, delta, method).epsilon
    except DPFuncError as error:
        return {"refused": str(error).split(".")[0][:80]}
    seconds = best_time(lambda: epsilon(ledger, delta, method))
    row: dict[str, Any] = {"epsilon": float(f"{found:.9g}"), "milliseconds": round(1e3 * seconds, 1)}
    return row if truth is None else row | {"relative_excess": float(f"{found / truth - 1:.2g}")}


def main() -> None:
    """Measure, write the result file, print the table."""
    machine = {
        "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 2), "python": platform.python_version(),
        "numpy": numpy.__version__, "scipy": scipy.__version__,
    }  # fmt: skip
    report: dict[str, Any] = {"machine": machine, "cases": {}, "calibration": {}}
    table = Table("case", *(f"{method} {what}" for method in ("tilted", "prv", "rdp") for what in ("epsilon", "ms")))
    for name, (events, delta, adjacency, truth) in CASES.items():
        ledger = Ledger(tuple(Event(*event) for event in events), adjacency)
        rows = {method: measure(ledger, delta, method, truth) for method in ("tilted", "prv", "rdp")}
        report["cases"][name] = {"delta": delta, "truth": truth} | rows
        cells = [str(row.get(key, "-")) for row in rows.values() for key in ("epsilon", "milliseconds")]
        table.add_row(name, *cells)
    for target, q, steps in ((0.1, 0.01, 1000), (1.0, 0.01, 1000), (8.0, 0.04, 2000)):

        def calibrate(target: float = target, q: float = q, steps: int = steps) -> float:
            return calibrate_noise(epsilon=target, delta=1e-5, sampling_prob=q, num_steps=steps)

        noise, seconds = calibrate(), best_time(calibrate)
        report["calibration"][f"epsilon={target:g}, q={q:g}, T={steps}"] = {
            "noise_multiplier": round(noise, 5),
            "milliseconds": round(1e3 * seconds, 1),
        }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
