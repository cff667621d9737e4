"""A search on public records: the noise of the private run, its grid, and the job that it writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from text_job import write_job, write_table

from dpfunc.accounting import Ledger
from dpfunc.errors import InvalidArgument
from dpfunc.train import public_search
from dpfunc.train.candidates import noise_of
from dpfunc.train.config import job_from_dict
from dpfunc.train.config_file import parse_flags, read_job, read_yaml
from dpfunc.train.grid import FACTORS, Grid, parse_grid, trials
from dpfunc.train.public_search import prepare_public, tuned
from dpfunc.train.run import prepare
from dpfunc.types import Event

PUBLIC = Path("public.jsonl")


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_job(tmp_path)
    write_table(tmp_path / PUBLIC, 200, seed=5)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def all_trials(*flags, grid=(), factors="1"):
    return trials(read_yaml("job.yaml"), parse_flags([*flags]), parse_grid(grid, factors))


def test_public_runs_have_the_noise_of_the_private_run(here):
    """Also where earlier runs are counted; and no private record is in the search."""
    Path("earlier.json").write_text(Ledger((Event(1.0, 2.0, 1),)).to_json())
    for flags in ([], ["--spent", "earlier.json"]):
        plan = prepare(read_job("job.yaml", flags)).plan
        search = prepare_public(all_trials(*flags), PUBLIC)
        (candidate,) = search.candidates
        assert noise_of(candidate.prepared.plan) == plan.noise_multiplier
        assert candidate.prepared.plan.sampler == plan.sampler
        assert (candidate.prepared.num_steps, search.size) == (plan.num_steps, 120)
        job = candidate.prepared.job
        again = job.privacy.plan(len(search.records.train), job.batch_size, job.training.steps)  # as the Trainer does
        assert again.noise_multiplier == plan.noise_multiplier
    private = {json.dumps(row) for row in prepare(read_job("job.yaml")).records.train}
    assert len(search.records.train) == 120
    assert private.isdisjoint(json.dumps(row) for row in (*search.records.train, *search.records.evaluation))


def test_the_private_table_is_not_read_if_its_size_is_given(here):
    Path("mails.jsonl").unlink()
    assert prepare_public(all_trials("--dp-dataset-size", "150"), PUBLIC).size == 150
    with pytest.raises(InvalidArgument, match=r"mails\.jsonl"):
        prepare_public(all_trials(), PUBLIC)


def test_a_public_table_that_is_too_small_is_refused(here):
    write_table(here / "few.jsonl", 30, seed=6)
    with pytest.raises(InvalidArgument, match="Expected at least 32 public records to train on"):
        prepare_public(all_trials(), Path("few.jsonl"))
    search = prepare_public(all_trials("--batch-size", "16"), Path("few.jsonl"))
    assert len(search.records.train) < search.size == 120


@pytest.mark.parametrize("name", ["mails.jsonl", "copy.jsonl"])
def test_the_private_table_is_not_public(here, name):
    (here / "copy.jsonl").write_bytes((here / "mails.jsonl").read_bytes())
    with pytest.raises(InvalidArgument, match=r"which is the private data\.train"):
        prepare_public(all_trials(), Path(name))


def test_jobs_without_a_budget_are_refused(here):
    with pytest.raises(InvalidArgument, match="budget of the private run"):
        prepare_public(all_trials("--dp-noise-multiplier", "1"), PUBLIC)


def test_all_combinations_are_tried(here):
    found = all_trials(grid=["batch_size=16,32", "lora.rank=2,4"], factors="0.5,2")
    assert len(found) == 8
    search = prepare_public(found[:3], PUBLIC)
    values = [candidate.values for candidate in search.candidates]
    assert values[0] == {"learning_rate": 0.005, "batch_size": 16, "steps": 4, "rank": 2}
    assert (values[1]["learning_rate"], values[2]["rank"]) == (0.02, 4)
    assert noise_of(search.candidates[0].prepared.plan) == noise_of(search.candidates[2].prepared.plan)
    assert search.candidates[2].prepared.num_trained == 2 * search.candidates[0].prepared.num_trained


def test_what_is_written_is_the_job_of_the_best_candidate(here):
    found = all_trials("--epochs", "2", grid=["batch_size=16"], factors="3")
    (candidate,) = prepare_public(found, PUBLIC).candidates
    values = {**read_yaml("job.yaml"), "training": {"learning_rate": 1e-2, "batch_size": 32, "epochs": 2}}
    job = job_from_dict(tuned(values, candidate.prepared.job))
    assert (job.training.learning_rate, job.training.batch_size, job.training.epochs) == (0.03, 16, None)
    plan = prepare(job).plan
    assert (plan.num_steps, plan.noise_multiplier) == (15, noise_of(candidate.prepared.plan))
    assert (job.privacy.dp_epsilon, job.data.train) == (8.0, "mails.jsonl")


WRONG = {
    "unknown key": (["rate=1"], None), "no value": (["steps="], None), "no key": (["steps"], None),
    "a value twice": (["steps=1,1"], None), "a key twice": (["steps=1", "training.steps=2"], None),
    "another section": (["lora.steps=1"], None), "two ways": (["learning_rate=1"], "1,2"),
    "factors in words": ([], "one"), "factor 0": ([], "0,1"), "factors twice": ([], "1,1"), "factor inf": ([], "inf"),
    "too many": (["steps=" + ",".join(map(str, range(1, 500)))], None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_grids_are_refused(name):
    with pytest.raises(InvalidArgument, match="Expected"):
        parse_grid(*WRONG[name])


def test_values_of_the_grid_are_those_of_a_job(here):
    assert parse_grid([], None) == Grid({}, FACTORS)
    assert parse_grid(["learning-rate=1e-3, 2e-3"], None).factors == (1.0,)
    with pytest.raises(InvalidArgument, match="steps"):
        all_trials(grid=["steps=many"])
    with pytest.raises(InvalidArgument, match="no section lora"):
        all_trials("--strategy", "full", grid=["rank=2"])


def test_each_candidate_gets_its_mean_score(here, monkeypatch):
    keys = []
    monkeypatch.setattr(public_search, "train_candidate", lambda candidate, folder, key: keys.append(key))
    monkeypatch.setattr(public_search, "score", lambda prepared, model, records: 0.25 * len(records) * len(keys))
    search = prepare_public(all_trials(factors="1,2,3"), PUBLIC)
    assert list(public_search.run_public(search)) == [0.25, 0.5, 0.75]
    assert len({bytes(key.secret) for key in keys}) == 3
    assert dataclasses.replace(search, size=1).candidates == search.candidates
