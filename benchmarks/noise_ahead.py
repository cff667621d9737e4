"""Gain of noise that a free core draws while gradients are computed: `python -m benchmarks.noise_ahead`.

Steps of one model in turn: with noise drawn after the sum, as where no core is free, and with one thread that draws it
ahead; torch computes with one thread less than there are cores. Both release the same bits, which is checked first.
Ratios are medians over rounds of the ratio within a round, and of the best rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from rich.console import Console
from rich.table import Table

import dpfunc
from benchmarks.engines import report
from benchmarks.engines.__main__ import check_cases
from benchmarks.engines.cases import ALL_CASES
from dpfunc.engines.numerics import accumulation_dtype
from dpfunc.noise.streams import free_cores, secure_normal

RESULT = Path(__file__).parent / "results" / "noise_ahead.json"


def stepper(name: str, quick: bool, steps: int) -> tuple[Callable[[int], dict[str, torch.Tensor]], int]:
    """A function that takes the next step of a run with a number of threads ahead; and the number of parameters."""
    problem = ALL_CASES[name].problem(quick=quick)
    loss_fn, params = problem.functional()

    sampler = dpfunc.sampling.Poisson(problem.batch_size, 1.0)
    plan = dpfunc.Plan(sampler, dpfunc.clipping.Flat(1.0), noise_multiplier=1.0, num_steps=steps, delta=1e-3)
    dp_step = dpfunc.make_dp_step(loss_fn, plan)
    state = [dp_step.init(params, key=dpfunc.secure_key())]

    def take(threads: int) -> dict[str, torch.Tensor]:
        with mock.patch("dpfunc.noise.streams.free_cores", return_value=threads):
            grads, state[0], _ = dp_step(params, (problem.inputs, problem.targets), state[0])
        return grads

    def same(threads: int) -> dict[str, torch.Tensor]:
        dpfunc.state.replay(state[0])
        before = state[0]
        grads = take(threads)
        state[0] = dpfunc.state.replay(before)
        return grads

    first, second = same(0), same(1)
    if not all(torch.equal(first[grad], second[grad]) for grad in first):
        raise RuntimeError(f"{name}: noise drawn ahead is other noise.")
    return take, sum(param.numel() for param in params.values())


def measure(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Seconds of both kinds of steps, of the noise alone, and the ratio."""
    take, numbers = stepper(name, quick, 2 * rounds + 4)
    like = {"w": torch.zeros(numbers, dtype=accumulation_dtype(torch.float32))}
    times: dict[str, list[float]] = {"after": [], "ahead": [], "noise alone": []}
    kinds: dict[str, Callable[[], object]] = {
        "after": lambda: take(0),
        "ahead": lambda: take(1),
        "noise alone": lambda: secure_normal(dpfunc.insecure_key(0), like),
    }
    for number in range(rounds + 1):
        for kind, run in kinds.items():
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                times[kind].append(time.perf_counter() - start)
    ratios = [ahead / after for ahead, after in zip(times["ahead"], times["after"], strict=True)]
    return {
        "parameters": numbers,
        "rounds": rounds,
        "seconds": {kind: round(statistics.median(values), 5) for kind, values in times.items()},
        "best_seconds": {kind: round(min(values), 5) for kind, values in times.items()},
        "ratio": round(statistics.median(ratios), 3),
        "best_ratio": round(min(times["ahead"]) / min(times["after"]), 3),
    }


@click.command(help=__doc__.splitlines()[0])
@click.option("--cases", default="w1,w2n,w3", callback=check_cases, help="Names with commas.", show_default=True)
@click.option("--rounds", default=7, type=click.IntRange(1), show_default=True)
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures.")
@click.option("--out", default=RESULT, type=click.Path(dir_okay=False, path_type=Path), show_default=True)
def main(cases: list[str], rounds: int, quick: bool, out: Path) -> None:
    """Measure, print and write."""
    torch.set_num_threads(max(1, free_cores(on_cpu=False)))
    found = {name: measure(name, rounds, quick) for name in cases}
    shown = Table("case", "parameters", "noise alone, ms", "after, ms", "ahead, ms", "ratio", "of the best")
    for name, case in found.items():
        times = [f"{case['best_seconds'][kind] * 1e3:.1f}" for kind in ("noise alone", "after", "ahead")]
        shown.add_row(name, f"{case['parameters']:.2g}", *times, f"{case['ratio']:.2f}", f"{case['best_ratio']:.2f}")
    Console().print(shown)
    machine = report.machine(torch.get_num_threads(), "cpu")
    out.write_text(json.dumps({"machine": machine, "quick": quick, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
