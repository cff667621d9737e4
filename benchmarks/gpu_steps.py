"""Steps on a GPU by precision and batch size, with time, memory and operations: `python -m benchmarks.gpu_steps`.

One contestant after the other in one process, on the same weights and rows: a GPU that does nothing else is as fast for
one as for the next, and its allocator counts exactly. Sums of the smallest batch are compared with single samples in
float32 first. Combinations come in the order of what one wants to know first, and the file is written after each.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.engines import contestants
from benchmarks.engines.cases import ALL_CASES
from benchmarks.engines.contestants import WHOLE_DEVICE, WHOLE_DPFUNC, WHOLE_PLAIN
from benchmarks.engines.problem import Problem, Truth
from benchmarks.engines.runner import Truths
from benchmarks.launches.counts import launches_of, no_rows_alone
from benchmarks.measure import MIB, TOLERANCE, allocated, reason, timed
from benchmarks.results import FOLDER, listed, markdown, printed, write

RESULT = FOLDER / "gpu_steps.json"
BATCHES = (8, 64, 256)
ROUNDS, ROUND_SECONDS, PATIENCE = 7, 2.0, 2.0
WHO = {
    "plain": "plain", "auto": "dpfunc", "opacus-hooks": "Opacus hooks", "opacus-ghost": "Opacus ghost",
    WHOLE_PLAIN: "whole plain", WHOLE_DPFUNC: "whole dpfunc, secure noise", WHOLE_DEVICE: "noise of the device",
}  # fmt: skip
# the most that a clipped sum may take of the plain step, and a whole step of the clipped sum
CASES = {"mnist": 2.0, "llama-1b": 1.05, "gpt2-124m": 1.5, "vit-b": 1.5, "resnet18-256": None}
WHOLE_LIMIT = 1.1


@dataclass(frozen=True)
class Precision:
    """How products are computed.

    Args:
        tf32: float32 products with shortened factors. autocast: the model runs under autocast to bfloat16.
        tolerance: relative error of sums, against float32.
    """

    tf32: bool = False
    autocast: bool = False
    tolerance: float = TOLERANCE


# Differences that sums may have: those of float32, of 10 bits and of 8 bits over a whole network.
PRECISIONS = {
    "float32": Precision(tolerance=1e-3), "bfloat16": Precision(autocast=True, tolerance=0.2),
    "tf32": Precision(tf32=True, tolerance=0.02),
}  # fmt: skip


class Cast(nn.Module):
    """A module under autocast to bfloat16, whose output is float32 again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return self.inner(inputs).float()


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Float32 products with or without TF32, in here."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        with cudnn.flags(cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic, allow_tf32=tf32):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def largest(case: str, quick: bool) -> Problem:
    """The problem of a case with the rows of all batches: to draw the weights of a large model takes long."""
    return ALL_CASES[case].problem(quick=quick, batch_size=max(BATCHES))


def problem_of(case: str, precision: Precision, batch_size: int, device: str, quick: bool) -> Problem:
    """The first rows of a case on a device, and a copy of its model."""
    whole = largest(case, quick)
    few = replace(whole, inputs=whole.inputs[:batch_size], targets=whole.targets[:batch_size]).copy().to(device)
    return replace(few, module=Cast(few.module).train()) if precision.autocast else few


@cache
def clip_norm_of(case: str, device: str, quick: bool) -> float:
    """The median norm of the smallest batch in float32: half of its samples are clipped."""
    problem = problem_of(case, PRECISIONS["float32"], min(BATCHES), device, quick)
    return statistics.median_low(Truth.of(problem.module, problem, ()).norms)


@cache
def truths_of(case: str, device: str, quick: bool) -> Truths:
    """What is right for the smallest batch: single samples in float32."""
    problem = problem_of(case, PRECISIONS["float32"], min(BATCHES), device, quick)
    return Truths(replace(problem, clip_norm=clip_norm_of(case, device, quick)))


def times_of(contestant: contestants.Contestant, device: str) -> list[float]:
    """Seconds of steps: of `ROUNDS`, or of fewer if they are long."""
    found: list[float] = []
    while len(found) < ROUNDS and (len(found) < 2 or sum(found) < ROUND_SECONDS):
        found.append(timed(contestant.step, device)["seconds"])
        contestant.clear()
    return found


def measured(who: str, problem: Problem, precision: Precision, truths: Truths | None, device: str) -> dict[str, Any]:
    """Time, memory and operations of a contestant; or, as its status, why there are none."""
    found: dict[str, Any] = {"status": "ok"}
    try:
        contestant = contestants.contestant_of(who, problem.copy())
        result = contestant.step()
        if truths is not None and contestant.sums is not None:
            prefix = "inner." if precision.autocast else ""
            sums = {name.removeprefix(prefix): each for name, each in contestant.sums(result).items()}
            found["relative_error"] = error = truths.error(who, sums, False)
            if not error <= precision.tolerance:
                return {**found, "status": f"wrong: {error:.2g}"}
        del result
        contestant.clear()
        if (seconds := timed(contestant.step, device)["seconds"]) > PATIENCE:
            return {**found, "status": f"x: a step takes {seconds:.1f} s"}
        contestant.clear()
        with no_rows_alone():
            _, (peak, _) = allocated(contestant.step, device)
            contestant.clear()
            found["operations"] = len(launches_of(contestant.step).trace)
            contestant.clear()
            found["seconds"] = statistics.median(times_of(contestant, device))
        found["peak_mib"] = peak / MIB
    except Exception as error:  # noqa: BLE001  (a contestant may fail in any way; that is its result)
        return {**found, "status": f"x: {reason(error)}"}
    return found


def release(device: str) -> None:
    """Give back what a contestant held."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def row(case: str, name: str, batch_size: int, device: str, quick: bool) -> dict[str, Any]:
    """All contestants of a case in a precision and a batch size; no other one where the plain step takes too long."""
    precision, found = PRECISIONS[name], {}
    with warnings.catch_warnings(), products(precision.tf32):
        warnings.simplefilter("ignore")  # of torch and Opacus, about the models
        with products(tf32=False):
            clip_norm = clip_norm_of(case, device, quick)
            truths = truths_of(case, device, quick) if batch_size == min(BATCHES) else None
        problem = replace(problem_of(case, precision, batch_size, device, quick), clip_norm=clip_norm)
        for who in WHO:
            found[who] = measured(who, problem, precision, truths, device)
            release(device)
            if who == "plain" and found[who]["status"] != "ok":
                break
    return {"case": case, "title": ALL_CASES[case].title, "precision": name, "rows": batch_size, "contestants": found}


HEADS = ("ms (MiB; operations)", "precision", "rows", *WHO.values(), "dpfunc / plain", "whole / clipped sum")


def cell(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    if one["status"] != "ok":
        return one["status"].partition(". ")[0]
    return f"{1e3 * one['seconds']:,.1f} ({one['peak_mib']:,.0f}; {one['operations']:,})"


def ratio(found: Mapping[str, Any], who: str, base: str, limit: float | None) -> str:
    """Time of a contestant over that of another one, and the most that it may be."""
    if any(found.get(each, {}).get("status") != "ok" for each in (who, base)):
        return ""
    shown = f"{found[who]['seconds'] / found[base]['seconds']:.2f}"
    return shown if limit is None else f"{shown} (at most {limit:g})"


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table: a line for each case, precision and batch size."""
    shown = []
    for each in rows:
        found = each["contestants"]
        ratios = ratio(found, "auto", "plain", CASES[each["case"]]), ratio(found, WHOLE_DEVICE, "auto", WHOLE_LIMIT)
        shown.append(
            [each["title"], each["precision"], str(each["rows"]), *(cell(found.get(who)) for who in WHO), *ratios]
        )
    return shown


def table(report: Mapping[str, Any]) -> str:
    return markdown(HEADS, lines(report.get("rows", [])))


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--cases", default="all", callback=lambda _, option, text: listed(text, CASES, CASES))
@click.option("--precisions", default="all", callback=lambda _, option, text: listed(text, PRECISIONS, PRECISIONS))
@click.option("--batches", default=",".join(map(str, BATCHES)), help="Numbers of rows, with commas.",
              callback=lambda _, option, text: [int(size) for size in listed(text, [*map(str, BATCHES)])])  # fmt: skip
@click.option("--seconds", default=450.0, help="No combination begins later than this.")
@click.option("--device", default="cuda", type=click.Choice(["cpu", "cuda"]))
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path, dir_okay=False))
def main(
    cases: list[str], precisions: list[str], batches: list[int], seconds: float, device: str, quick: bool, out: Path
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("no GPU is there: name another --device.")
    torch.set_num_threads(1)
    end, rows, left_out = time.monotonic() + seconds, [], []
    for size, precision, case in product(batches, precisions, cases):
        if time.monotonic() > end:
            left_out.append(f"{case}, {precision}, {size} rows")
            continue
        rows.append(row(case, precision, size, device, quick))
        printed(HEADS, lines(rows[-1:]), width=180)
        write(out, {"quick": quick, "rows": rows, "left_out": left_out}, device=device)
    write(out, {"quick": quick, "rows": rows, "left_out": left_out}, device=device)
    Console().print(f"Written to {out}")


if __name__ == "__main__":
    main()
