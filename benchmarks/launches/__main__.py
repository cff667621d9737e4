"""What a clipped sum launches, counted and not timed: `python -m benchmarks.launches`, in less than two minutes.

On a GPU most of a step is operations that Python launches one after the other. They are counted on the CPU, below all
levels, in a step after the first that computes no row alone: operations without views, bytes that they read and
write, floating-point operations of products, reads by the host, and calls by Python. Cases are small: counts of
operations depend little on sizes. Beside them are the step without privacy and the two modes of Opacus.

Each case has a limit for the operations and the reads of dpfunc, which tests/benchmarks/test_launches.py holds. The
command lowers a limit to what it counts, and never raises one: that is done by hand, in the result file, with a reason.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

import dpfunc
from benchmarks.engines import contestants
from benchmarks.engines.problem import Truth, trained
from benchmarks.engines.runner import Truths
from benchmarks.launches.cases import ALL_CASES, CASES, ROWS
from benchmarks.launches.counts import counts_of, launches_of, no_rows_alone
from benchmarks.measure import TOLERANCE, reason
from benchmarks.results import DOCS, FOLDER, fill, listed, markdown, printed, read, write

RESULT = FOLDER / "launches.json"
PAGE, ALL_COUNTS = "performance.md", "results/launches.md"  # of docs
LIMITED = ("operations", "further", "reads")


OURS = "dpfunc"
WHO = {"plain": "plain PyTorch", OURS: "dpfunc", "opacus-hooks": "Opacus hooks", "opacus-ghost": "Opacus ghost"}
# words of an error -> why a contestant takes no step
WHY_NOT = {
    "Parameter tying": "a parameter is used twice",
    "stack expects": "a parameter is used without samples on axis 0",
    "layer with buffers": "a layer has parameters and buffers",
    "'NoneType' object": "samples have no gradients",
    "wrong": "its sums are wrong",
}


def spec_of(name: str) -> dict[str, Any]:
    """What a contestant of a case is told; half of the samples are clipped."""
    spec = {"cases": "benchmarks.launches.cases", "case": name, "quick": False, "device": "cpu"}
    problem = contestants.problem_of(spec)
    return {**spec, "clip_norm": statistics.median_low(Truth.of(problem.module, problem, ()).norms)}


def counted(name: str, who: str, spec: Mapping[str, Any], truths: Truths) -> dict[str, Any]:
    """Counts of a contestant whose sums are right; or, as its status, why there are none."""
    try:
        contestant = contestants.contestant({**spec, "contestant": CASES[name].engine if who == OURS else who})
        result = [contestant.step() for _ in range(2)][1]  # the first step looks at the loss
        error = truths.error(who, contestant.sums(result), False) if contestant.sums else 0.0
        if not error <= TOLERANCE:
            return {"status": f"wrong: {error:.2g}"}
        return {"status": "ok", **counts_of(contestant)}
    except Exception as error:  # noqa: BLE001  (a contestant may fail in any way; that is its result)
        return {"status": f"x: {reason(error)}"}


def step_of(name: str, copies: int = 1) -> Callable[..., object]:
    """Function that computes a clipped sum of dpfunc, after the first two.

    Args:
        name: of the case. copies: of each of its rows.

    Returns:
        A function with the argument `checked`: as a step takes the sum, which has looked at parameters before.
    """
    problem, engine = ALL_CASES[name].problem(), getattr(dpfunc.engines, CASES[name].engine)()
    inputs, targets = (torch.cat([rows] * copies) for rows in (problem.inputs, problem.targets))
    loss_fn, params = problem.functional()
    clipped_grad = dpfunc.clipped.make_clipped_grad(loss_fn, dpfunc.clipping.Flat(problem.clip_norm), engine=engine)

    def step(checked: bool = False) -> object:
        if not checked:
            return clipped_grad(params, (inputs, targets))
        return clipped_grad.of_step(clipped_grad.at(0, None), params, (inputs, targets), mask_B=None, key=None)

    with no_rows_alone():
        for _ in range(2):
            step()
    return step


def further(name: str) -> int:
    """Operations that twice as many rows add.

    The same rows, since some numbers lose their digits by chance and are computed again.
    """
    with no_rows_alone():
        few, many = (len(launches_of(step_of(name, copies)).trace) for copies in (1, 2))
    return many - few


def measure(name: str) -> dict[str, Any]:
    """The record of a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and Opacus, about the models
        spec = spec_of(name)
        truths = Truths(contestants.problem_of(spec))
        found = {who: counted(name, who, spec, truths) for who in WHO}
        found[OURS]["further"] = further(name)
    base = found["plain"]
    for each in found.values():
        if each["status"] == "ok":
            each["ratio"] = each["operations"] / base["operations"]
    parameters = len(trained(contestants.problem_of(spec).module))
    return {"title": CASES[name].title, "rows": ROWS, "parameters": parameters, "contestants": found}


def lowered(record: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its limits: those of before, or what was counted now where that is less."""
    ours, before = record["contestants"][OURS], old.get("limits", {})
    return {**record, "limits": {kind: min(ours[kind], before.get(kind, math.inf)) for kind in LIMITED}}


def above(record: Mapping[str, Any]) -> list[str]:
    """Counts that are more than their limit."""
    ours = record["contestants"][OURS]
    return [f"{kind}: {ours[kind]} > {limit}" for kind, limit in record["limits"].items() if ours[kind] > limit]


# Tables.

HEADS = ("case", "trained tensors", *WHO.values(), f"{ROWS} more rows", "aim", "limit")
KINDS = {
    "operations": ("Operations", lambda one: one["operations"]),
    "bytes": ("MiB read and written", lambda one: one["read_mib"] + one["written_mib"]),
    "flops": ("Million floating-point operations", lambda one: one["mflop"]),
    "reads": ("Reads by the host", lambda one: one["reads"]),
    "calls": ("Calls by Python", lambda one: one["calls"]),
}


def cell(kind: str, one: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """A count, and its ratio to the plain step; or why there is none."""
    if one["status"] != "ok":
        return next((f"x: {why}" for words, why in WHY_NOT.items() if words in one["status"]), one["status"])
    number, first = (KINDS[kind][1](each) for each in (one, base))
    shown = f"{number:,.1f}" if isinstance(number, float) else f"{number:,}"
    return shown if one is base or kind == "reads" or not first else f"{shown} ({number / first:.1f})"


def cells(kind: str, record: Mapping[str, Any]) -> list[str]:
    found = record["contestants"]
    return [cell(kind, found[who], found["plain"]) for who in WHO]


def rows_of(cases: Mapping[str, Any]) -> list[list[str]]:
    shown = []
    for name, case in cases.items():
        aim, limit = CASES[name].aim, case["limits"]["operations"]
        last = f"{case['contestants'][OURS]['further']:,}", f"{aim:,}" if aim else "", f"{limit:,}"
        shown.append([case["title"], str(case["parameters"]), *cells("operations", case), *last])
    return shown


def tables(cases: Mapping[str, Any]) -> dict[str, str]:
    """The table of docs/performance.md."""
    return {"launches": markdown(HEADS, rows_of(cases))}


def page(report: Mapping[str, Any]) -> str:
    """The page with all counts."""
    parts = [
        f"## {title}\n\n"
        + markdown(("case", *WHO.values()), [[case["title"], *cells(kind, case)] for case in report["cases"].values()])
        for kind, (title, _) in KINDS.items()
    ]
    about = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return (
        f"""# What a clipped sum launches

Counts of one step with {ROWS} rows on a CPU, below all levels of torch.func, for the models of \
[performance](../performance.md#launches); in brackets the ratio to the step without privacy. `python -m \
benchmarks.launches` writes this page: {about}.

An operation is one that torch runs and that is no view. Each of its tensors is read once, and each result is written \
once; an operation that looks numbers up reads as many as it writes. Floating-point operations are those of products, \
convolutions, attention and recurrent layers. The host reads where it waits for a number of the device: with a GPU \
nothing is launched meanwhile. Calls are those of Python's functions and of built-in ones.

"""
        + "\n\n".join(parts)
        + "\n"
    )


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--cases", default="all", callback=lambda _, option, text: listed(text, CASES, CASES),
              help="Names with commas; other cases stay as they are in the file.")  # fmt: skip
@click.option("--out", default=RESULT, type=click.Path(path_type=Path, dir_okay=False), help="Counts and limits.")
@click.option("--docs", default=DOCS, type=click.Path(path_type=Path, file_okay=False), help="For the tables.")
def main(cases: list[str], out: Path, docs: Path) -> None:
    logging.disable(logging.WARNING)  # of Transformers, and how the engine computes them
    torch.set_num_threads(1)
    old = read(out).get("cases", {})
    found = dict(old)
    for name in track(cases, "Cases", console=Console(stderr=True)):
        found[name] = lowered(measure(name), old.get(name, {}))
    found = {name: found[name] for name in CASES if name in found}
    write(out, {"rows": ROWS, "cases": found})
    report = read(out)
    fill(docs / PAGE, tables(report["cases"]))
    (docs / ALL_COUNTS).write_text(page(report), "utf-8")
    printed(HEADS, rows_of(report["cases"]))
    if over := [f"{name}, {text}" for name, case in found.items() for text in above(case)]:
        click.echo("More than the limit: " + "; ".join(over), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
