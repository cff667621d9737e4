"""A search: scores of each record alone, public runs with the noise of the private one, and private runs, of which
one is released: what they cost, what they keep to themselves, and how they go on after a kill."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from search_cases import MadeUpRuns
from text_job import write_job, write_table

from dpfunc.accounting import Ledger, RunCount, selection_epsilon
from dpfunc.accounting.record import ONE_RECORD, OTHER_STEPS, SOURCES, Record, SelectionRecord
from dpfunc.budget import Budget
from dpfunc.errors import BudgetExhausted, CheckpointError, DPFuncError, InvalidArgument, LedgerConflict, NotWritten
from dpfunc.rng import fingerprint, fold_in, insecure_key, stream
from dpfunc.train import _private_search, _search_runs
from dpfunc.train._config_file import parse_flags, parse_grid, read_job, read_yaml, trials, tuned
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._private_search import (
    check_search_folder,
    interrupted_search,
    outcome_lines,
    run_search,
    search_lines,
)
from dpfunc.train._search import noise_of, prepare_private, prepare_public
from dpfunc.train._search_runs import noisy, run_public, score
from dpfunc.train.config import job_from_dict
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
    if prepared.job.task == "text_classification":  # and on features that were computed before
        job, held_out = dataclasses.replace(prepared.job, strategy="head"), prepared.records.evaluation
        kept = compute_frozen(job, prepared.model, prepared.records, shows=False)[0].evaluation
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
    return prepare_public(all_trials(*flags, **options), Path(public))


def test_public_runs_have_the_noise_of_the_private_run(here):
    """Also where earlier runs are counted; and no private record is in the search."""
    Path("earlier.json").write_text(Ledger((Event(1.0, 2.0, 1),)).to_json())
    for flags in (["--dp_warn_at", "0.5"], ["--spent", "earlier.json"]):
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
    search = searched("--dp-dataset-size", "250")  # also where there are fewer public records
    assert len(search.records.train) < search.size == 250
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


def test_all_combinations_are_tried(here):
    found = all_trials(grid=["batch_size=16,32", "lora.rank=2,4"], factors="0.5,2")
    assert len(found) == 8
    one, two, three = prepare_public(found[:3], PUBLIC).candidates
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


@pytest.mark.parametrize("strategy", ["head", "lora", "full"])
@pytest.mark.parametrize("given", ["", "dp_clip: adaptive", "per_sample_max_grad_norm: 2.0"])
def test_the_written_job_trains_as_its_candidate_was_compared(tmp_path, monkeypatch, strategy, given):
    """All that a recipe decides: the file gives rate, batch size and steps, so that no recipe is found for it again."""
    path = write_job(tmp_path, "text_classification", "bert", extra=f"strategy: {strategy}\n")
    text = path.read_text().replace(", init: random", "").replace("dp_max_grad_norm: 1.0", given or "dp_enabled: true")
    path.write_text(text.replace("learning_rate: 1e-2, batch_size: 32, steps: 4, ", ""))
    write_table(tmp_path / PUBLIC, 200, seed=5)
    monkeypatch.chdir(tmp_path)
    (candidate,) = searched().candidates
    job = candidate.prepared.job
    Path("tuned.yaml").write_text(yaml.safe_dump(tuned(read_yaml("job.yaml"), job)))
    found = prepare(read_job("tuned.yaml"))
    noise, clip = found.plan.noise_multiplier, job.privacy.clip()
    assert found.plan == dataclasses.replace(candidate.plan, noise_multiplier=noise, clip=clip)
    assert math.isclose(noise_of(found.plan), noise_of(candidate.plan), rel_tol=1e-9)
    kept = {"save_steps": found.job.training.save_steps, "seed": found.job.training.seed}
    assert found.job.training == dataclasses.replace(job.training, **kept)
    assert (found.job.lora, found.job.model) == (job.lora, job.model)


def test_each_candidate_gets_its_mean_score(here, monkeypatch):
    keys = []
    monkeypatch.setattr(_search_runs, "train_candidate", lambda candidate, folder, key: keys.append(key))
    monkeypatch.setattr(_search_runs, "score", lambda prepared, model, records: 0.25 * len(records) * len(keys))
    assert list(run_public(searched(factors="1,2,3"))) == [0.25, 0.5, 0.75]
    assert len({bytes(key.secret) for key in keys}) == 3


# private records

RUNS, NOISE = RunCount(4.0, 1.0), 3.0
SETTINGS = {"runs": RUNS, "score_noise": NOISE}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a job that holds out a fifth of its table, and its search."""
    folder = tmp_path_factory.mktemp("search")
    write_job(folder, "text_classification", "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder, prepare_private(all_trials(factors=None), **SETTINGS)


@pytest.fixture
def search(place, tmp_path, monkeypatch):
    """The search, into a new folder."""
    monkeypatch.chdir(place[0])
    job = dataclasses.replace(place[1].job, output_dir=str(tmp_path / "run"))
    return dataclasses.replace(place[1], job=job)


def runs_of(seed, search):
    return search.runs.quantile(float(stream(fold_in(insecure_key(seed), "number of runs")).random()))


def files(search):
    folder = Path(search.job.output_dir)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_whole_search_costs_the_budget(search):
    """Each candidate has more noise than without a search; training and score together cost what the job allows."""
    assert len(search.candidates) == 3
    rates = [candidate.prepared.job.training.learning_rate for candidate in search.candidates]
    assert rates == pytest.approx([0.003, 0.01, 0.03])
    for candidate in search.candidates:
        assert noise_of(candidate.plan) > candidate.alone
        job = candidate.prepared.job  # of which the Trainer makes its own plan: it must be the one that was counted
        again = job.privacy.plan(search.size, job.batch_size, job.training.steps)
        assert again.ledger() == candidate.plan.ledger()
        assert (job.training.report_to, job.training.eval_steps) == (None, None)
    assert 7.9 < search.cost.epsilon <= 8.0
    assert (
        selection_epsilon(RUNS, [each.plan.ledger() for each in search.candidates], 1e-3).epsilon <= search.cost.epsilon
    )
    text = "\n".join(search_lines(search))
    assert "runs: 4 on average, with probability 0.99 at most 17" in text
    assert "epsilon=8 at delta=0.001" in text


def test_earlier_runs_are_counted(search, place):
    (place[0] / "earlier.json").write_text(Ledger((Event(1.0, 2.0, 1),)).to_json())
    again = prepare_private(all_trials("--spent", "earlier.json", factors=None), **SETTINGS)
    assert noise_of(again.candidates[0].plan) > noise_of(search.candidates[0].plan)
    assert again.cost.epsilon <= 8.0
    with pytest.raises(DPFuncError, match="Expected a budget that some noise can meet"):
        prepare_private(all_trials("--spent", "earlier.json", factors=None), runs=RUNS, score_noise=0.1)


def test_the_best_run_alone_is_released(search, monkeypatch):
    made = MadeUpRuns(monkeypatch)
    record, nothing = run_search(dataclasses.replace(search, score_noise=1e-9), insecure_seed=2101)
    best = max(range(len(made.scores)), key=made.scores.__getitem__)
    assert len(made.keys) == runs_of(2101, search) > 1
    assert len(set(made.keys)) == len(made.keys)
    assert (Path(search.job.output_dir) / "model" / "a.safetensors").read_text() == made.keys[best].hex()
    assert record.chosen_score == pytest.approx(made.scores[best], abs=1e-6)
    assert nothing is None
    assert files(search) == ["job.json", "model", "model/a.safetensors", "privacy_accounting.json"]
    written = (Path(search.job.output_dir) / "privacy_accounting.json").read_text()
    assert SelectionRecord.from_json(written) == record
    left = "".join(path.read_text() for path in Path(search.job.output_dir).rglob("*") if path.is_file())
    assert [key for key in made.keys if key.hex() in left] == [made.keys[best]]


def test_the_score_has_its_noise(search, monkeypatch):
    """What is compared and written has noise of the declared size, from a key of its own."""
    made = MadeUpRuns(monkeypatch)
    found = run_search(dataclasses.replace(search, runs=RunCount(1.0, 1.0)), insecure_seed=2130)[0].chosen_score
    key = fold_in(insecure_key(2130), "run", 0)
    assert found == noisy(made.scores[0], NOISE, fold_in(key, "score"))
    assert found != made.scores[0]
    assert noisy(0.0, 1.0, fold_in(key, "training")) != noisy(0.0, 1.0, fold_in(key, "score"))


def test_nothing_tells_how_many_runs_there_were(search, monkeypatch, capfd):
    seen = []
    for seed in (2101, 2102):
        MadeUpRuns(monkeypatch)
        job = dataclasses.replace(search.job, output_dir=f"{search.job.output_dir}-{seed}")
        one = dataclasses.replace(search, job=job)
        before = time.time()
        run_search(one, insecure_seed=seed)
        folder = Path(job.output_dir)
        shape = {str(p.relative_to(folder)): len(p.read_text()) for p in (folder / "model").rglob("*")}
        assert min(path.stat().st_mtime for path in folder.rglob("*")) > before - 1
        record = json.loads((folder / "privacy_accounting.json").read_text())
        released = ("chosen", "chosen_score", "weights", "date", "digest", "run")
        hidden = {name: value for name, value in record.items() if name not in released}
        seen.append((shape, hidden, capfd.readouterr()))
    assert runs_of(2101, search) != runs_of(2102, search)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("part", ["make_trainer", "score"])
def test_a_run_says_nothing(search, monkeypatch, tmp_path, caplog, capfd, recwarn, part):
    """Whatever libraries print, log or warn of in a run: a line for each would be the number of runs."""

    def loud(*arguments):
        logging.getLogger("transformers").error("trained")
        warnings.warn("trained", stacklevel=1)
        print("trained")
        print("trained", file=sys.stderr)
        raise KeyboardInterrupt

    if part == "score":
        MadeUpRuns(monkeypatch)
    monkeypatch.setattr(_search_runs, part, loud)
    with pytest.raises(KeyboardInterrupt):
        _search_runs.evaluate(search.candidates[0], tmp_path / "run", insecure_key(5))
    assert (caplog.records, recwarn.list, capfd.readouterr()) == ([], [], ("", ""))
    logging.getLogger("dpfunc").error("after it")
    assert [each.message for each in caplog.records] == ["after it"]


@pytest.mark.parametrize(
    "error", [FloatingPointError("no number"), IndexError("row 7")], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("failing", [range(0, 1), range(1, 100)], ids=["first", "all but the first"])
def test_a_run_that_fails_is_a_run(search, monkeypatch, failing, error):
    made = MadeUpRuns(monkeypatch, failing=failing, error=error)
    record, _ = run_search(search, insecure_seed=2108)
    assert len(made.keys) == runs_of(2108, search) > 2
    assert record.chosen is not None


def test_a_full_disk_is_no_run_that_fails(search, monkeypatch):
    """The search goes on from before that run, with the result of one whose disk was never full."""
    MadeUpRuns(monkeypatch, failing=[1], error=NotWritten("No space left on device"))
    with pytest.raises(NotWritten):
        run_search(search, insecure_seed=2108)
    made = MadeUpRuns(monkeypatch)
    run_search(search, resume=True, insecure_seed=2108)
    assert len(made.keys) == runs_of(2108, search) - 1


@pytest.mark.parametrize(
    ("runs", "why"), [(RUNS, "all runs failed. Why is private"), (RunCount(1.0, math.inf), "no run was drawn")]
)
def test_no_run_is_released(search, monkeypatch, runs, why):
    """Of errors nothing is told, nor their type: a record may decide it."""
    MadeUpRuns(monkeypatch, failing=range(100))
    own = dataclasses.replace(search, runs=runs)
    seed = 2104 if runs is RUNS else next(seed for seed in range(3000, 3100) if not runs_of(seed, own))
    record, nothing = run_search(own, insecure_seed=seed)
    assert record.chosen is None
    assert nothing.startswith(why)
    assert "Error" not in nothing
    assert files(search) == ["privacy_accounting.json"]


OTHER_RUNS = {  # what the record of one of them says, and what is told
    "other steps": ({"ledger": Ledger((Event(1.0, 50.0, 2),))}, "a run with the steps that the search counts for it"),
    "other noise": ({"noise_source": SOURCES["device"]}, "runs with the settings of those before"),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_each_run_is_one_that_the_record_tells_of(search, monkeypatch, name):
    """Not the released one alone: all of them were compared, and cost."""
    changes, message = OTHER_RUNS[name]
    made = MadeUpRuns(monkeypatch)

    def second_is_another(candidate, folder, key):
        model = made.train(candidate, folder, key)
        if len(made.keys) == 2:
            path = folder / "privacy_accounting.json"
            path.write_text(dataclasses.replace(Record.from_json(path.read_bytes()), **changes).to_json())
            model.value = -1e9
        return model

    monkeypatch.setattr(_search_runs, "train_candidate", second_is_another)
    with pytest.raises(CheckpointError, match=message):
        run_search(search, insecure_seed=2108)
    assert len(made.keys) == 2
    assert set(files(search)) & {"model", "privacy_accounting.json"} == set()


def test_a_search_says_that_it_tells_nothing_of_earlier_runs(search, monkeypatch):
    MadeUpRuns(monkeypatch)
    found = run_search(dataclasses.replace(search, spent=Ledger((Event(1.0, 200.0, 1),))), insecure_seed=2101)
    assert OTHER_STEPS in found[0].not_covered
    assert OTHER_STEPS in "\n".join(outcome_lines(found, "run", None))


@pytest.mark.parametrize("interrupted", [0, 2])
def test_a_killed_search_goes_on_with_the_same_result(search, monkeypatch, interrupted):
    whole = MadeUpRuns(monkeypatch)
    other = dataclasses.replace(search.job, output_dir=f"{search.job.output_dir}-whole")
    expected = run_search(dataclasses.replace(search, job=other), insecure_seed=2112)[0]
    assert len(whole.keys) > 2
    first = MadeUpRuns(monkeypatch, interrupted=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_search(search, insecure_seed=2112)
    assert set(files(search)) & {"model", "privacy_accounting.json", "job.json"} == set()
    assert "Nothing was released" in interrupted_search(search.job)
    with pytest.raises(InvalidArgument, match="Expected an empty output_dir"):
        run_search(search, insecure_seed=2112)
    rest = MadeUpRuns(monkeypatch)
    found = run_search(search, resume=True, insecure_seed=2112)[0]
    assert first.keys + rest.keys[1:] == whole.keys
    assert dataclasses.replace(found, date="") == dataclasses.replace(expected, date="")
    assert (Path(search.job.output_dir) / "model" / "a.safetensors").read_text() == (
        Path(other.output_dir) / "model" / "a.safetensors"
    ).read_text()
    with pytest.raises(CheckpointError, match="Expected an interrupted search"):
        check_search_folder(search.job, resume=True)


def test_a_kill_while_the_best_run_is_released(search, monkeypatch):
    MadeUpRuns(monkeypatch)
    write = _private_search.folders.write_job

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(_private_search.folders, "write_job", killed)
    with pytest.raises(KeyboardInterrupt):
        run_search(search, insecure_seed=2106)
    assert "the whole budget counts as spent" in interrupted_search(search.job)
    monkeypatch.setattr(_private_search.folders, "write_job", write)
    delete = _private_search.shutil.rmtree
    monkeypatch.setattr(_private_search.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run_search(search, resume=True, insecure_seed=2106)
    assert "search/state.json" in files(search)
    place = Path(search.job.output_dir) / "privacy_accounting.json"
    own = SelectionRecord.from_json(place.read_text())
    assert own.run == fingerprint(insecure_key(2106))
    place.write_text(dataclasses.replace(own, run="0" * 16).to_json())
    with pytest.raises(InvalidArgument, match="It is of another search"):
        run_search(search, resume=True, insecure_seed=2106)
    place.write_text(own.to_json())
    monkeypatch.setattr(_private_search.shutil, "rmtree", delete)
    assert run_search(search, resume=True, insecure_seed=2106)[1] is None
    assert files(search) == ["job.json", "model", "model/a.safetensors", "privacy_accounting.json"]


CHANGED = {
    "another score": (lambda s: dataclasses.replace(s, score_noise=4.0), "score_noise"),
    "more runs": (lambda s: dataclasses.replace(s, runs=RunCount(5.0, 1.0)), "mean_runs"),
    "fewer candidates": (lambda s: dataclasses.replace(s, candidates=s.candidates[:2]), "candidates"),
    "other records": (
        lambda s: dataclasses.replace(s, records=dataclasses.replace(s.records, train=s.records.train[1:])), "train",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_another_search_is_not_resumed(search, monkeypatch, name):
    MadeUpRuns(monkeypatch, interrupted=0)
    with pytest.raises(KeyboardInterrupt):
        run_search(search, insecure_seed=2107)
    change, named = CHANGED[name]
    with pytest.raises(CheckpointError, match=f"{named}.* differ"):
        run_search(change(search), resume=True, insecure_seed=2107)
    with pytest.raises(CheckpointError, match="insecure_seed differ"):
        run_search(search, resume=True)
    state = Path(search.job.output_dir) / "search" / "state.json"
    assert state.stat().st_mode & 0o077 == 0
    state.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        run_search(search, resume=True, insecure_seed=2107)


NOT_PRIVATE = {  # flags, settings, message
    "no part to compare on": (["--eval_fraction", "0"], {}, "eval_fraction > 0"),
    "another table": (["--data.eval", "mails.jsonl"], {}, "eval_fraction > 0"),
    "a part without a record": (["--eval_fraction", "1e-9"], {}, "records to compare on"),
    "replaced records": (["--dp-adjacency", "replace_one"], {}, "add_remove or zero_out"),
    "a noise multiplier": (["--dp-noise-multiplier", "1"], {}, "budget of the whole search"),
    "a logger": (["--report-to", "tensorboard"], {}, "shows each run"),
    "a logged loss": (["--dp-log-unreleased"], {}, "dp_log_unreleased"),
    "no noise of a score": ([], {"score_noise": 0.0}, "score_noise"),
}


@pytest.mark.parametrize("name", NOT_PRIVATE)
def test_jobs_that_are_not_private_are_refused(place, monkeypatch, name):
    monkeypatch.chdir(place[0])
    flags, changes, message = NOT_PRIVATE[name]
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        prepare_private(all_trials(*flags, factors=None), **{**SETTINGS, **changes})


def test_a_search_takes_the_rest_of_a_budget(place, tmp_path, monkeypatch):
    """It counts what others are charged, reserves before its first run, and nothing fits after it."""
    budget = Budget(place[0] / "budget.db", run="later", spender="ana").create(
        epsilon=8.0, delta=1e-3, unit=ONE_RECORD, adjacency="add_remove", spenders=["ana"],
        earlier=Ledger((Event(1.0, 2.0, 1),)),
    )  # fmt: skip
    monkeypatch.chdir(place[0])
    flags = ("--budget", "budget.db", "--budget_run", "search", "--budget_spender", "ana")
    again = prepare_private(all_trials(*flags, "--output_dir", str(tmp_path / "run"), factors=None), **SETTINGS)
    assert again.spent == budget.account().ledger()
    MadeUpRuns(monkeypatch)
    run_search(again, insecure_seed=2101)
    assert budget.account().closed
    with pytest.raises(BudgetExhausted, match="A search has reserved all"):
        budget.reserve(Ledger((Event(1.0, 100.0, 1),)), "later", unit=ONE_RECORD)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer", "adamm"], "adamm is not a valid OptimizerNames"),
        (["--optimizer", "galore_adamw"], "optimizer"),  # which needs another package, and settings
    ],
)
def test_a_fault_of_every_run_is_found_before_the_budget_is_reserved(place, tmp_path, monkeypatch, flags, message):
    """Each run would fail, as one that counts: the whole budget would be spent, and nothing released."""
    budget = Budget(tmp_path / "budget.db").create(
        epsilon=8.0, delta=1e-3, unit=ONE_RECORD, adjacency="add_remove", spenders=["ana"]
    )
    monkeypatch.chdir(place[0])
    names = ("--budget", str(tmp_path / "budget.db"), "--budget_run", "search", "--budget_spender", "ana")
    with pytest.raises(ValueError, match=message):
        run_search(prepare_private(
            all_trials(*names, *flags, "--output_dir", str(tmp_path / "run"), factors=None), **SETTINGS
        ))  # fmt: skip
    assert not budget.account().entries
    assert not (tmp_path / "run").exists()


BY_A_BUDGET = {  # what the budget of the data set is made with instead, and what a search is told
    "too small": ({"epsilon": 4.0}, BudgetExhausted, "Lower the epsilon of the search"),
    "another delta": ({"delta": 1e-4}, InvalidArgument, "This is the delta of the budget"),
    "another spender": ({"spenders": ["ben"]}, InvalidArgument, "These may spend"),
    "another unit": ({"unit": "one patient"}, InvalidArgument, "what the budget protects"),
}


@pytest.mark.parametrize(("change", "error", "message"), BY_A_BUDGET.values(), ids=BY_A_BUDGET)
def test_a_search_asks_its_budget_before_anything_is_written(place, tmp_path, monkeypatch, change, error, message):
    """In a dry run, too; and the folder is as it was, so that the same command can be given again."""
    facts = {"epsilon": 8.0, "delta": 1e-3, "unit": ONE_RECORD, "adjacency": "add_remove", "spenders": ["ana"]}
    Budget(tmp_path / "budget.db").create(**{**facts, **change})
    monkeypatch.chdir(place[0])
    names = ("--budget", str(tmp_path / "budget.db"), "--budget_run", "search", "--budget_spender", "ana")
    with pytest.raises(error, match=message):
        prepare_private(all_trials(*names, "--output_dir", str(tmp_path / "run"), factors=None), **SETTINGS)
    assert not (tmp_path / "run").exists()


def test_a_search_that_its_budget_refuses_at_last_can_be_begun_again(place, tmp_path, monkeypatch):
    """Another run has reserved between the plan of the search and its begin."""
    budget = Budget(tmp_path / "budget.db", run="other", spender="ana").create(
        epsilon=8.0, delta=1e-3, unit=ONE_RECORD, adjacency="add_remove", spenders=["ana"]
    )
    monkeypatch.chdir(place[0])
    names = ("--budget", str(tmp_path / "budget.db"), "--budget_run", "search", "--budget_spender", "ana")
    flags = (*names, "--output_dir", str(tmp_path / "run"))
    early = prepare_private(all_trials(*flags, factors=None), **SETTINGS)
    budget.reserve(Ledger((Event(1.0, 20.0, 1),)), "other", unit=ONE_RECORD)
    MadeUpRuns(monkeypatch)
    with pytest.raises(LedgerConflict, match="counts all charges"):
        run_search(early)
    run_search(prepare_private(all_trials(*flags, factors=None), **SETTINGS), insecure_seed=2101)
    assert budget.account().closed
