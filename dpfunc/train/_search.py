"""A search: the jobs of a grid over one table, each with the noise and the plan of its run, ready to begin.

May import: its folder, features and below. Privacy depends on it: yes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dpfunc._utils.validation import expect, fail, positive, refuse
from dpfunc.accounting import Event, Guarantee, Ledger, RunCount, calibrate_search, record
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.plan import Plan
from dpfunc.rng import stream
from dpfunc.train import _run_folder as folders
from dpfunc.train._config_file import GRID_KEYS
from dpfunc.train._dataset import Records, count_records, read_records
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._model import choose_parameters, key_of, load_base, load_processing
from dpfunc.train._recipe import with_recipe, with_shape
from dpfunc.train.config import ADAPTERS, TASKS, Job
from dpfunc.train.run import Prepared, check_packed, rehearse
from dpfunc.train.tables import same_file
from dpfunc.types import schedule_at

_HELD_OUT = 0.2  # of public records, where the job has no share


@dataclass(frozen=True)
class Candidate:
    """One combination of a grid: what distinguishes it, by the keys of the grid; and the plan of one run."""

    values: dict[str, float]
    prepared: Prepared
    plan: Plan
    alone: float  # noise multiplier with which it alone, without a search, would spend the budget


@dataclass(frozen=True)
class Search:
    """The candidates of a grid, ready to be compared: on public records, which costs nothing."""

    job: Job
    candidates: tuple[Candidate, ...]
    records: Records  # public; or private, the held-out ones included
    size: int  # public number of private records


@dataclass(frozen=True)
class PrivateSearch(Search):
    """A search on private records alone; the budget of its job pays for all of its runs."""

    spent: Ledger  # by earlier runs on the private records
    runs: RunCount
    score_noise: float
    cost: Guarantee  # of all runs, the earlier ones included


def prepare_public(trials: Sequence[tuple[Job, float]], public: Path, *, shows: bool = False) -> Search:
    """Load everything for a search on public records; write nothing.

    Each run has noise, batch size and steps of the private run
    (tests/train/test_search.py::test_public_runs_have_the_noise_of_the_private_run).
    """
    job = trials[0][0]
    _check(job, private=False)
    processing = load_processing(job)
    records, size = _public_records(job, public, processing)
    candidates = load(trials, processing, records, size, shows=shows, spent=folders.spent_before(job))
    return Search(job, tuple(map(_on_public, candidates)), records, size)


def prepare_private(
    trials: Sequence[tuple[Job, float]], runs: RunCount, score_noise: float, *, shows: bool = False
) -> PrivateSearch:
    """Load everything for a private search, which costs the budget of the job; write nothing.

    The noise of each candidate is the least with which the best of all runs, each with a score, stays within it
    (tests/train/test_search.py::test_the_whole_search_costs_the_budget).
    """
    job = trials[0][0]
    _check(job, private=True)
    positive("score_noise", score_noise)
    processing = load_processing(job)
    records = read_records(job, processing)
    size = job.privacy.public_size(len(records.train))
    spent = folders.spent_before(job) or Ledger(adjacency=job.privacy.adjacency)

    def within_budget(alone: list[Plan]) -> list[Plan]:
        score = Ledger((Event(1.0, score_noise, 1),), spent.adjacency)
        scale = calibrate_search(
            runs, lambda scale: [*(plan.ledger() for plan in _scaled(alone, scale)), score],
            epsilon=job.privacy.dp_epsilon or 0.0, delta=alone[0].delta, spent=spent,
        )  # fmt: skip
        return _scaled(alone, scale)

    candidates = load(trials, processing, records, size, shows=shows, within_budget=within_budget)
    ledgers = [each.plan.ledger() for each in candidates]
    cost = record.search_cost(runs, ledgers, score_noise, candidates[0].plan.delta, spent)
    if (budget := folders.budget_of(job)) is not None:
        budget.check(cost, unit=folders.unit_of(job))
    # what would end each of its runs would cost the whole budget and release nothing; a rate alone ends none
    for each in {str({**one.values, "learning_rate": None}): one for one in candidates}.values():
        rehearse(each.prepared)
    return PrivateSearch(job, candidates, records, size, spent, runs, score_noise, cost)


def _scaled(plans: Sequence[Plan], scale: float) -> list[Plan]:
    return [replace(plan, noise_multiplier=scale * noise_of(plan), epsilon=None) for plan in plans]


def _check(job: Job, *, private: bool) -> None:
    """Check that records have a score, to which each unit adds at most 1, and that a private search is private."""
    privacy, data = job.privacy, job.data
    check_packed(job)
    refuse(
        (not TASKS[job.task].score,
         fail(f"a task whose runs can be compared ({', '.join(task for task in TASKS if TASKS[task].score)})", "task",
              job.task)),
        (data.unit_column is not None,
         fail("no data.unit_column in a search", "unit_column", data.unit_column,
              "The scored records of one person would change the score by more than 1. Choose the rates on public "
              "records, one a person.")),
        (not privacy.dp_enabled or privacy.dp_epsilon is None,
         fail(f"dp_epsilon, the budget of {'the whole search' if private else 'the private run'}", "dp_epsilon",
              privacy.dp_epsilon)),
        (private and (data.eval is not None or not data.eval_fraction),
         "Expected data.eval_fraction > 0, and no data.eval, for --private: runs are compared on a part of the "
         "private table, e.g. eval_fraction: 0.1. With a public table to compare on, search with --public."),
        (private and job.training.report_to is not None,
         fail("no training.report_to for --private", "report_to", job.training.report_to, "It shows each run.")),
        (private and privacy.dp_log_unreleased,
         fail("no dp_log_unreleased for --private", "dp_log_unreleased", True)),
    )  # fmt: skip
    if private:
        record.refuse_replaced("dp_adjacency", privacy.adjacency)


def _public_records(job: Job, public: Path, processing: Any) -> tuple[Records, int]:
    """As many public records as there are private ones, and the number of these."""
    refuse(
        (same_file(public, Path(job.data.train)),
         f"Expected a table of public records, got --public {public}, which is the private data.train. What is "
         "chosen by private records costs privacy: search without --public, and the search is counted."),
    )  # fmt: skip
    size = job.privacy.dp_dataset_size or count_records(job)
    share = job.data.eval_fraction or _HELD_OUT
    data = replace(job.data, train=str(public), eval=None, spent=None, eval_fraction=share)
    records = read_records(replace(job, data=data), processing)
    order = stream(key_of(job, "public records")).permutation(len(records.train))[:size]
    return replace(records, train=tuple(records.train[row] for row in order)), size


def load(
    trials: Sequence[tuple[Job, float]], processing: Any, records: Records, size: int, *, shows: bool = False,
    spent: Ledger | None = None, within_budget: Callable[[list[Plan]], list[Plan]] = list,
) -> tuple[Candidate, ...]:  # fmt: skip
    """Load the models of a grid, and fill in what the recipe gives for the epsilon of one run.

    The noise is that of `within_budget`, from the plans with which each candidate alone spends what `spent` leaves.
    """
    expect(
        records.evaluation, "records to compare on", "data.eval_fraction", trials[0][0].data.eval_fraction or _HELD_OUT,
        "The table is too small.",
    )  # fmt: skip
    models: dict[int, tuple[nn.Module, Records]] = {}
    alone: list[Plan] = []
    jobs = [with_shape(job) for job, _ in trials]
    for job in jobs:
        if job.lora.rank not in models:
            model = choose_parameters(load_base(job, processing), job, processing)
            models[job.lora.rank] = model, compute_frozen(job, model, records, shows=shows)[0]
        own, _ = with_recipe(job, models[job.lora.rank][0], size)
        alone.append(own.privacy.plan(size, own.batch_size, own.training.num_steps(size), spent))
    candidates = []
    for (_, factor), job, one, plan in zip(trials, jobs, alone, within_budget(alone), strict=True):
        model, kept = models[job.lora.rank]
        filled = _filled(job, factor, model, size, plan)
        values = {key: getattr(getattr(filled, section), name) for key, (section, name) in GRID_KEYS.items()}
        if filled.strategy not in ADAPTERS:
            del values["rank"]
        candidates.append(
            Candidate(values, Prepared(filled, model, processing, kept, plan, plan.num_steps), plan, noise_of(one))
        )
    return tuple(candidates)


def _filled(job: Job, factor: float, model: nn.Module, size: int, plan: Plan) -> Job:
    """The job of one run, with the values of the recipe for its epsilon, and without what would publish anything."""
    privacy = replace(job.privacy, dp_epsilon=plan.guarantee().epsilon)
    by_recipe, _ = with_recipe(replace(job, privacy=privacy), model, size)
    filled = by_recipe.training
    training = replace(
        filled,
        learning_rate=factor * (filled.learning_rate or 0.0),
        head_rate=None if filled.head_rate is None else factor * filled.head_rate,
        steps=plan.num_steps, epochs=None, eval_steps=None, report_to=None, save_steps=plan.num_steps,
    )  # fmt: skip
    own = replace(
        by_recipe.privacy, dp_epsilon=None, dp_noise_multiplier=noise_of(plan), dp_warn_at=PrivacyArguments.dp_warn_at
    )
    return replace(job, training=training, privacy=own)


def _on_public(candidate: Candidate) -> Candidate:
    """The candidate with what its privacy arguments say about the number of records left out."""
    prepared = candidate.prepared
    there, batch = len(prepared.records.train), prepared.job.batch_size
    refuse(
        (there < batch,
         f"Expected at least {batch} public records to train on, the batch size of a candidate, got {there}. Take a "
         "larger public table, or smaller batches: --grid batch_size=..."),
    )  # fmt: skip
    privacy = replace(prepared.job.privacy, dp_dataset_size=None, dp_allow_large_delta=True)
    return replace(candidate, prepared=replace(prepared, job=replace(prepared.job, privacy=privacy)))


def noise_of(plan: Plan) -> float:
    """Noise multiplier of a plan of a job, which is the same in all steps."""
    return schedule_at(plan.noise_multiplier, 0)
