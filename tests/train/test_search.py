"""A search: scores between 0 and 1 of each record alone, public runs with the noise of the private one, and its job."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from text_job import write_job, write_table

from dpfunc.accounting import Ledger
from dpfunc.errors import InvalidArgument
from dpfunc.rng import fold_in, insecure_key
from dpfunc.train import _search as searches
from dpfunc.train._config_file import parse_flags, parse_grid, read_job, read_yaml, trials
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._search import MEANING, noise_of, noisy, prepare_search, run_public, score, tuned
from dpfunc.train.config import TASKS, job_from_dict
from dpfunc.train.run import prepare
from dpfunc.types import Event

KINDS = {"text_classification": "bert", "causal_lm": "llama"}
PUBLIC = Path("public.jsonl")


@pytest.fixture(scope="module", params=KINDS)
def prepared(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_job(folder, request.param, KINDS[request.param])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return prepare(read_job("job.yaml", ["--eval_fraction", "0.3"]))


def test_one_record_changes_the_score_by_at_most_one(prepared):
    """Exactly its own summand, between 0 and 1: the others are computed alone."""
    rows = prepared.records.evaluation[:12]
    each = [score(prepared, prepared.model, [row]) for row in rows]
    assert all(0 <= value <= 1 for value in each)
    assert len(set(each)) > 1
    total = 0.0
    for value in each:
        total += value
    assert score(prepared, prepared.model, rows) == total
    assert score(prepared, prepared.model, []) == 0.0


def test_frozen_features_give_the_same_score(prepared):
    job, held_out = prepared.job, prepared.records.evaluation
    if job.task == "text_classification":
        head = dataclasses.replace(job, strategy="head")
        kept = compute_frozen(head, prepared.model, prepared.records, shows=False)[0].evaluation
        assert score(prepared, prepared.model, kept) == score(prepared, prepared.model, held_out)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_a_model_without_numbers_scores_in_the_same_range(prepared, monkeypatch, broken):
    """A gradient that went wrong must not make a score that one record moves by more than 1."""
    real = type(prepared.model).forward

    def wrong(self, *arguments, **named):
        output = real(self, *arguments, **named)
        output.logits, output.loss = output.logits * broken, torch.tensor(broken)
        return output

    monkeypatch.setattr(type(prepared.model), "forward", wrong)
    assert all(0 <= score(prepared, prepared.model, [row]) <= 1 for row in prepared.records.evaluation[:3])


def test_the_noise_of_a_score_has_its_size():
    draws = np.array([noisy(7.0, 3.0, fold_in(insecure_key(5100), i)) - 7.0 for i in range(4000)])
    assert abs(draws.mean()) < 0.2
    assert 2.85 < draws.std() < 3.15
    assert np.abs(draws).max() > 9


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_job(tmp_path)
    write_table(tmp_path / PUBLIC, 200, seed=5)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def all_trials(*flags, grid=(), factors="1"):
    return trials(read_yaml("job.yaml"), parse_flags([*flags]), parse_grid(grid, factors))


def searched(*flags, public=PUBLIC, **options):
    return prepare_search(all_trials(*flags, **options), public=Path(public))


def test_public_runs_have_the_noise_of_the_private_run(here):
    """Also where earlier runs are counted; and no private record is in the search."""
    Path("earlier.json").write_text(Ledger((Event(1.0, 2.0, 1),)).to_json())
    for flags in ([], ["--spent", "earlier.json"]):
        plan = prepare(read_job("job.yaml", flags)).plan
        search = searched(*flags)
        (candidate,) = search.candidates
        assert noise_of(candidate.plan) == candidate.alone == plan.noise_multiplier
        assert candidate.plan.sampler == plan.sampler
        assert (candidate.prepared.num_steps, search.size) == (plan.num_steps, 120)
        job = candidate.prepared.job
        again = job.privacy.plan(len(search.records.train), job.batch_size, job.training.steps)  # as the Trainer does
        assert again.noise_multiplier == plan.noise_multiplier
    private = {json.dumps(row) for row in prepare(read_job("job.yaml")).records.train}
    assert len(search.records.train) == 120
    assert private.isdisjoint(json.dumps(row) for row in (*search.records.train, *search.records.evaluation))


def test_the_private_table_is_not_read_if_its_size_is_given(here):
    Path("mails.jsonl").unlink()
    assert searched("--dp-dataset-size", "150").size == 150
    with pytest.raises(InvalidArgument, match=r"mails\.jsonl"):
        searched()


PEOPLE = ["--prompt_template", "label : {label}", "--unit_column", "label", "--max_records_per_unit", "2"]
REFUSED = {  # flags, public table, message
    "few records": ([], "few.jsonl", "Expected at least 32 public records to train on"),
    "the private table": ([], "mails.jsonl", r"which is the private data\.train"),
    "a copy of it": ([], "copy.jsonl", r"which is the private data\.train"),
    "no budget": (["--dp-noise-multiplier", "1"], PUBLIC, "budget of the private run"),
    "a task without a score": (["--task", "seq2seq"], PUBLIC, "a task whose runs can be compared"),
    "people, who have several records": (PEOPLE, PUBLIC, "no data.unit_column in a search"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_searched_is_refused(here, name):
    write_table(here / "few.jsonl", 30, seed=6)
    (here / "copy.jsonl").write_bytes((here / "mails.jsonl").read_bytes())
    flags, public, message = REFUSED[name]
    with pytest.raises(InvalidArgument, match=message):
        searched(*flags, public=public)
    assert set(MEANING) < set(TASKS)


def test_fewer_public_records_than_private_ones(here):
    write_table(here / "few.jsonl", 30, seed=6)
    search = searched("--batch-size", "16", public="few.jsonl")
    assert len(search.records.train) < search.size == 120


def test_all_combinations_are_tried(here):
    found = all_trials(grid=["batch_size=16,32", "lora.rank=2,4"], factors="0.5,2")
    assert len(found) == 8
    one, two, three = prepare_search(found[:3], public=PUBLIC).candidates
    assert one.values == {"learning_rate": 0.005, "batch_size": 16, "steps": 4, "rank": 2}
    assert (two.values["learning_rate"], three.values["rank"]) == (0.02, 4)
    assert noise_of(one.plan) == noise_of(three.plan)
    assert three.prepared.num_trained == 2 * one.prepared.num_trained


def test_what_is_written_is_the_job_of_the_best_candidate(here):
    (candidate,) = searched("--epochs", "2", grid=["batch_size=16"], factors="3").candidates
    values = {**read_yaml("job.yaml"), "training": {"learning_rate": 1e-2, "batch_size": 32, "epochs": 2}}
    job = job_from_dict(tuned(values, candidate.prepared.job))
    assert (job.training.learning_rate, job.training.batch_size, job.training.epochs) == (0.03, 16, None)
    plan = prepare(job).plan
    assert (plan.num_steps, plan.noise_multiplier) == (15, noise_of(candidate.plan))
    assert (job.privacy.dp_epsilon, job.data.train) == (8.0, "mails.jsonl")


def test_each_candidate_gets_its_mean_score(here, monkeypatch):
    keys = []
    monkeypatch.setattr(searches, "train_candidate", lambda candidate, folder, key: keys.append(key))
    monkeypatch.setattr(searches, "score", lambda prepared, model, records: 0.25 * len(records) * len(keys))
    assert list(run_public(searched(factors="1,2,3"))) == [0.25, 0.5, 0.75]
    assert len({bytes(key.secret) for key in keys}) == 3
