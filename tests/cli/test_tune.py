"""`dpfunc tune`: both searches with real runs, what they print, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from search_cases import MadeUpRuns
from text_job import run, train, write_job, write_table

from dpfunc.accounting import RunCount
from dpfunc.rng import fold_in, insecure_key, stream

PRIVATE = ("--private", "--mean-runs", 2, "--score-noise", 2)


def tune(*arguments):
    return run("tune", "job.yaml", *arguments)


@pytest.fixture
def here(tmp_path, monkeypatch):
    path = write_job(tmp_path, "text_classification", "bert")
    path.write_text(
        path.read_text().replace(", init: random", "").replace("mails.jsonl,", "private.jsonl,") + "strategy: head\n"
    )
    (tmp_path / "mails.jsonl").rename(tmp_path / "private.jsonl")
    write_table(tmp_path / "public.jsonl", 200, seed=5)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files():
    return sorted(str(path) for path in Path.cwd().rglob("*"))


def seed_of(count, first):
    """An insecure seed with which a search has so many runs."""
    runs = RunCount(2.0, 1.0)
    return next(
        seed for seed in range(first, first + 1000)
        if runs.quantile(float(stream(fold_in(insecure_key(seed), "number of runs")).random())) == count
    )  # fmt: skip


def without_values(text):
    """A report without the numbers in which two searches may differ."""
    text = re.sub(r"insecure-seed \d+|--output_dir \S+|other\d", "", text)
    text = re.sub(r"Best: .*", "", text)
    return re.sub(r"\d+:\d+:\d+|\d+\.\d+it/s|[\d:]+<[\d:?]+|[█▏▎▍▌▋▊▉]+", "", text)


def test_a_private_search_shows_its_best_run_and_no_other(here):
    """With one run and with three, everything that is printed and left behind looks the same."""
    seen = []
    for number, count in enumerate((1, 3)):
        result = tune(*PRIVATE, "--output_dir", f"other{number}", "--insecure-seed", seed_of(count, 9000))
        assert result.exit_code == 0, result.output
        assert "Spent by the whole search: epsilon=8 at delta=0.001" in result.stdout
        assert "BUT anybody can guess the noise" in result.stdout
        folder = Path(f"other{number}")
        seen.append((without_values(result.output), sorted(path.name for path in folder.rglob("*"))))
        record = json.loads((folder / "privacy_accounting.json").read_text())
        assert (record["epsilon"] <= 8.0, record["noise_key"]) == (True, "guessable")
        assert "how many" not in json.dumps(record)
        job = json.loads((folder / "job.json").read_text())
        chosen = record["candidates"][record["chosen"]]
        assert job["filled"]["training"]["learning_rate"] == chosen["learning_rate"]
        assert run("ledger", "check", folder).exit_code == 1  # the key is guessable
        assert "epsilon=7.99" in run("ledger", "show", folder, "--delta", 1e-3).stdout
    assert seen[0] == seen[1]
    refused = train("--spent", "other0/privacy_accounting.json")
    assert refused.exit_code == 1
    assert "the record of a search" in refused.stderr


def test_a_public_search_writes_a_job_that_trains(here):
    result = tune("--public", "public.jsonl", "--factors", "1e-4,30", "--steps", 20, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["search"]
    assert [each["learning_rate"] for each in found["candidates"]] == pytest.approx([1e-6, 0.3])
    scores = [each["score"] for each in found["candidates"]]
    best = found["best"]
    assert scores[best] == max(scores)
    assert all(0 <= score <= 1 for score in scores)
    assert Path("job.tuned.yaml").is_file()
    plan = run("train", "job.tuned.yaml", "--dry-run")
    assert plan.exit_code == 0, plan.output
    assert "steps: 20" in plan.stdout
    assert f"noise multiplier: {found['candidates'][best]['noise_multiplier']:.4g}" in plan.stdout
    rate = found["candidates"][best]["learning_rate"]
    assert yaml.safe_load(Path("job.tuned.yaml").read_text())["training"]["learning_rate"] == pytest.approx(rate)
    again = tune("--public", "public.jsonl")
    assert (again.exit_code, "Expected a new file" in again.stderr) == (1, True)


@pytest.mark.parametrize("mode", [PRIVATE, ("--public", "public.jsonl")], ids=["private", "public"])
def test_dry_run_writes_nothing(here, mode):
    before = files()
    result = tune(*mode, "--dp-dry-run" if mode == PRIVATE else "--dry-run")
    assert result.exit_code == 0, result.output
    assert "Nothing was trained, written or spent." in result.stdout
    assert files() == before
    if mode == PRIVATE:
        for text in ("runs: 2 on average, with probability 0.99", "without a search", "one run would cost epsilon="):
            assert text in result.stdout, text


OPTIONS = {
    "neither": ([], "either --public FILE or --private"),
    "both": (["--private", "--public", "public.jsonl"], "either --public FILE or --private"),
    "no mean": (["--private", "--score-noise", 2], "Missing option '--mean-runs'"),
    "no noise": (["--private", "--mean-runs", 2], "Missing option '--score-noise'"),
    "a mean for public records": (["--public", "public.jsonl", "--mean-runs", 2], "--mean-runs with --private only"),
    "resume for public records": (["--public", "public.jsonl", "--resume"], "--resume with --private only"),
    "another file for a private search": ([*PRIVATE, "--out", "x.yaml"], "--out with --public only"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_other_kind_are_refused(here, name):
    before, (arguments, message) = files(), OPTIONS[name]
    result = tune(*arguments)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output
    assert files() == before


REFUSED = {
    "half a run": (["--private", "--mean-runs", 0.5, "--score-noise", 2], "1 <= mean"),
    "no noise": (["--private", "--mean-runs", 2, "--score-noise", 0], "score_noise"),
    "little noise": (["--private", "--mean-runs", 2, "--score-noise", 0.01], "Add more noise to the score"),
    "nothing to resume": ([*PRIVATE, "--resume"], "Expected an interrupted search"),
    "a grid": ([*PRIVATE, "--grid", "rate=1"], "--grid"),
    "several processes": (PRIVATE, "without torchrun"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(here, monkeypatch, name):
    before, (arguments, message) = files(), REFUSED[name]
    if name == "several processes":
        monkeypatch.setenv("WORLD_SIZE", "2")
    result = tune(*arguments)
    assert (result.exit_code, message in result.stderr) == (1, True), result.output
    assert files() == before


def test_ctrl_c_says_what_was_spent_and_the_search_goes_on(here, monkeypatch):
    seed = seed_of(3, 9500)
    MadeUpRuns(monkeypatch, interrupted=1)
    result = tune(*PRIVATE, "--insecure-seed", seed)
    assert (result.exit_code, "Nothing was released, so nothing was spent" in result.stderr) == (1, True), result.output
    MadeUpRuns(monkeypatch)
    result = tune(*PRIVATE, "--insecure-seed", seed, "--resume", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["record"]["schema"] == "dpfunc.selection/2"
