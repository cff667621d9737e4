"""Epsilon by each accountant, its time, and its distance from the truth: `python -m benchmarks.accountant`.

Times are processor time of one process without caches, the best of several rounds, after the imports. The truth is an
inversion of the Laplace transform, or a closed form; it shares no code with the accountants. PRV and most of Renyi come
from opacus.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.measure import timed
from benchmarks.results import FOLDER, printed, write
from dpfunc.accounting import Ledger, calibrate_noise, epsilon
from dpfunc.accounting._rdp import step_curve
from dpfunc.accounting.accountant import cached_epsilon
from dpfunc.errors import DPFuncError
from dpfunc.types import Event

METHODS = ("tilted", "prv", "rdp")
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
CALIBRATED = ((0.1, 0.01, 1000), (1.0, 0.01, 1000), (8.0, 0.04, 2000))  # epsilon, q, T


def best_milliseconds(compute: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < ROUNDS and (not times or times[-1] < SLOW):
        cached_epsilon.cache_clear()
        step_curve.cache_clear()
        times.append(timed(compute)["cpu_seconds"])
    return round(1e3 * min(times), 1)


def measure(ledger: Ledger, delta: float, method: str, truth: float | None) -> dict[str, Any]:
    """Epsilon, time and excess of one method; or why it has no answer."""
    try:
        found = epsilon(ledger, delta, method).epsilon
    except DPFuncError as error:
        return {"refused": str(error).split(".")[0][:80]}
    row = {"epsilon": found, "milliseconds": best_milliseconds(lambda: epsilon(ledger, delta, method))}
    return row if truth is None else row | {"relative_excess": found / truth - 1}


def calibration(target: float, q: float, steps: int) -> dict[str, float]:
    """The noise of a budget, and the time that it takes to find it."""
    calibrate = lambda: calibrate_noise(epsilon=target, delta=1e-5, sampling_prob=q, num_steps=steps)
    return {"noise_multiplier": round(calibrate(), 5), "milliseconds": best_milliseconds(calibrate)}


def main() -> None:
    cases: dict[str, Any] = {}
    for name, (events, delta, adjacency, truth) in CASES.items():
        ledger = Ledger(tuple(Event(*event) for event in events), adjacency)
        rows = {method: measure(ledger, delta, method, truth) for method in METHODS}
        cases[name] = {"delta": delta, "truth": truth} | rows
    calibrated = {f"epsilon={e:g}, q={q:g}, T={steps}": calibration(e, q, steps) for e, q, steps in CALIBRATED}
    write(FOLDER / "accountant.json", {"cases": cases, "calibration": calibrated}, digits=9)
    keys = [(method, key) for method in METHODS for key in ("epsilon", "milliseconds")]
    rows = [[name, *(case[method].get(key, "-") for method, key in keys)] for name, case in cases.items()]
    printed(("case", *(f"{method} {key}" for method, key in keys)), rows, width=160)


if __name__ == "__main__":
    main()
