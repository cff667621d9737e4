"""Scores of held-out records: each between 0 and 1, whatever the others are; and their noise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from text_job import write_job

from dpfunc.errors import InvalidArgument
from dpfunc.rng import fold_in, insecure_key
from dpfunc.train import candidates
from dpfunc.train.candidates import check_scored, noisy, score
from dpfunc.train.config_file import read_job
from dpfunc.train.frozen import compute_frozen
from dpfunc.train.run import prepare

KINDS = {"text_classification": "bert", "causal_lm": "llama"}


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
    job = prepared.job
    if job.task == "text_classification":
        head = dataclasses.replace(job, strategy="head")
        records, _ = compute_frozen(head, prepared.model, prepared.records, shows=False)
        assert score(prepared, prepared.model, records.evaluation) == score(
            prepared, prepared.model, prepared.records.evaluation
        )


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_a_model_without_numbers_scores_in_the_same_range(prepared, monkeypatch, broken):
    """A gradient that went wrong must not make a score that one record moves by more than 1."""
    rows = prepared.records.evaluation[:3]
    real = type(prepared.model).forward

    def wrong(self, *arguments, **named):
        output = real(self, *arguments, **named)
        output.logits = output.logits * broken
        output.loss = torch.tensor(broken)
        return output

    monkeypatch.setattr(type(prepared.model), "forward", wrong)
    assert all(0 <= score(prepared, prepared.model, [row]) <= 1 for row in rows)


def test_the_noise_of_a_score_has_its_size():
    draws = np.array([noisy(7.0, 3.0, fold_in(insecure_key(5100), i)) - 7.0 for i in range(4000)])
    assert abs(draws.mean()) < 0.2
    assert 2.85 < draws.std() < 3.15
    assert np.abs(draws).max() > 9


def test_scores_are_of_known_tasks():
    """The other tasks are refused below."""
    from dpfunc.train.config import TASKS

    assert set(candidates.MEANING) < set(TASKS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "seq2seq", "data": {"prompt_template": "Repeat: {text}"}}, "a task whose runs can be compared"),
        ({"data": {"unit_column": "author", "max_records_per_unit": 2}}, "no data.unit_column in a search"),
    ],
)
def test_jobs_without_a_score_are_refused(prepared, changes, message):
    """The records of a person would change the sum by more than 1."""
    data = dataclasses.replace(prepared.job.data, **changes.get("data", {}))
    job = dataclasses.replace(prepared.job, task=changes.get("task", prepared.job.task), data=data)
    with pytest.raises(InvalidArgument, match=message):
        check_scored(job)
    check_scored(prepared.job)
