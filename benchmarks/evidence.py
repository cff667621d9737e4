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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import binomtest, norm

from benchmarks.measure import ROOT
from benchmarks.results import FOLDER, write
from dpfunc.accounting import Ledger
from dpfunc.evidence import audit, replay
from dpfunc.rng import insecure_key
from dpfunc.types import Event

sys.path[:0] = [str(ROOT / "tests" / "_support")]
RESULT = FOLDER / "evidence.json"
CANARIES, ALPHA, DELTA = 300, 0.05, 1e-5


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

    found = {}
    for number, fault in enumerate(track(RUNS, "faults of runs", transient=True)):
        counts = [bool(audited(1000 * number + seed, *RUNS[fault]).exceeds) for seed in range(seeds)]
        found[fault] = f"{sum(counts)} of {seeds}"
    return found


def replays(seeds: int) -> dict[str, str]:
    """Loops with a fault that their replay finds, by what moves; without one, none."""
    from evidence_loops import FAULTS, init, make_step, records, step

    found = {}
    for fault, (loop, words) in track(({"none": (step, "")} | FAULTS).items(), "faults of loops", transient=True):
        results = [
            replay(make_step(), init, loop, records(seed), candidates=2, key=insecure_key(seed))
            for seed in range(seeds)
        ]
        counts = [any(words in moved for moved in result.moved) for result in results]
        found[fault] = f"{sum(counts)} of {seeds}"
    return found


def jobs(seeds: int) -> dict[str, str]:
    """Jobs of `dpfunc train` with a fault that their replay finds; without one, none. Four steps each."""
    import pytest
    from job_faults import JOB_FAULTS, finished

    from dpfunc.evidence._neighbours import Rows, compare
    from dpfunc.hf.trainer.trainer import DPTrainer
    from dpfunc.train._evidence import _JobLoop, _prepared

    found = {}
    honest = (DPTrainer.training_step, "")
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        prepared, _ = _prepared(finished(Path(name), patch), Path(name) / "again")
        data = Rows(tuple(prepared.records.units))
        for fault, (step, words) in track(({"none": honest} | JOB_FAULTS).items(), "faults of jobs", transient=True):
            patch.setattr(DPTrainer, "training_step", step)
            counts = [
                any(
                    words in moved
                    for moved in compare(_JobLoop(prepared, key, Path(name) / "again"), data, 4, 1)[0].moved
                )
                for key in map(insecure_key, range(100, 100 + seeds))
            ]
            found[fault] = f"{sum(counts)} of {seeds}"
    return found


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--seeds", default=20, show_default=True, type=click.IntRange(min=1), help="Of each fault.")
@click.option("--job-seeds", default=20, show_default=True, type=click.IntRange(min=1), help="Of each fault of a job.")
@click.option("--audits", default=400, show_default=True, type=click.IntRange(min=1), help="Of what holds.")
@click.option("--out", default=RESULT, show_default=True, type=click.Path(dir_okay=False, path_type=Path))
def main(seeds: int, job_seeds: int, audits: int, out: Path) -> None:
    """Measure, write the result file, print the tables."""
    warnings.simplefilter("ignore")  # keys that everybody knows, on data that are made up
    logging.disable(logging.WARNING)  # parameters of a run of one step do not change
    found = {"figures": figures(), "calibration": calibration(audits), "runs": power(seeds), "loops": replays(seeds)}
    found["jobs"] = jobs(job_seeds)
    write(out, found, digits=7)
    console = Console(width=120)
    for what, rows in found.items():
        table = Table(what, "found")
        for name, value in rows.items():
            table.add_row(name, str(value))
        console.print(table)


if __name__ == "__main__":
    main()
