"""The command `dpfunc tune`; what it needs is imported when it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpfunc.accounting import RunCount
from dpfunc.accounting.selection import SHAPES
from dpfunc.cli.output import json_option, listed, print_rows
from dpfunc.cli.train import FILE, importing, keys_of_the_file, report, say, without_noise
from dpfunc.errors import InvalidArgument

if TYPE_CHECKING:
    from dpfunc.train.candidates import Candidate
    from dpfunc.train.grid import Trial


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("config", type=FILE)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--public", type=FILE, help="Compare on this public table, with the noise of the private run: no cost.")
@click.option("--private", is_flag=True, help="Compare on a part of the private table: the budget pays for all runs.")
@click.option("--grid", multiple=True, help="key=value,value: learning_rate, batch_size, steps or rank. Public.")
@click.option("--factors", help="Of the learning rate of the job or its recipe. [default: 0.3,1,3]")
@click.option("--mean-runs", "--mean_runs", type=float, help="With --private: expected number of runs.")
@click.option(
    "--runs", type=click.Choice([*SHAPES]), default="geometric", show_default=True,
    help="With --private: distribution of the number of runs.",
)  # fmt: skip
@click.option(
    "--score-noise", "--score_noise", type=float,
    help="With --private: standard deviation of the noise of a score, in held-out records.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), help="With --public: new job file. [default: CONFIG.tuned.yaml]"
)
@click.option("--dry-run", "--dry_run", is_flag=True, help="Print the plan of the search; train and write nothing.")
@click.option("--resume", is_flag=True, help="With --private: go on with an interrupted search in output_dir.")
@click.option(
    "--insecure-seed", "--insecure_seed", type=click.IntRange(min=0),
    help="A guessable key, to repeat a search: for tests and public data.",
)  # fmt: skip
@json_option
def tune(
    config: Path, flags: tuple[str, ...], public: Path | None, private: bool, grid: tuple[str, ...],
    factors: str | None, mean_runs: float | None, runs: str, score_noise: float | None, out: Path | None,
    dry_run: bool, resume: bool, insecure_seed: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Search the learning rate, and what else --grid names, of the job in CONFIG (YAML).

    With --public nothing private is compared: each candidate is trained once on public records, and the best values are
    written into a new job file for `dpfunc train`. With --private dp_epsilon and dp_delta are the budget of the whole
    search; the best of a random number of runs is released, and its values, and nothing of the others.

    Every key of CONFIG is a flag as well, as for `dpfunc train`.

    Example: dpfunc tune job.yaml --public public.jsonl

    Example: dpfunc tune job.yaml --private --mean-runs 8 --score-noise 5 --dry-run
    """
    if (public is not None) == private:
        raise click.UsageError("Expected either --public FILE or --private.")
    _check_options(private, {"--mean-runs": mean_runs, "--score-noise": score_noise, "--resume": resume or None}, out)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidArgument("Expected one process for a search, got several (WORLD_SIZE): start it without torchrun.")
    values, trials = _read(config, flags, grid, factors)
    dry_run = dry_run or trials[0].job.privacy.dp_dry_run
    with keys_of_the_file(), without_noise(), report(as_json, None) as shown:
        tell = partial(say, shown)
        if public is not None:
            target = config.with_suffix(".tuned.yaml") if out is None else out
            shown["search"] = _search_public(values, trials, public, target, dry_run, insecure_seed, tell)
        else:
            count = RunCount(mean_runs or 0.0, SHAPES[runs])
            _search_private(trials, count, score_noise or 0.0, dry_run, resume, insecure_seed, shown, tell)


def _check_options(private: bool, only_private: Mapping[str, object], out: Path | None) -> None:
    """Check that the options are those of the kind of search."""
    required = ("--mean-runs", "--score-noise")
    for name, value in only_private.items():
        if private and value is None and name in required:
            raise click.UsageError(
                f"Missing option '{name}'. It decides what a search costs, so it has no default: e.g. --mean-runs 8, "
                "and a --score-noise of 2 % of the held-out records. --dry-run shows the cost."
            )
        if not private and value is not None:
            raise click.UsageError(f"Expected {name} with --private only.")
    if private and out is not None:
        raise click.UsageError("Expected --out with --public only: a private search writes into output_dir.")


def _read(
    config: Path, flags: tuple[str, ...], grid: Sequence[str], factors: str | None
) -> tuple[dict[str, Any], tuple[Trial, ...]]:
    """The values of the job, and the combinations of the grid over it."""
    with importing():
        from dpfunc.train import config_file
        from dpfunc.train import grid as grids
    given, values = config_file.parse_flags(flags), config_file.read_yaml(config)
    chosen = grids.trials(values, given, grids.parse_grid(grid, factors))
    return config_file.override(values, given), chosen


def _search_public(
    values: dict[str, Any], trials: Sequence[Trial], public: Path, out: Path, dry_run: bool, insecure_seed: int | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Compare the candidates on public records, and write the job of the best one."""
    import yaml
    from rich.console import Console
    from rich.progress import track

    from dpfunc.train.candidates import MEANING
    from dpfunc.train.public_search import prepare_public, run_public, tuned

    if out.exists():
        raise InvalidArgument(f"Expected a new file, got --out {out}, which exists.")
    search = prepare_public(trials, public, shows=True)
    there, held_out = len(search.records.train), len(search.records.evaluation)
    tell(f"{there} public records to train on (the private run has {search.size}), {held_out} to compare on")
    if there < search.size:
        tell(
            "Fewer public records than private ones: batches and noise are those of the private run, but records are "
            "seen more often, so the best values for few steps may be missed."
        )
    scores: list[float] = []
    if not dry_run:
        found, count = run_public(search, insecure_seed), len(search.candidates)
        scores = [*track(found, "public search", total=count, console=Console(file=sys.stderr))]
    rows = _rows(search.candidates, scores)
    print_rows("Candidates", [*rows[0]], [tuple(f"{value:.4g}" for value in row.values()) for row in rows])
    if dry_run:
        tell("Nothing was trained, written or spent.")
        return {"candidates": rows, "best": None, "out": None}
    best = max(range(len(scores)), key=scores.__getitem__)
    chosen = search.candidates[best]
    job = chosen.prepared.job
    out.write_text(yaml.safe_dump(tuned(values, job), sort_keys=False, allow_unicode=True), "utf-8")
    tell(f"score: {MEANING[job.task]}, divided by their number; one run each, on public records: nothing was spent.")
    tell(f"Best: {listed(chosen.values)}. Train with: dpfunc train {out}")
    return {"candidates": rows, "best": best, "out": str(out)}


def _rows(candidates: Sequence[Candidate], scores: Sequence[float]) -> list[dict[str, float]]:
    """Values, noise and, after training, score of each candidate."""
    rows = [
        {**each.values, "noise_multiplier": each.prepared.job.privacy.dp_noise_multiplier or 0.0} for each in candidates
    ]
    return [{**row, "score": score} for row, score in zip(rows, scores, strict=True)] if scores else rows


def _search_private(
    trials: Sequence[Trial], count: RunCount, score_noise: float, dry_run: bool, resume: bool,
    insecure_seed: int | None, shown: dict[str, Any], tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Do a private search, or show its plan."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from dpfunc.accounting.record import NOT_COVERED, RECORD_FILE
    from dpfunc.train import private_search

    private_search.check_search_folder(trials[0].job, resume)
    search = private_search.prepare_search(trials, count, score_noise, shows=True)
    for line in private_search.search_lines(search):
        tell(line)
    if dry_run:
        tell("Nothing was trained, written or spent.")
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
            # No total: it would tell the number of runs, which is secret.
            progress.add_task(f"private search, {search.runs.mean:g} runs on average", total=None)
            outcome = private_search.run_search(search, resume=resume, insecure_seed=insecure_seed)
    except KeyboardInterrupt:
        click.echo(f"\n{private_search.interrupted_search(search.job)}", err=True)
        raise
    record, folder = outcome.record, search.job.output_dir
    shown["record"] = json.loads(record.to_json())
    tell(f"Spent by the whole search: epsilon={record.epsilon:.4g} at delta={record.delta:g}, one record protected.")
    if insecure_seed is not None:
        tell(f"BUT anybody can guess the noise: --insecure-seed {insecure_seed}. Nothing is protected.")
    if record.chosen is None or record.chosen_score is None:
        tell(f"No model was released: {outcome.nothing}.")
    else:
        noise = f"with noise of standard deviation {record.score_noise:g}"
        tell(f"Best: {listed(record.candidates[record.chosen])}; score {record.chosen_score:.4g}, {noise}.")
        tell(f"Saved: {folder}/model. The other runs were deleted.")
    tell(f"Accounting: {folder}/{RECORD_FILE}.")
    not_covered = (*private_search.NOT_COVERED_BY_A_SEARCH, *NOT_COVERED[:2])
    tell(f"Not covered by epsilon: {'; '.join(not_covered)}.")
