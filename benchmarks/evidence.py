"""What one-run audits and replays find, and how often they are wrong: `python -m benchmarks.evidence`.

Figures of the auditing module of JAX Privacy; the share of audits of what holds that refute it, with its 95 % interval
(Clopper and Pearson); faults of runs and of loops that are found, with 20 seeds each. Tables of faults:
tests/_support/evidence_loops.py.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import binomtest, norm

from benchmarks.measure import ROOT
from benchmarks.results import FOLDER, read, write
from dpfunc.accounting import Ledger
from dpfunc.evidence import audit, replay
from dpfunc.rng import insecure_key
from dpfunc.types import Event

sys.path[:0] = [str(ROOT / "tests" / "_support")]
RESULT = FOLDER / "evidence.json"
CANARIES, DELTA = 300, 1e-5


def figures() -> dict[str, Any]:
    """10,000 + 10,000 quantiles of N(0, 1) and N(shift, 1): bounds for (epsilon, delta), and if Gaussian."""
    scores = norm.ppf((np.arange(10_000) + 0.5) / 10_000)
    found = {shift: audit(scores + shift, scores, delta=1e-6, guesses="hull") for shift in (0, 1, 2, 4)}
    return {f"shift {shift}": [one.epsilon, one.epsilon_gaussian] for shift, one in found.items()}


def refuted(count: int, tell: Callable[[Any], Any], **options: Any) -> dict[str, Any]:
    """The share of audits of `tell(rng)`, scores and which of them were in, that refute the claim."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in track(range(count), "audits of what holds", transient=True):
        scores, present = tell(rng)
        wrong += bool(audit(scores[present], scores[~present], delta=DELTA, **options).exceeds)
    low, high = binomtest(wrong, count).proportion_ci(0.95)
    return {"refuted": wrong / count, "interval": [float(low), float(high)], "audits": count}


def gaussian(mu: float) -> Callable[[Any], Any]:
    """Scores of a Gaussian mechanism whose trade-off curve has this mu; 0: no canary is in."""

    def tell(rng: Any) -> Any:
        present = rng.random(CANARIES) < 0.5
        return rng.normal(size=CANARIES) + mu * present, present

    return tell


def calibration(count: int) -> dict[str, Any]:
    """Honest mechanisms at their claim."""
    claim = Ledger((Event(1.0, 1.0, 1),))
    return {
        "nothing is in, epsilon 0": refuted(count, gaussian(0.0), claim=0.0),
        "nothing is in, epsilon 0, hull": refuted(count, gaussian(0.0), claim=0.0, guesses="hull"),
        "Gaussian at its ledger": refuted(count, gaussian(1.0), claim=claim),
        "Gaussian at its ledger, guesses fixed": refuted(count, gaussian(1.0), claim=claim, guesses=[(50, 50)]),
    }


def power(seeds: int) -> dict[str, str]:
    """Runs with a fault that their audit refutes; without one, none."""
    from evidence_loops import RUNS, audited

    firsts = {fault: 1000 * number for number, fault in enumerate(RUNS)}
    return counted(RUNS, seeds, lambda fault, seed: bool(audited(firsts[fault] + seed, *RUNS[fault]).exceeds))


def replays(seeds: int) -> dict[str, str]:
    """Loops with a fault that their replay finds, by what moves; without one, none."""
    from evidence_loops import FAULTS, init, make_step, records, step

    faults = {"none": (step, "")} | FAULTS

    def found(fault: str, seed: int) -> bool:
        loop, words = faults[fault]
        moved = replay(make_step(), init, loop, records(seed), candidates=2, key=insecure_key(seed)).moved
        return any(words in what for what in moved)

    return counted(faults, seeds, found)


def jobs(seeds: int) -> dict[str, str]:
    """Jobs of `dpfunc train` with a fault that their replay finds; without one, none. Eight steps each."""
    import pytest
    from job_faults import JOB_FAULTS, finished

    from dpfunc.evidence.neighbours import Rows, compare
    from dpfunc.hf.trainer.trainer import DPTrainer
    from dpfunc.train._evidence import _JobLoop, _prepared

    faults = {"none": (DPTrainer.training_step, "")} | JOB_FAULTS
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name) / "again"
        prepared, _ = _prepared(finished(Path(name), patch), folder)
        data = Rows(tuple(prepared.records.units))

        def found(fault: str, seed: int) -> bool:
            step, words = faults[fault]
            patch.setattr(DPTrainer, "training_step", step)
            moved = compare(_JobLoop(prepared, insecure_key(100 + seed), folder), data, 8, 1).moved
            return any(words in what for what in moved)

        return counted(faults, seeds, found)


def counted(faults: Iterable[str], seeds: int, found: Callable[[str, int], bool]) -> dict[str, str]:
    """Number of seeds with which each fault is found."""
    counts = {}
    for fault in track(list(faults), "faults", transient=True):
        counts[fault] = f"{sum(found(fault, seed) for seed in range(seeds))} of {seeds}"
        print(f"{fault}: {counts[fault]}", flush=True)
    return counts


PARTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "figures": lambda seeds, audits: figures(),
    "calibration": lambda seeds, audits: calibration(audits),
    "runs": lambda seeds, audits: power(seeds),
    "loops": lambda seeds, audits: replays(seeds),
    "jobs": lambda seeds, audits: jobs(seeds),
}


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--seeds", default=20, show_default=True, type=click.IntRange(min=1), help="Of each fault.")
@click.option("--audits", default=400, show_default=True, type=click.IntRange(min=1), help="Of what holds.")
@click.option("--part", "parts", multiple=True, type=click.Choice([*PARTS]), help="All by default; others are kept.")
@click.option("--out", default=RESULT, show_default=True, type=click.Path(dir_okay=False, path_type=Path))
def main(seeds: int, audits: int, parts: tuple[str, ...], out: Path) -> None:
    """Measure, write the result file after each part, print the tables."""
    warnings.simplefilter("ignore")  # keys that everybody knows, on data that are made up
    logging.disable(logging.WARNING)  # parameters of a run of one step do not change
    found = {part: rows for part, rows in read(out).items() if part in PARTS}
    for part in parts or PARTS:
        found[part] = PARTS[part](seeds, audits)
        write(out, found, digits=7)
        table = Table(part, "found")
        for name, value in found[part].items():
            table.add_row(name, str(value))
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
