"""What trust costs: `python -m benchmarks.overhead`.

Contestants are a step without privacy; an audit of one row; a whole clipped sum; and the first one of a new
`clipped_grad`, with its audits, where torch has run the model before. `audits` is the share of a whole step that audits
take on average, one row in 100 steps. `first` is the first step over a whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.engines.cases import ALL_CASES, CASES
from benchmarks.engines.contestants import clipped_grad_of, plain, problem_of
from benchmarks.engines.problem import Problem
from benchmarks.measure import Contestant, Spec, compete
from benchmarks.results import FOLDER, question

RESULT = FOLDER / "overhead.json"
HEADS = ("case", "plain step, ms", "private step, ms", "audits", "first step / later step")


def one_audit(problem: Problem) -> Callable[[], object]:
    """Compare one row of a step."""
    from dpfunc.engines import auto
    from dpfunc.engines.audit import Credited, audit
    from dpfunc.engines.microbatches import Audits

    loss_fn, params = problem.functional()
    batch, seed = (problem.inputs, problem.targets), torch.default_generator.get_state()
    per_sample = auto()(loss_fn, params, batch)
    positions, sq_norms = range(len(per_sample.losses_B)), per_sample.sq_norms()
    credited = Credited(loss_fn, params, batch, per_sample, sq_norms, positions, seed)
    return lambda: audit(credited, [0], Audits())


def contestant(spec: Spec) -> Contestant:
    problem, kind = problem_of(spec), spec["contestant"]
    if kind == "plain":
        return plain(problem)
    if kind == "audit":
        return Contestant(one_audit(problem))
    if kind == "whole":
        return Contestant(clipped_grad_of(problem, "auto"))
    steps = [clipped_grad_of(problem, "auto")]
    return Contestant(lambda: steps.pop()(), clear=lambda: steps.append(clipped_grad_of(problem, "auto")))


def measure(case: str, rounds: int, quick: bool) -> dict[str, Any]:
    from dpfunc.engines.microbatches import STEPS_IN

    spec = {"module": "benchmarks.overhead", "cases": "benchmarks.engines.cases", "case": case, "quick": quick}
    names = ("plain", "audit", "whole", "first")
    found = compete({name: {**spec, "device": "cpu", "contestant": name} for name in names}, rounds, base="plain")
    audit, whole, first = (found[name]["time"]["median_seconds"] for name in names[1:])
    size = ALL_CASES[case].problem(quick=quick).batch_size
    shares = {"audits": audit / whole / STEPS_IN, "first": first / whole}
    return {"title": ALL_CASES[case].title, "batch_size": size, "rounds": rounds, **shares, "contestants": found}


def rows(cases: dict[str, Any]) -> list[list[str]]:
    shown = []
    for name, case in cases.items():
        plain, whole = (1e3 * case["contestants"][who]["time"]["median_seconds"] for who in ("plain", "whole"))
        shown.append([name, f"{plain:.0f}", f"{whole:.0f}", f"{100 * case['audits']:.1f} %", f"{case['first']:.1f}"])
    return shown


main = question(__doc__, RESULT, ALL_CASES, measure, CASES)

if __name__ == "__main__":
    main()
