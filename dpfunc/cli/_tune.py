"""The command `dpfunc tune`; what it needs is imported when it runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpfunc.accounting import RunCount
from dpfunc.accounting.record import listed
from dpfunc.accounting.selection import SHAPES
from dpfunc.cli._output import Report, json_option, print_rows, reporting
from dpfunc.cli._train import FILE, FLAGS_OF_A_JOB, check_new, importing, keys_of_the_file, seed_option
from dpfunc.errors import InvalidArgument

if TYPE_CHECKING:
    from dpfunc.train._search import Search

_NOTHING = "Nothing was trained, written or spent."
_FILE, _THERE = click.Path(path_type=Path), click.Path(exists=True, path_type=Path)
_SHAPE = click.Choice([*SHAPES])


@click.command(context_settings=FLAGS_OF_A_JOB)
@click.argument("config", type=FILE)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--public", type=_THERE, help="Compare on this public table or folder, with the private run's noise.")
@click.option("--private", is_flag=True, help="Compare on a part of the private table: the budget pays for all runs.")
@click.option("--grid", multiple=True, help="key=value,value: learning_rate, batch_size, steps or rank. Public.")
@click.option("--factors", help="Of the learning rate of the job or its recipe. [default: 0.3,1,3]")
@click.option("--mean-runs", "--mean_runs", type=float, help="With --private: expected number of runs.")
@click.option("--runs", type=_SHAPE, default="geometric", help="With --private: of the number of runs.")
@click.option("--score-noise", "--score_noise", type=float, help="With --private: noise of a score, in records.")
@click.option("--out", type=_FILE, help="With --public: new job file. [default: CONFIG.tuned.yaml]")
@click.option("--dry-run", "--dry_run", is_flag=True, help="Print the plan of the search; train and write nothing.")
@click.option("--resume", is_flag=True, help="With --private: go on with an interrupted search in output_dir.")
@seed_option
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
    _check_options(public, private, {"--mean-runs": mean_runs, "--score-noise": score_noise}, out, resume)
    with importing():
        from dpfunc.train import _config_file as config_file
    given, values = config_file.parse_flags(flags), config_file.read_yaml(config)
    found = config_file.trials(values, given, config_file.parse_grid(grid, factors))
    job, _ = found[0]
    dry_run = dry_run or job.privacy.dp_dry_run
    with keys_of_the_file(), importing(), reporting(as_json) as report:
        from dpfunc.train._search import check_search_folder, prepare_search

        if public is not None:
            target = config.with_suffix(".tuned.yaml") if out is None else out
            check_new(target)
            search = prepare_search(found, public=public, shows=True)
            _search_public(search, config_file.override(values, given), target, dry_run, insecure_seed, report)
        else:
            check_search_folder(job, resume)
            count = RunCount(mean_runs or 0.0, SHAPES[runs])
            search = prepare_search(found, runs=count, score_noise=score_noise or 0.0, shows=True)
            _search_private(search, dry_run, resume, insecure_seed, report)


def _check_options(
    public: Path | None, private: bool, costs: dict[str, float | None], out: Path | None, resume: bool
) -> None:
    """Check that all options are of one of the two kinds of search, and that those of its cost are there."""
    if (public is not None) == private:
        raise click.UsageError("Expected either --public FILE or --private.")
    for name, value in costs.items():
        if (value is None) == private:
            missing = (
                f"Missing option '{name}'. It decides what a search costs, so it has no default: e.g. --mean-runs 8, "
                "and a --score-noise of 2 % of the held-out records. --dry-run shows the cost."
            )
            raise click.UsageError(missing if private else f"Expected {name} with --private only.")
    if private and out is not None:
        raise click.UsageError("Expected --out with --public only.")
    if resume and not private:
        raise click.UsageError("Expected --resume with --private only.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidArgument("Expected one process for a search, got several (WORLD_SIZE): start it without torchrun.")


def _search_public(
    search: Search, values: dict[str, Any], out: Path, dry_run: bool, insecure_seed: int | None, report: Report
) -> None:
    """Compare the candidates on public records, and write the job of the best one."""
    import yaml
    from rich.console import Console
    from rich.progress import track

    from dpfunc.train._search import MEANING, noise_of, run_public, tuned

    there, held_out = len(search.records.train), len(search.records.evaluation)
    report.say(f"{there} public records to train on (the private run has {search.size}), {held_out} to compare on")
    if there < search.size:
        report.say(
            "Fewer public records than private ones: batches and noise are those of the private run, but records are "
            "seen more often, so the best values for few steps may be missed."
        )
    rows = [{**each.values, "noise_multiplier": noise_of(each.plan)} for each in search.candidates]
    if not dry_run:
        found = run_public(search, insecure_seed)
        shown = track(found, "public search", total=len(rows), console=Console(file=sys.stderr))
        rows = [{**row, "score": score} for row, score in zip(rows, shown, strict=True)]
    print_rows("Candidates", [*rows[0]], [tuple(f"{value:.4g}" for value in row.values()) for row in rows])
    if dry_run:
        report.say(_NOTHING)
        report.values["search"] = {"candidates": rows, "best": None, "out": None}
        return
    best = max(range(len(rows)), key=lambda number: rows[number]["score"])
    chosen = search.candidates[best]
    out.write_text(yaml.safe_dump(tuned(values, chosen.prepared.job), sort_keys=False, allow_unicode=True), "utf-8")
    meaning = MEANING[search.job.task]
    report.say(f"score: {meaning}, divided by their number; one run each, on public records: nothing was spent.")
    report.say(f"Best: {listed(chosen.values)}. Train with: dpfunc train {out}")
    report.values["search"] = {"candidates": rows, "best": best, "out": str(out)}


def _search_private(search: Search, dry_run: bool, resume: bool, insecure_seed: int | None, report: Report) -> None:
    """Do a private search, or show its plan."""
    from rich.console import Console

    from dpfunc.train._search import interrupted_search, outcome_lines, run_search, search_lines

    for line in search_lines(search):
        report.say(line)
    if dry_run:
        report.say(_NOTHING)
        return
    try:
        with Console(file=sys.stderr).status("private search"):  # a bar or a time would tell the number of runs
            outcome = run_search(search, resume=resume, insecure_seed=insecure_seed)
    except KeyboardInterrupt:
        click.echo(f"\n{interrupted_search(search.job)}", err=True)
        raise
    report.values["record"] = json.loads(outcome[0].to_json())
    for line in outcome_lines(outcome, search.job.output_dir, insecure_seed):
        report.say(line)
