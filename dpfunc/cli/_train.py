"""The commands `dpfunc train`, `tune`, `generate` and `predict`; what they need is imported when they run.

May import: its folder, train and below. Privacy depends on it: no.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from dpfunc._utils.files import replace_file
from dpfunc._utils.validation import refuse
from dpfunc.accounting import RunCount
from dpfunc.accounting.accountant import upper
from dpfunc.accounting.record import listed
from dpfunc.accounting.selection import SHAPES
from dpfunc.cli._output import Report, json_option, print_line, print_rows, reporting
from dpfunc.errors import DPFuncError, NotWritten

if TYPE_CHECKING:
    from dpfunc.distributed.ranks import Ranks
    from dpfunc.train._search import PrivateSearch, Search
    from dpfunc.train.config import Job

# What torch says when another process is gone or does not answer.
_LOST = ("closed by peer", "reset by peer", "imed out", "roken pipe", "onnection refused", "remote process exited")
# What the library calls a key of the file.
_KEYS = {
    "expected_batch_size": "batch_size", "allow_large_delta=True": "dp_allow_large_delta: true", "delta=": "dp_delta=",
}  # fmt: skip
_NOTHING = "Nothing was trained, written or spent."
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW, _THERE = click.Path(path_type=Path), click.Path(exists=True, path_type=Path)
_RUN = click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
_FLAGS_OF_A_JOB: dict[str, Any] = {"ignore_unknown_options": True}
seed_option: Callable[[Any], Any] = click.option(
    "--insecure-seed", "--insecure_seed", type=click.IntRange(min=0),
    help="A guessable key, to repeat all of it: for tests and public data.",
)  # fmt: skip


def check_new(out: Path | None, option: str = "--out") -> None:
    """Check that a file to write is not there, and that its folder is: what it is for may take hours."""
    if out is None:
        return
    refuse(
        (out.exists(), f"Expected a new file, got {option} {out}, which exists."),
        (not out.parent.is_dir(), f"Expected a file in a folder that exists, got {option} {out}. Make the folder."),
    )


@contextmanager
def _keys_of_the_file() -> Iterator[None]:
    """Report errors of dpfunc with the keys that the user has written, instead of the names of the library."""
    try:
        yield
    except DPFuncError as error:
        text = str(error)
        for word, key in _KEYS.items():
            text = re.sub(rf"\b{word}", key, text)
        raise click.ClickException(text) from error


@contextmanager
def importing() -> Iterator[None]:
    """Say how to install what an import inside needs, and leave out a warning that the user can do nothing about."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # by PEFT
            yield
    except ImportError as error:
        advice = ' Run: pip install "dpfunc[hf]".' if error.name else ""  # with a name it is of an import itself
        raise click.ClickException(f"{str(error).rstrip('.')}.{advice}") from error


@contextmanager
def _interruptible(job: Job, cost: Callable[[Job, str], str], writes: bool) -> Iterator[None]:
    """After Ctrl-C, or a file that cannot be written, tell what the job has cost; click then ends the command."""
    from dpfunc.checkpoint.not_written import REFUSED, unwritten

    try:
        yield
    except KeyboardInterrupt:
        if writes:
            click.echo(f"\n{cost(job, 'Interrupted')}", err=True)  # not on the line of the progress bar
        raise
    except REFUSED as error:
        if not unwritten(error):
            raise
        what = "" if isinstance(error, NotWritten) else f"The run in {job.output_dir} could not go on: "
        raise click.ClickException(f"{what}{str(error).rstrip('.')}. {cost(job, 'Stopped')}") from error


@contextmanager
def _processes() -> Iterator[tuple[Ranks | None, bool]]:
    """Yield the processes under torchrun, or None, and True for the one that writes; see that none is lost."""
    from dpfunc import distributed
    from dpfunc.train.run import LONGEST_WAIT

    ranks = distributed.from_environment(LONGEST_WAIT)
    writes = distributed.is_writer(ranks)
    if not writes:
        from transformers.utils import logging

        logging.disable_progress_bar()
    try:
        yield ranks, writes
    except DPFuncError:
        raise
    except RuntimeError as error:
        if ranks is None or not any(words in str(error) for words in _LOST):
            raise
        raise click.ClickException(
            f"Process {ranks.rank} lost the others: one of them ended or did not answer in time; its own error says "
            f"why. Every step that was released is in the journal; training goes on with --resume. ({error})"
        ) from error
    distributed.shutdown()


@click.command(context_settings=_FLAGS_OF_A_JOB)
@click.argument("config", type=_FILE)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", "--dry_run", is_flag=True, help="Print the plan and an estimate of memory; write nothing.")
@click.option("--no-dp", "--no_dp", is_flag=True, help="Train the twin without privacy, into OUTPUT_DIR-no-dp.")
@click.option("--resume", is_flag=True, help="Go on with the run in output_dir after an interruption, bit for bit.")
@seed_option
@json_option
def train(
    config: Path, flags: tuple[str, ...], dry_run: bool, no_dp: bool, resume: bool, insecure_seed: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Fine-tune a model with differential privacy, as CONFIG (YAML) says.

    Every key of CONFIG is a flag as well: --training.learning_rate 1e-3, or --learning-rate 1e-3 where the name is
    unique. Flags win. Unknown keys and flags are errors.

    With --json stdout has one JSON value, with the lines of the report and the record of the run (null without
    privacy); all else is on stderr.

    Example: dpfunc train job.yaml --dp-epsilon 3 --dp-delta 1e-5 --dry-run
    """
    with importing():
        from dpfunc.train._config_file import read_job
    job = read_job(config, flags, no_dp=no_dp)
    with _keys_of_the_file(), importing(), _processes() as (_, writes), reporting(as_json, writes) as report:
        if dry_run or job.privacy.dp_dry_run:
            from dpfunc.train._dry_run import dry_run as plan_lines

            report.say(*(plan_lines(job, resume=resume, insecure_seed=insecure_seed) if writes else ()))
            return
        from dpfunc.train._run_folder import interrupted
        from dpfunc.train.run import run_job

        with _interruptible(job, interrupted, writes):
            report.values["record"] = run_job(job, resume=resume, insecure_seed=insecure_seed, say=report.say) or None


@click.command()
@_RUN
@click.option("--num", "-n", type=int, required=True, help="Texts in all, spread evenly over the prompts.")
@click.option("--prompt", help="What each text continues; nothing by default.")
@click.option("--prompts", type=_FILE, help="A prompt a line (.txt), or `prompt` and other fields (.jsonl).")
@click.option("--out", type=_NEW, required=True, help="New .jsonl file.")
@click.option("--max-new-tokens", default=128, show_default=True, help="Longest text.")
@click.option("--temperature", default=1.0, show_default=True, help="Below 1: likelier words.")
@click.option("--top-p", default=1.0, show_default=True, help="Only the likeliest words that make up this share.")
@click.option("--seed", default=0, show_default=True, help="The same texts again. Public.")
@click.option("--batch-size", default=16, show_default=True, help="Texts drawn at once; memory only.")
@click.option("--allow-non-private", is_flag=True, help="Also from a model that was trained without privacy.")
@json_option
def generate(
    run_dir: Path, num: int, prompt: str | None, prompts: Path | None, out: Path, max_new_tokens: int,
    temperature: float, top_p: float, seed: int, batch_size: int, allow_non_private: bool, as_json: bool,
) -> None:  # fmt: skip
    """Draw synthetic texts from the language model that `dpfunc train` left in RUN_DIR.

    They cost no privacy beyond the training. Each line holds its text, the fields of its prompt, epsilon and delta.

    Example: dpfunc generate runs/mails --num 100 --prompt "Subject:" --out texts.jsonl
    """
    from dpfunc.distributed import all_or_none
    from dpfunc.train import generate as generation

    how = generation.Sampling(num, max_new_tokens, temperature, top_p, seed, batch_size)
    rows = generation.read_prompts(prompt, prompts)
    check_new(out)
    with _processes() as (ranks, writes):
        read = partial(generation.load_writer, run_dir, allow_non_private=allow_non_private, prompts=prompts)
        with importing():
            writer = all_or_none(read, ranks, "Nothing was drawn")
            from rich.progress import track

        texts: Iterator[dict[str, Any]] = generation.sample(writer, rows, how, ranks)
        if writes:
            texts = iter(track(texts, "generate", total=num, console=Console(stderr=True)))
        count = generation.write_texts(out, texts, ranks)
    spent = (
        "nothing protects the training records"
        if writer.epsilon is None
        else f"epsilon={upper(writer.epsilon, 4)} at delta={writer.delta:g} as the model, with no further cost"
    )
    if writes:
        values = {"num_texts": count, "out": str(out), "epsilon": writer.epsilon, "delta": writer.delta}
        print_line(f"{count} texts in {out}: {spent}.", values, as_json)


@click.command()
@_RUN
@click.argument("source", type=_THERE)
@click.option("--out", type=_NEW, required=True, help="New .jsonl file.")
@json_option
def predict(run_dir: Path, source: Path, out: Path, as_json: bool) -> None:
    """Predict the classes of SOURCE, a table or a folder of images, by the model that `dpfunc train` left in RUN_DIR.

    Each line of the output has the row or the image, its likeliest class, and the probability of each class. What is
    known of the training records costs no more privacy; the predictions are as private as SOURCE.

    Example: dpfunc predict runs/people new.csv --out classes.jsonl
    """
    with importing():
        from dpfunc.train import predict as prediction
    check_new(out)
    lines = [json.dumps(predicted, ensure_ascii=False) + "\n" for predicted in prediction.predict(run_dir, source)]
    replace_file(out, "".join(lines), 0o600)
    print_line(f"{len(lines)} predictions in {out}.", {"num_records": len(lines), "out": str(out)}, as_json)


@click.command(context_settings=_FLAGS_OF_A_JOB)
@click.argument("config", type=_FILE)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--public", type=_THERE, help="Compare on this public table or folder, with the private run's noise.")
@click.option("--private", is_flag=True, help="Compare on a part of the private table: the budget pays for all runs.")
@click.option("--grid", multiple=True, help="key=value,value: learning_rate, batch_size, steps or rank. Public.")
@click.option("--factors", help="Of the learning rate of the job or its recipe. [default: 0.3,1,3]")
@click.option("--mean-runs", "--mean_runs", type=float, help="With --private: expected number of runs.")
@click.option("--runs", type=click.Choice([*SHAPES]), help="With --private: of their number. [default: geometric]")
@click.option("--score-noise", "--score_noise", type=float, help="With --private: noise of a score, in records.")
@click.option("--out", type=_NEW, help="With --public: new job file. [default: CONFIG.tuned.yaml]")
@click.option("--dry-run", "--dry_run", is_flag=True, help="Print the plan of the search; train and write nothing.")
@click.option("--resume", is_flag=True, help="With --private: go on with an interrupted search in output_dir.")
@seed_option
@json_option
def tune(
    config: Path, flags: tuple[str, ...], public: Path | None, private: bool, grid: tuple[str, ...],
    factors: str | None, mean_runs: float | None, runs: str | None, score_noise: float | None, out: Path | None,
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
    _check_options(public, private, {"--mean-runs": mean_runs, "--score-noise": score_noise}, runs, out, resume)
    with importing():
        from dpfunc.train import _config_file as config_file
    given, values = config_file.parse_flags(flags), config_file.read_yaml(config)
    trials = config_file.trials(values, given, config_file.parse_grid(grid, factors))
    job, _ = trials[0]
    dry_run = dry_run or job.privacy.dp_dry_run
    with _keys_of_the_file(), importing(), reporting(as_json) as report:
        from dpfunc.train._private_search import check_search_folder
        from dpfunc.train._search import prepare_private, prepare_public

        if public is not None:
            target = config.with_suffix(".tuned.yaml") if out is None else out
            check_new(target)
            search = prepare_public(trials, public, shows=True)
            _search_public(search, config_file.override(values, given), target, dry_run, insecure_seed, report)
        else:
            check_search_folder(job, resume)
            law = RunCount(mean_runs or 0.0, SHAPES[runs or "geometric"])
            private_search = prepare_private(trials, law, score_noise or 0.0, shows=True)
            _search_private(private_search, dry_run, resume, insecure_seed, report)


def _check_options(
    public: Path | None, private: bool, costs: dict[str, float | None], runs: str | None, out: Path | None, resume: bool
) -> None:
    """Check that all options are of one of the two kinds of search, and that those of its cost are there."""
    missing = (
        "Missing option '{}'. It decides what a search costs, so it has no default: e.g. --mean-runs 8, and a "
        "--score-noise of 2 % of the held-out records. --dry-run shows the cost."
    )
    about = missing if private else "Expected {} with --private only."
    refuse(
        ((public is not None) == private, click.UsageError("Expected either --public FILE or --private.")),
        *(((value is None) == private, click.UsageError(about.format(name))) for name, value in costs.items()),
        (private and out is not None, click.UsageError("Expected --out with --public only.")),
        (runs is not None and not private, click.UsageError("Expected --runs with --private only.")),
        (resume and not private, click.UsageError("Expected --resume with --private only.")),
        (int(os.environ.get("WORLD_SIZE", "1")) > 1,
         "Expected one process for a search, got several (WORLD_SIZE): start it without torchrun."),
    )  # fmt: skip


def _search_public(
    search: Search, values: dict[str, Any], out: Path, dry_run: bool, insecure_seed: int | None, report: Report
) -> None:
    """Compare the candidates on public records, and write the job of the best one."""
    import yaml
    from rich.progress import track

    from dpfunc.train._config_file import tuned
    from dpfunc.train._search import noise_of
    from dpfunc.train._search_runs import run_public
    from dpfunc.train.config import TASKS

    there, held_out = len(search.records.train), len(search.records.evaluation)
    report.say(f"{there} public records to train on (the private run has {search.size}), {held_out} to compare on")
    if there < search.size:
        report.say(
            "Fewer public records than private ones: batches and noise are those of the private run, but records are "
            "seen more often, so the best values for few steps may be missed."
        )
    rows = [{**each.values, "noise_multiplier": noise_of(each.plan)} for each in search.candidates]
    if not dry_run:
        shown = track(
            run_public(search, insecure_seed), "public search", total=len(rows), console=Console(file=sys.stderr)
        )
        rows = [{**row, "score": score} for row, score in zip(rows, shown, strict=True)]
    print_rows("Candidates", [*rows[0]], [tuple(f"{value:.4g}" for value in row.values()) for row in rows])
    if dry_run:
        report.say(_NOTHING)
        report.values["search"] = {"candidates": rows, "best": None, "out": None}
        return
    best = max(range(len(rows)), key=lambda number: rows[number]["score"])
    chosen = search.candidates[best]
    replace_file(out, yaml.safe_dump(tuned(values, chosen.prepared.job), sort_keys=False, allow_unicode=True))
    report.say(
        f"score: {TASKS[search.job.task].score}, divided by their number; one run each, on public records: nothing was "
        "spent.",
        f"Best: {listed(chosen.values)}. Train with: dpfunc train {out}",
    )
    report.values["search"] = {"candidates": rows, "best": best, "out": str(out)}


def _search_private(
    search: PrivateSearch, dry_run: bool, resume: bool, insecure_seed: int | None, report: Report
) -> None:
    """Do a private search, or show its plan."""
    from dpfunc.train._private_search import interrupted_search, outcome_lines, run_search, search_lines

    report.say(*search_lines(search))
    if dry_run:
        report.say(_NOTHING)
        return
    shown = Console(file=sys.stderr).status("private search")  # a bar or a time would tell the number of runs
    with _interruptible(search.job, interrupted_search, True), shown:
        outcome = run_search(search, resume=resume, insecure_seed=insecure_seed)
    report.values["record"] = json.loads(outcome[0].to_json())
    report.say(*outcome_lines(outcome, search.job.output_dir, insecure_seed))
