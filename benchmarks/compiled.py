"""Compiled private steps, in one process: `python -m benchmarks.compiled --cases w1,w4`.

Each round takes, in turn: a step without privacy; the clipped sum, eager; the same compiled for all rows at once; a
private step (clipped sum, noise, ledger), eager; the same with `compile="auto"`, in microbatches of about an eighth of
the batch; and the noise alone. Ratios are medians over the rounds of the ratio within a round. Times are the best of
the rounds, as the machine may have other work. `pays_after` is the number of steps that save the time of compilation.
`rows_computed` is how many rows are computed for each one drawn, by the expected batch and the size of the compiled
microbatches: the mean over Poisson draws, whose last microbatch is padded.
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
from benchmarks.engines.contestants import plain
from benchmarks.engines.timing import interleaved
from dpfunc import clipping, compiled, sampling
from dpfunc.clipped import make_clipped_grad
from dpfunc.compiled import EAGER_STEPS, rows_at_once

RESULT = Path(__file__).parent / "results" / "compiled.json"
RECORDS, STEPS = 100_000, 100_000


def measure(name: str, rounds: int, quick: bool, whole_batch: bool) -> dict[str, Any]:
    """Times and ratios of one case."""
    problem = ALL_CASES[name].problem(quick=quick)
    step_without = plain(problem.copy()).step
    loss_fn, params = problem.functional()
    batch, size = (problem.inputs, problem.targets), problem.batch_size

    clip = clipping.Flat(problem.clip_norm)
    plan = dpfunc.Plan(sampling.Poisson(RECORDS, size / RECORDS), clip, 1.0, STEPS, 1e-6)
    eager_sum = make_clipped_grad(loss_fn, clip, engine=dpfunc.engines.auto())
    steps: dict[str, Callable[[], Any]] = {"plain": step_without, "eager sum": lambda: eager_sum(params, batch)}
    seconds: dict[str, float] = {}
    if whole_batch:
        compiled_sum = make_clipped_grad(
            loss_fn, clip, engine=dpfunc.engines.auto(), microbatch_size=size, compile=True
        )
        steps["compiled sum"] = lambda: compiled_sum(params, batch)
        seconds["compiled sum"] = timed(steps["compiled sum"])
    found: dict[str, Any] = {}
    for label, compile_ in (("eager step", False), ("auto step", "auto")):
        dp_step = dpfunc.make_dp_step(loss_fn, plan, compile=compile_, verify_batch=False)
        steps[label] = running(dp_step, params, batch)
        for _ in range(EAGER_STEPS):
            steps[label]()
        seconds[label] = timed(steps[label])
        found[label] = dp_step.compilation
    clipped, _ = eager_sum(params, batch)
    steps["noise"] = lambda: dpfunc.noise.add_gaussian(clipped, 1.0, key=dpfunc.secure_key())
    times = interleaved(steps, rounds)
    best = {label: min(values) for label, values in times.items()}
    gained = best["eager step"] - best["auto step"]
    return {
        "batch": size,
        "compiled": found["auto step"].compiled,
        "reason": found["auto step"].reason,
        "best_seconds": best,
        "ratio_to_plain": {label: ratio(values, times["plain"]) for label, values in times.items()},
        "ratio_to_eager_step": ratio(times["auto step"], times["eager step"]),
        "first_compiled_seconds": seconds,
        "pays_after": round(seconds["auto step"] / gained) if found["auto step"].compiled and gained > 0 else None,
    }


def running(dp_step: Any, params: Any, batch: Any) -> Callable[[], Any]:
    """A function that takes the next step of a run."""
    states = [dp_step.init(params, dpfunc.secure_key())]

    def step() -> None:
        states[0] = dp_step(params, batch, states[0]).state

    return step


def timed(step: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def padding(expected: int, rows: int) -> float:
    """Rows computed for each row drawn: `E[rows ceil(n / rows)] / E[n]` for n of a Poisson law."""
    law = torch.distributions.Poisson(float(expected))
    counts = torch.arange(4 * expected + 50, dtype=torch.float64)
    weights = law.log_prob(counts).exp()
    return float((weights * rows * (counts / rows).ceil()).sum() / expected)


def ratio(values: list[float], base: list[float]) -> float:
    """Median of the ratios within rounds."""
    return statistics.median(one / other for one, other in zip(values, base, strict=True))


def table(found: dict[str, Any]) -> Table:
    """Ratios to the step without privacy."""
    labels = ("eager sum", "compiled sum", "eager step", "auto step", "noise")
    result = Table("case", *labels, "auto / eager step", "compilation, s", "pays after")
    for name, case in found.items():
        ratios = [f"{case['ratio_to_plain'][label]:.2f}" if label in case["ratio_to_plain"] else "" for label in labels]
        last = f"{case['first_compiled_seconds']['auto step']:.0f}" if case["compiled"] else case["reason"]
        result.add_row(name, *ratios, f"{case['ratio_to_eager_step']:.2f}", last, str(case["pays_after"] or ""))
    return result


@click.command()
@click.option("--cases", default="w1,w4,w2n,gpt2,w3", callback=check_cases, help="Names with commas, or all.")
@click.option("--rounds", default=5, type=click.IntRange(1), show_default=True)
@click.option("--quick", is_flag=True, help="Tiny models.")
@click.option(
    "--whole-batch/--no-whole-batch", default=True, help="Compile the sum of the whole batch at once as well."
)
@click.option("--out", default=RESULT, type=click.Path(path_type=Path))
def main(cases: list[str], rounds: int, quick: bool, whole_batch: bool, out: Path) -> None:
    """Measure, print and write; cases that are in the file already and are not measured stay."""
    console = Console()
    result = json.loads(out.read_text()) if out.exists() else {"quick": quick, "cases": {}}
    result["rows_computed"] = {
        expected: {rows: round(padding(expected, rows), 3) for rows in (expected, rows_at_once(expected, None))}
        for expected in (16, 32, 64, 256)
    }
    for name in cases:
        with mock.patch.object(
            compiled, "_MAX_PADDING", 1.0
        ):  # the batches of these cases are small, and are not drawn
            result["cases"][name] = measure(name, rounds, quick, whole_batch)
        result["machine"] = report.machine(torch.get_num_threads(), "cpu")
        out.write_text(json.dumps(result, indent=1) + "\n")
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(table(result["cases"]))


if __name__ == "__main__":
    main()
