"""`dpfunc train` and `dpfunc tune`: dry run, resume after a kill, the twin, refusals, and what is said at the end."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from search_cases import MadeUpRuns
from text_job import (
    JOURNAL,
    ROOT,
    at_events,
    finished_job,
    interrupt_at,
    record,
    run,
    train,
    weights,
    write_job,
    write_table,
)

import dpfunc
from dpfunc.accounting import RunCount
from dpfunc.accounting.accountant import upper
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.cli._train import _interruptible
from dpfunc.errors import NotWritten
from dpfunc.rng import fold_in, insecure_key, stream
from dpfunc.train._config_file import read_job
from dpfunc.train._model import load_base, load_processing
from dpfunc.train._run_folder import interrupted
from dpfunc.train.config import SECTIONS, TASKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return finished_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder[0])
    return folder[0]


def test_what_a_run_says_and_leaves(folder, here):
    for text in (
        "Spent: epsilon=7.99", "at delta=0.001 (tilted; rdp says", "Saved: run/model",
        "Not covered by epsilon: metrics on the evaluation records, a choice between runs",
    ):  # fmt: skip
        assert text in folder[1]
    values = record("run")
    assert values["epsilon"] <= 8.0
    assert (values["target_epsilon"], values["global_step"], values["delta"]) == (8.0, 4, 1e-3)
    assert json.loads(Path("run/job.json").read_text())["insecure_seed"] is None
    names = {path.name for path in Path("run/model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names


@pytest.mark.parametrize("flags", [["--dry-run"], ["--no-dp"], []], ids=["dry run", "twin", "run"])
def test_json_is_all_that_stdout_has(here, flags):
    """One value: what would be printed, and the record of a private run. All else is on stderr."""
    plain = train(*flags, "--output_dir", "plain" + "".join(flags))
    result = train(*flags, "--output_dir", "json" + "".join(flags), "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert all(line in result.stderr for line in values["report"])
    names = [line.split(":")[0] for line in values["report"]]
    assert names == [line.split(":")[0] for line in plain.stdout.splitlines() if line.split(":")[0] in names]
    assert values["record"] == (None if flags else record("json"))
    if not flags:
        known = values["record"]
        assert (known["unit"], known["noise_key"]) == ("one record of the training data set", "secret")
        assert run("ledger", "check", "json").exit_code == 0
        assert "epsilon" in run("ledger", "show", "json").stdout


def test_the_twin_has_a_folder_of_its_own(here):
    for more in ([], ["--dry-run"]):
        assert "Expected no --insecure-seed without privacy" in train("--no-dp", "--insecure-seed", 3, *more).stderr
    result = train("--no-dp")
    assert result.exit_code == 0, result.output
    assert "epsilon=inf. This is the twin without privacy" in result.stdout
    assert not Path("run-no-dp/privacy_accounting.json").exists()
    assert weights("run-no-dp")
    used = train("--no-dp")
    assert used.exit_code == 1
    assert "run-no-dp" in used.stderr


def test_the_twin_needs_no_privacy_arguments(here):
    text = Path("job.yaml").read_text().replace("dp_epsilon: 8, dp_delta: 1e-3, dp_max_grad_norm: 1.0", "dp_clip: flat")
    Path("bare.yaml").write_text(text)
    assert run("train", "bare.yaml", "--dry-run").exit_code == 1
    result = run("train", "bare.yaml", "--no-dp", "--dry-run", "--output_dir", "other")
    assert "epsilon: inf (the twin without privacy)" in result.stdout


def test_an_interrupt_says_what_was_spent(here, monkeypatch):
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(3))
        result = train("--output_dir", "stopped")
    assert result.exit_code == 1
    said, aborted = [line for line in result.stderr.splitlines() if line][-2:]
    assert aborted == "Aborted!"
    journal = Path("stopped", JOURNAL)
    spent = journal_ledger(journal)
    assert spent.num_steps == 3
    assert (
        f"The journal has 3 steps, which spent epsilon={upper(spent.epsilon(1e-3).epsilon, 4)} at delta=0.001." in said
    )
    assert f"--spent {journal}." in said
    assert said.endswith("--resume goes on with this run.")
    assert train("--output_dir", "stopped", "--resume").exit_code == 0
    dry = train("--output_dir", "other", "--spent", journal, "--dry-run")
    assert "with 4 steps of earlier runs" in dry.stdout


def test_an_interrupt_of_the_twin(here, monkeypatch):
    flags = ["--output_dir", "first", "--no-dp"]
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(1))
        stopped = train(*flags).stderr
    assert "The twin without privacy spends nothing. The same command starts it again." in stopped
    assert train(*flags, "--resume").exit_code == 0


def test_only_the_process_that_writes_speaks_of_an_interrupt(here, capsys):
    job = read_job("job.yaml", ["--output_dir", "nowhere"])
    said = []
    for writes in (True, False):
        with pytest.raises(KeyboardInterrupt), _interruptible(job, interrupted, writes):
            raise KeyboardInterrupt
        said.append(capsys.readouterr().err)
    assert said[0].startswith("\nInterrupted before the first step was released: nothing was spent.")
    assert said[1] == ""


@pytest.mark.parametrize("package", ["yaml", "pydantic"])
def test_a_package_that_is_missing_is_named(here, monkeypatch, package):
    monkeypatch.setattr(dpfunc, "train", importlib.import_module("dpfunc.train"))  # the import below binds another
    for name in [name for name in sys.modules if name.startswith("dpfunc.train")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = train("--dry-run")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert package in result.stderr
    assert 'pip install "dpfunc[hf]"' in result.stderr


def test_only_what_the_extra_installs_is_asked_for(here, monkeypatch):
    """Another library that misses a package of its own says so itself."""
    run = importlib.import_module("dpfunc.train.run")

    def lacks(job, **options):
        raise ImportError("GaLore needs galore_torch")

    monkeypatch.setattr(run, "run_job", lacks)
    result = train("--output_dir", "other")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert result.stderr == "Error: GaLore needs galore_torch.\n"


# The guide

GUIDE = ROOT / "docs" / "guides" / "train.md"


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.slow
def test_commands_of_the_guide_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)  # for its tokenizer and its configuration
    job = read_job("job.yaml")
    processing = load_processing(job)
    load_base(job, processing).save_pretrained("my-model")
    processing.save_pretrained("my-model")
    write_table(Path("mails.jsonl"), 600)
    Path("job.yaml").write_text(blocks("yaml")[0])
    Path("prompts.jsonl").write_text(blocks("json")[0])
    commands = [shlex.split(line) for block in blocks("sh") for line in block.replace("\\\n", "").splitlines()]
    assert [command[0] for command in commands].count("dpfunc") == 9
    for command in commands:
        if command[0] == "torchrun":  # tests/distributed/test_launch.py starts such commands
            assert command[1:5] == ["--nproc-per-node", "2", "-m", "dpfunc.cli.main"]
            command = command[4:]
        result = run(*command[1:])
        assert result.exit_code == 0, (command, result.output)
    names = {path.name for path in Path("runs/mails").iterdir()}
    assert {"model", "privacy_accounting.json", "privacy_journal.jsonl", "job.json"} <= names
    assert {"mails", "mails-3", "mails-again", "mails-launched", "mails-no-dp"} == {
        path.name for path in Path("runs").iterdir()
    }
    assert len(Path("texts.jsonl").read_text().splitlines()) == 20


def test_every_key_is_in_the_guide_with_its_default():
    guide = GUIDE.read_text()
    for section, cls in SECTIONS.items():
        for key in dataclasses.fields(cls):
            shown = "required" if key.default is dataclasses.MISSING else f"`{key.default}`"
            shown = {"`None`": "", "`True`": "`true`", "`False`": "`false`"}.get(shown, shown)
            assert f"| `{key.name}` | {shown} |" in guide, f"{section}.{key.name}"


def test_the_guide_has_the_strategies_of_each_task():
    table = GUIDE.read_text().partition("| task | strategies |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:3]] for row in table.splitlines()]
    found = {task: tuple(re.findall(r"`(\w+)`", cell)) for tasks, cell in rows for task in tasks.split(", ")}
    assert found == {task: facts.strategies for task, facts in TASKS.items()}


# Searches, with real runs

PRIVATE = ("--private", "--mean-runs", 2, "--score-noise", 2)


def tune(*arguments):
    return run("tune", "job.yaml", *arguments)


@pytest.fixture
def searched(tmp_path, monkeypatch):
    path = write_job(tmp_path, "text_classification", "bert")
    path.write_text(
        path.read_text().replace(", init: random", "").replace("mails.jsonl,", "private.jsonl,") + "strategy: head\n"
    )
    (tmp_path / "mails.jsonl").rename(tmp_path / "private.jsonl")
    write_table(tmp_path / "public.jsonl", 200, seed=5)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything():
    return sorted(str(path) for path in Path.cwd().rglob("*"))


def seed_of(count, first):
    """An insecure seed with which a search has so many runs."""
    runs = RunCount(2.0, 1.0)
    return next(
        seed for seed in range(first, first + 1000)
        if runs.quantile(float(stream(fold_in(insecure_key(seed), "number of runs")).random())) == count
    )  # fmt: skip


def without_values(text):
    """A report without the numbers in which two searches may differ, and without the bar that loads their model."""
    text = re.sub(r"Loading weights:[^\r\n]*[\r\n]*", "", text)  # it shows as many steps as the machine has time for
    text = re.sub(r"insecure-seed \d+|--output_dir \S+|other\d", "", text)
    text = re.sub(r"Best: .*", "", text)
    return re.sub(r"\d+:\d+:\d+|\d+\.\d+it/s|[\d:]+<[\d:?]+|[█▏▎▍▌▋▊▉]+", "", text)


def test_a_private_search_shows_its_best_run_and_no_other(searched):
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


def test_a_public_search_writes_a_job_that_trains(searched):
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
def test_dry_run_of_a_search_writes_nothing(searched, mode):
    before = everything()
    result = tune(*mode, "--dp-dry-run" if mode == PRIVATE else "--dry-run")
    assert result.exit_code == 0, result.output
    assert "Nothing was trained, written or spent." in result.stdout
    assert everything() == before
    if mode == PRIVATE:
        for text in ("runs: 2 on average, with probability 0.99", "without a search", "one run would cost epsilon="):
            assert text in result.stdout, text


OPTIONS = {
    "neither": ([], "either --public FILE or --private"),
    "both": (["--private", "--public", "public.jsonl"], "either --public FILE or --private"),
    "no mean": (["--private", "--score-noise", 2], "Missing option '--mean-runs'"),
    "no noise": (["--private", "--mean-runs", 2], "Missing option '--score-noise'"),
    "a mean for public records": (["--public", "public.jsonl", "--mean-runs", 2], "--mean-runs with --private only"),
    "a law for public records": (["--public", "public.jsonl", "--runs", "poisson"], "--runs with --private only"),
    "resume for public records": (["--public", "public.jsonl", "--resume"], "--resume with --private only"),
    "another file for a private search": ([*PRIVATE, "--out", "x.yaml"], "--out with --public only"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_other_kind_are_refused(searched, name):
    before, (arguments, message) = everything(), OPTIONS[name]
    result = tune(*arguments)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output
    assert everything() == before


REFUSED = {
    "half a run": (["--private", "--mean-runs", 0.5, "--score-noise", 2], "1 <= mean"),
    "no noise": (["--private", "--mean-runs", 2, "--score-noise", 0], "score_noise"),
    "little noise": (["--private", "--mean-runs", 2, "--score-noise", 0.01], "Add more noise to the score"),
    "nothing to resume": ([*PRIVATE, "--resume"], "Expected an interrupted search"),
    "a grid": ([*PRIVATE, "--grid", "rate=1"], "--grid"),
    "several processes": (PRIVATE, "without torchrun"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(searched, monkeypatch, name):
    before, (arguments, message) = everything(), REFUSED[name]
    if name == "several processes":
        monkeypatch.setenv("WORLD_SIZE", "2")
    result = tune(*arguments)
    assert (result.exit_code, message in result.stderr) == (1, True), result.output
    assert everything() == before


def test_ctrl_c_says_what_was_spent_and_the_search_goes_on(searched, monkeypatch):
    seed = seed_of(3, 9500)
    MadeUpRuns(monkeypatch, interrupted=1)
    result = tune(*PRIVATE, "--insecure-seed", seed)
    assert (result.exit_code, "Nothing was released, so nothing was spent" in result.stderr) == (1, True), result.output
    MadeUpRuns(monkeypatch, failing=[0], error=NotWritten("The disk is full."))
    result = tune(*PRIVATE, "--insecure-seed", seed, "--resume")
    assert (result.exit_code, "Error: The disk is full. Stopped. Nothing was released" in result.stderr) == (1, True)
    MadeUpRuns(monkeypatch)
    result = tune(*PRIVATE, "--insecure-seed", seed, "--resume", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["record"]["schema"] == "dpfunc.selection/4"
