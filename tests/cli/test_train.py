"""`dpfunc train`: dry run, resume after a kill, the twin, refusals, and what is said at the end."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from full_disk import allow
from safetensors.torch import load_file
from text_job import at_events, interrupt_at, run, train, write_job, write_table
from trainer_cases import again

import dpfunc
from dpfunc.checkpoint._chain import known_end
from dpfunc.checkpoint.journal import Journal, journal_ledger, read_steps
from dpfunc.cli._train import _interruptible
from dpfunc.hf.trainer._files import is_complete
from dpfunc.rng import insecure_key, secure_key
from dpfunc.train import _run_folder as run_folder
from dpfunc.train import run as train_job
from dpfunc.train._config_file import read_job
from dpfunc.train._model import load_base, load_processing
from dpfunc.train._run_folder import interrupted
from dpfunc.train.config import SECTIONS, STRATEGIES

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
JOURNAL = "privacy_journal.jsonl"
MODES = pytest.mark.parametrize("mode", [[], ["--dry-run"]], ids=["train", "dry run"])


def files(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in Path(folder).rglob("*"))


def adapters(folder):
    return load_file(f"{folder}/model/adapter_model.safetensors")


def same(one, two):
    one, two = adapters(one), adapters(two)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def record(folder):
    return json.loads(Path(folder, "privacy_accounting.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a job, and its finished run."""
    place = tmp_path_factory.mktemp("job")
    write_job(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        result = train()
    assert result.exit_code == 0, result.output
    return place, result.stdout


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder[0])
    return folder[0]


def test_T9_T12_what_a_run_says_and_leaves(folder, here):
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


def test_T8_the_adapter_opens_with_peft(here):
    from peft import PeftModel

    job = read_job("job.yaml")
    base = load_base(job, load_processing(job))
    before = base.state_dict()["model.layers.0.self_attn.q_proj.weight"].clone()
    model = PeftModel.from_pretrained(base, here / "run" / "model")
    trained = [value for name, value in model.named_parameters() if "lora_B" in name]
    assert any(value.abs().max() > 0 for value in trained)
    assert len(adapters("run")) == 2 * len(trained)
    assert torch.equal(before, model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight)


@MODES
def test_a_used_folder_is_refused(here, mode):
    before = files(here)
    result = train(*mode, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Expected an empty output_dir, got 'run'" in result.stderr
    assert "--resume" in result.stderr
    assert files(here) == before


def test_dry_run_writes_nothing(here):
    before = files(here)
    result = train("--dry-run", "--output_dir", "other")
    assert result.exit_code == 0, result.output
    for line in (
        "records: 120 to train on, 0 to evaluate on", "steps: 4", "logical batch: 32 expected, physical batch: 16",
        "sampling probability: 0.2667 (Poisson)", "noise multiplier: 0.5489, ", "at delta = 0.001, add_remove",
        "trained parameters: 512 of 3,504 (lora)", "memory: about", "one forward pass of 2 records",
        "Nothing was trained, written or spent.",
    ):  # fmt: skip
        assert line in result.stdout
    epsilon = result.stdout.split("epsilon: ")[1].split(" (tilted), ")
    assert 7.9 < float(epsilon[0]) <= 8.0 < float(epsilon[1].split(" ")[0])
    for flags in (["--dp_dry_run"], ["--dry_run"]):
        assert "Nothing was trained" in train(*flags, "--output_dir", "other").stdout
    assert files(here) == before


def test_memory_grows_with_the_physical_batch_only(here):
    def activations(*flags):
        output = train("--dry-run", "--output_dir", "other", *flags).stdout
        return float(output.split("activations ")[1].split(",")[0])

    small, large = activations("--physical_batch_size", 8), activations("--physical_batch_size", 32)
    assert 0 < small < 1
    assert 3.8 < large / small < 4.2
    assert activations("--physical_batch_size", 8, "--batch_size", 64) == small


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


def test_T15_the_twin_has_a_folder_of_its_own(here):
    result = train("--no-dp")
    assert result.exit_code == 0, result.output
    assert "epsilon=inf. This is the twin without privacy" in result.stdout
    assert not Path("run-no-dp/privacy_accounting.json").exists()
    assert adapters("run-no-dp")
    used = train("--no-dp")
    assert used.exit_code == 1
    assert "run-no-dp" in used.stderr


def test_the_twin_needs_no_privacy_arguments(here):
    text = Path("job.yaml").read_text().replace("dp_epsilon: 8, dp_delta: 1e-3, dp_max_grad_norm: 1.0", "dp_clip: flat")
    Path("bare.yaml").write_text(text)
    assert run("train", "bare.yaml", "--dry-run").exit_code == 1
    result = run("train", "bare.yaml", "--no-dp", "--dry-run", "--output_dir", "other")
    assert "epsilon: inf (the twin without privacy)" in result.stdout


@pytest.mark.slow
def test_L21_killed_command_resumes_bit_for_bit(here):
    flags = ["--steps", "40", "--save_steps", "5", "--physical_batch_size", "32", "--insecure-seed", "7"]
    whole = train(*flags, "--output_dir", "whole")
    assert whole.exit_code == 0, whole.output
    assert "anybody can guess the noise" in whole.stdout
    command = [sys.executable, "-m", "dpfunc.cli.main", "train", "job.yaml", *flags, "--output_dir", "killed"]
    process = subprocess.Popen(command, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not any(map(is_complete, Path("killed").glob("checkpoint-[1-9]*"))):
        assert process.poll() is None, "finished before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not Path("killed/model").exists()
    taken = {run: len(steps) for run, steps in read_steps(Path("killed", JOURNAL)).items()}
    resumed = train(*flags, "--output_dir", "killed", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert same("whole", "killed")
    after = {run: len(steps) for run, steps in read_steps(Path("killed", JOURNAL)).items()}
    assert sum(taken.values()) >= 5
    assert list(after) == list(taken)
    assert list(after.values()) == [40]
    assert record("whole")["epsilon"] == record("killed")["epsilon"]


@pytest.fixture(scope="module")
def early(folder):
    """A folder that a kill would leave after the first step, and one from before it."""

    def copied(trainer, state):
        shutil.copytree("early", "early-killed")
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder[0])
        at_events(patch, on_pre_optimizer_step=copied)
        assert train("--output_dir", "early", "--insecure-seed", 3).exit_code == 1
    return folder[0] / "early-killed"


BEFORE_THE_FIRST_STEP = {  # what is in the folder
    "a lock": [".dpfunc.lock"],
    "half a job": ["job.json.new"],
    "the job": ["job.json"],
    "the job and logs": ["job.json", "runs"],
    "a journal without lines": ["job.json", "journal"],
    "half a checkpoint": ["job.json", "journal", "checkpoint-0", "half"],
    "a checkpoint": ["job.json", "journal", "checkpoint-0"],
}


def left_in(folder, early, names):
    """A folder with these files of a run that was killed before its first step."""
    folder.mkdir()
    for name in names:
        if name == "journal":
            known_end(folder / "privacy_journal.jsonl")
        elif name == "half":
            (folder / "checkpoint-0" / "trainer_state.json").unlink()
        elif (early / name).is_dir():
            shutil.copytree(early / name, folder / name)
        elif (early / name).is_file():
            shutil.copy(early / name, folder)
        elif "." in name:
            (folder / name).touch()
        else:
            (folder / name).mkdir()


@pytest.mark.parametrize("mode", [[], ["--resume"]], ids=["start", "resume"])
@pytest.mark.parametrize("name", BEFORE_THE_FIRST_STEP)
def test_a_run_killed_before_its_first_step_begins_again(here, early, tmp_path, name, mode):
    """Whichever of the two is tried, and with the same result; where there is no job yet, there is nothing to resume."""
    names, flags = BEFORE_THE_FIRST_STEP[name], ["--output_dir", tmp_path / "again", "--insecure-seed", 3, *mode]
    left_in(tmp_path / "again", early, names)
    result = train(*flags, "--dry-run")
    if mode and "job.json" not in names:
        assert "found none. Start it without --resume." in result.stderr
        return
    assert result.exit_code == 0, result.output
    if name == "half a checkpoint":
        again(insecure_key(3))
        result = train(*flags)
        assert result.exit_code == 0, result.output
        assert journal_ledger(tmp_path / "again" / JOURNAL).num_steps == 4
        assert not (tmp_path / "again" / "checkpoint-0").exists()


def test_a_run_killed_at_its_first_step_goes_on(here, early, tmp_path):
    """Its start names --resume, and a journal that exists; the rest of the run is that of one that nobody killed."""
    target = tmp_path / "killed"
    shutil.copytree(early, target)
    start = train("--output_dir", target, "--insecure-seed", 3)
    assert start.exit_code == 1
    assert "which is not. Go on with the run there: --resume; or name another folder, --output_dir" in start.stderr
    assert f", and count what was spent here: --spent {target}/{JOURNAL}." in start.stderr
    for flags in (["--output_dir", target, "--resume"], ["--output_dir", tmp_path / "whole"]):
        again(insecure_key(3))
        assert train(*flags, "--insecure-seed", 3).exit_code == 0
    assert same(tmp_path / "whole", target)
    assert journal_ledger(target / JOURNAL).num_steps == 4


NOT_OURS = {  # what is in the folder besides, and what is said
    "a file of the user": (["notes.txt"], "which is not. Name another folder, --output_dir."),
    "a run that lost its journal": (["job.json", "checkpoint-0"], "which is not. Go on"),
    "a step without a checkpoint": (["job.json", "privacy_journal.jsonl", "privacy_journal.jsonl.head"], "--spent"),
    "a journal that lost a line": (["job.json", "privacy_journal.jsonl.head"], "those after it are missing"),
    "a model": (["job.json", "model"], "which is not. Name another folder, --output_dir."),
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_folder_in_which_something_may_have_been_released_is_not_used(here, early, tmp_path, name):
    names, said = NOT_OURS[name]
    left_in(tmp_path / "used", early, names)
    before = files(tmp_path)
    result = train("--output_dir", tmp_path / "used", "--insecure-seed", 3)
    assert result.exit_code == 1
    assert said in result.stderr
    assert ("--spent" in result.stderr) == ("--spent" in said)
    assert files(tmp_path) == before


def test_a_run_without_checkpoints_is_counted(here, monkeypatch):
    """The message says how, and the next noise is for what is left."""
    flags = ["--steps", "4", "--save_steps", "50"]
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(2))
        assert train(*flags, "--output_dir", "lost").exit_code == 1
    for path in Path("lost").glob("checkpoint-*"):
        shutil.rmtree(path)
    told = train(*flags, "--output_dir", "lost", "--resume")
    assert told.exit_code == 1
    assert train(*flags, "--output_dir", "lost", "--resume", "--dry-run").stderr == told.stderr
    (path,) = re.findall(r"--spent (\S+)", told.stderr)
    assert "The journal counts 2 steps" in told.stderr
    dry = train(*flags, "--output_dir", "next", "--spent", path, "--dry-run").stdout
    assert 7.9 < float(re.findall(r"with 2 steps of earlier runs: epsilon: (\S+) in all", dry)[0]) <= 8.0
    assert not Path("next").exists()
    result = train(*flags, "--output_dir", "next", "--spent", path)
    assert result.exit_code == 0, result.output
    spent = record("next")
    assert 7.9 < spent["epsilon"] <= 8.0
    assert spent["noise_multiplier"] > 1.1 * record("run")["noise_multiplier"]
    assert sum(event["num_steps"] for event in spent["ledger"]["events"]) == 6
    third = train(*flags, "--output_dir", "third", "--spent", "next/privacy_accounting.json", "--dp_epsilon", 7)
    assert third.exit_code == 1  # nothing is left of a smaller budget
    assert not Path("third").exists()
    assert train(*flags, "--output_dir", "next", "--resume").exit_code == 1  # without --spent it is another job


def test_a_folder_in_which_another_process_trains_is_refused(here):
    """Before anything is prepared, and with nothing written; also when it is resumed."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom dpfunc._utils.locks import only_process\n"
        "with only_process(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": here, "env": ENVIRONMENT}
    for name, flags in (("busy", []), ("run", ["--resume"])):
        with subprocess.Popen([sys.executable, "-c", code, name], **pipes) as other:
            assert other.stdout.readline() == b"held\n"
            before = files(here)
            result = train("--output_dir", name, *flags)
            other.communicate(b"")
        assert result.exit_code == 1
        said = f"Expected no other process in '{name}', got process {other.pid}, which trains there now"
        assert said in result.stderr
        assert "Two runs in one folder would publish one ledger for the steps of both" in result.stderr
        assert [path for path, _ in before if ".dpfunc.lock" in path]
    assert not Path("busy").exists()
    assert not Path("run/.dpfunc.lock").exists()


@pytest.mark.slow
def test_two_commands_at_the_same_time(here):
    """One of them trains, and its ledger has all that was taken."""
    command = [sys.executable, "-m", "dpfunc.cli.main", "train", "job.yaml", "--output_dir", "twice"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": here, "env": ENVIRONMENT}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    refused = said[[process.returncode for process in both].index(1)]
    assert "Expected no other process in" in refused or "Expected an empty output_dir" in refused
    assert journal_ledger(Path("twice", JOURNAL)).num_steps == record("twice")["global_step"] == 4


@pytest.mark.parametrize("step", [2, 4])
def test_a_model_is_saved_with_the_cost_of_its_whole_journal(here, monkeypatch, step):
    """Where locks do nothing, as on some file systems, the next step or the end finds steps of others."""
    journal = Path(f"mixed-{step}", JOURNAL)

    def other(trainer, state):
        if state.global_step == step:
            another = trainer._run.dp_step.init(trainer._run.params, secure_key())
            spent = journal_ledger(journal).compose(trainer.plan.ledger(1))
            Journal(journal, trainer.plan)(another._replace(step=1, ledger=spent))

    at_events(monkeypatch, on_step_end=other)
    result = train("--output_dir", journal.parent)
    assert result.exit_code == 1
    assert not (journal.parent / "model").exists()
    if step == 4:
        assert f"to count the steps of {journal}, Ledger(5 steps" in result.stderr
        assert f"--spent {journal}" in result.stderr
    else:
        assert f"{journal} one after the other" in result.stderr
        assert journal_ledger(journal).num_steps == 3


DAMAGED_JOBS = {
    "short": ('{"job": {"task"', "Expecting"),
    "empty": ("", "Expecting value"),
    "list": ("[1]", "it does not hold a job"),
    "no job": ("{}", "it does not hold a job"),
    "text": ('{"job": "x", "insecure_seed": null}', "it does not hold a job"),
    "deep": ("[" * 100_000, "its values are nested too deeply"),
    "bytes": ("\udcff\udcfe", "cannot be read"),
    "half a pair": ('{"job": {"task": "\\ud800"}, "filled": {}, "insecure_seed": null}', "was started with"),
}


@pytest.mark.parametrize("name", DAMAGED_JOBS)
def test_a_damaged_job_file_says_so(here, tmp_path, name):
    text, message = DAMAGED_JOBS[name]
    folder = tmp_path / "run"
    shutil.copytree(here / "run", folder)
    (folder / "job.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    drawn = ["generate", folder, "-n", 1, "--out", "x.jsonl"]
    for result in (train("--output_dir", folder, "--resume"), run(*drawn)):
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.exception
        if name != "half a pair":
            assert message in result.stderr
            assert f"--spent {folder}/{JOURNAL}" in result.stderr
    if name == "half a pair":
        assert message in train("--output_dir", folder, "--resume").stderr


RESUMES = {
    "no run": (["--resume", "--output_dir", "nowhere"], "Expected a run in 'nowhere' to resume, found none"),
    "another rate": (["--resume", "--learning_rate", "0.1"], "learning_rate was 0.01, now 0.1"),
    "another budget": (["--resume", "--dp_epsilon", "9"], "dp_epsilon was 8.0, now 9.0"),
    "another key": (["--resume", "--insecure-seed", "1"], "--insecure-seed was None, now 1"),
    "without privacy": (["--resume", "--dp_enabled", "false"], "dp_enabled was True, now False"),
}


@MODES
@pytest.mark.parametrize("name", RESUMES)
def test_what_cannot_be_resumed(here, name, mode):
    flags, message = RESUMES[name]
    before = files(here)
    result = train(*flags, *mode)
    assert result.exit_code == 1
    assert message in result.stderr
    assert files(here) == before


def test_a_finished_run_resumes_to_itself(here, tmp_path):
    shutil.copytree("run/model", tmp_path / "model")
    result = train("--resume", "--logging_steps", 1)
    assert result.exit_code == 0, result.output
    assert same(tmp_path, "run")
    before = files(here)
    assert "Nothing was trained" in train("--resume", "--dry-run").stdout
    assert files(here) == before


REFUSED = {  # flags, exit code, message
    "misspelt flag": (["--dp_epsilom", "3"], 2, "Did you mean one of: '--dp_epsilon',"),
    "no value": (["--steps"], 2, "Option '--steps' requires an argument"),
    "bad value": (["--dp_delta", "2"], 1, "0 < dp_delta < 1"),
    "text for a number": (["--steps", "ten"], 1, "Expected an integer, got --steps='ten'"),
    "optimizer": (["--optimizer", "adamm"], 1, "adamm is not a valid OptimizerNames"),
    "scheduler": (["--scheduler", "x"], 1, "x is not a valid SchedulerType"),
    "no model": (["--model.path", "nowhere"], 1, "got model.path='nowhere': there is no such folder here"),
    "no tokenizer": (["--model.tokenizer", "a/b/c"], 1, "got model.tokenizer='a/b/c': there is no such folder here"),
    "misspelt logger": (["--report_to", "tensorbord"], 1, "Did you mean 'tensorboard'?"),
    "unknown logger": (["--report_to", "x"], 1, "report_to to be one of 'azure_ml', 'clearml',"),
    "logger not installed": (["--report_to", "none-such"], 1, "got report_to='none-such', which is not. Install it"),
    "folder under a file": (["--output_dir", "mails.jsonl/x"], 1, "'mails.jsonl' is a file. Name another folder"),
    "folder is a file": (["--output_dir", "mails.jsonl"], 1, "'mails.jsonl' is a file. Name another folder"),
    "folder not ours": (["--output_dir", "locked/x"], 1, "'locked' may not be"),
    "no weights": (["--init", "pretrained"], 1, "Expected a model for causal_lm in 'tiny'"),
    "targets": (["--lora.targets", "nix"], 1, "Target modules {'nix'} not found"),
    "no table": (["--data.train", "nowhere.jsonl"], 1, "nowhere.jsonl"),
    "no journal": (["--spent", "nowhere.jsonl"], 1, "Expected a journal or ledger of a run, got 'nowhere.jsonl'"),
    "no column": (["--text_column", "body"], 1, "Expected a text in the column 'body' in row 1 of mails.jsonl"),
    "batch above the data": (["--batch_size", "500"], 1, "0 < batch_size <= dataset_size, got batch_size=500."),
    "delta 1/n": (["--dp_delta", "0.01"], 1, "got dp_delta=0.01."),
    "how to insist": (["--dp_delta", "0.01"], 1, "or pass dp_allow_large_delta: true and say so"),
    "no labels": (["--task", "text_classification", "--prompt_template", "null"], 1, "Expected data.labels"),
    "unknown label": (
        ["--task", "text_classification", "--prompt_template", "null", "--labels", "sport,art"], 1,
        "Expected one of data.labels (sport, art) in row 2 of mails.jsonl, got another",
    ),
    "no biases": (["--strategy", "bitfit"], 1, "Expected parameters for strategy='bitfit', LlamaForCausalLM has none"),
}  # fmt: skip


@pytest.fixture
def loggers(monkeypatch):
    """One more logger that is known, and not installed wherever the tests run."""
    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "none-such", object)


@pytest.fixture
def locked(monkeypatch):
    """A folder that may not be written, also where the tests may do everything."""
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "locked" and may(path, mode))


@pytest.mark.usefixtures("loggers", "locked")
@MODES
@pytest.mark.parametrize("name", REFUSED)
def test_the_dry_run_refuses_what_training_refuses(here, name, mode):
    """With a message, and nothing is written."""
    flags, code, message = REFUSED[name]
    Path("locked").mkdir(exist_ok=True)
    before = files(here)
    given = [] if "--output_dir" in flags else ["--output_dir", "other"]
    result = train(*given, *flags, *mode)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert code == 2 or result.stderr.rstrip().rpartition("\n")[2].startswith("Error: ")
    assert "Traceback" not in result.output
    assert files(here) == before


@pytest.mark.parametrize("names", ["none", "all"])
def test_words_for_all_loggers_are_no_names(here, names):
    assert train("--output_dir", "other", "--report_to", names, "--dry-run").exit_code == 0


def test_a_hub_name_with_downloads_is_not_a_missing_folder(here, monkeypatch):
    from transformers import AutoTokenizer

    def unreachable(path, **options):
        raise OSError("We couldn't connect")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    result = train("--output_dir", "other", "--model.path", "some/model", "--local_files_only", "false")
    assert "Expected a tokenizer in 'some/model': We couldn't connect" in result.stderr


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
    assert f"The journal has 3 steps, which spent epsilon={spent.epsilon(1e-3).epsilon:.4g} at delta=0.001." in said
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


def test_an_interrupt_without_a_checkpoint_promises_no_resume(here, early, tmp_path):
    left_in(tmp_path / "lost", early, ["job.json", JOURNAL, f"{JOURNAL}.head"])
    said = interrupted(read_job("job.yaml", ["--output_dir", str(tmp_path / "lost")]))
    assert said.endswith("There is no checkpoint to resume.")


FULL = {  # when the disk is full, for files of how many bytes, what could not be written, steps that were released
    "job": ("make_trainer", 10, "The run in {folder} could not go on: [Errno 27] File too large. Stopped", 0),
    "first checkpoint": ("on_train_begin", 1000, "{folder}/checkpoint-0/dpfunc could not be written: ", 0),
    "journal": ("on_step_end", 400, "{folder}/privacy_journal.jsonl could not be written: File too large", 1),
    "checkpoint": ("on_step_end", 3000, "{folder}/checkpoint-2/dpfunc could not be written: ", 2),
    "record": ("on_train_end", 1500, "{folder}/privacy_accounting.json could not be written: File too large", 4),
    "model": ("check_accounting", 100, "The run in {folder} could not go on: ", 4),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_says_what_was_spent_and_how_to_go_on(here, tmp_path, monkeypatch, name):
    when, size, said, steps = FULL[name]
    folder, owner = tmp_path / "full", next((each for each in (train_job, run_folder) if hasattr(each, when)), None)
    real = getattr(owner, when, None)
    flags = ["--output_dir", folder, "--insecure-seed", 3]

    def filled(*given):
        result = real(*given)
        allow(size)
        return result

    again(insecure_key(3))
    with monkeypatch.context() as patch:
        if real is None:
            at_events(patch, **{when: lambda *given: allow(size)})
        else:
            patch.setattr(owner, when, filled)
        try:
            result = train(*flags)
        finally:
            allow()
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    assert "Error: " + said.format(folder=folder) in result.stderr
    assert "Traceback" not in result.output
    spent = "Stopped before the first step was released: nothing was spent."
    if steps:
        known = journal_ledger(folder / JOURNAL)
        assert known.num_steps == steps
        spent = f"Stopped. The journal has {steps} steps, which spent epsilon={known.epsilon(1e-3).epsilon:.4g} at"
        assert result.stderr.endswith("--resume goes on with this run.\n")
    assert spent in result.stderr
    again(insecure_key(3))
    result = train(*flags, *(["--resume"] if steps else []))
    assert result.exit_code == 0, result.output
    assert journal_ledger(folder / JOURNAL).num_steps == 4


def test_only_the_process_that_writes_speaks_of_an_interrupt(here, capsys):
    job = read_job("job.yaml", ["--output_dir", "nowhere"])
    said = []
    for writes in (True, False):
        with pytest.raises(KeyboardInterrupt), _interruptible(job, writes):
            raise KeyboardInterrupt
        said.append(capsys.readouterr().err)
    assert said[0].startswith("\nInterrupted before the first step was released: nothing was spent.")
    assert said[1] == ""


LAUNCHERS = {  # environment -> message
    "one process only": ({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"}, "`accelerate launch`"),
    "FSDP": ({"ACCELERATE_USE_FSDP": "true"}, "got ACCELERATE_USE_FSDP='true' in the environment"),
    "DeepSpeed": ({"ACCELERATE_USE_DEEPSPEED": "true"}, "got ACCELERATE_USE_DEEPSPEED='true' in the environment"),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_that_does_not_keep_privacy_is_refused(here, monkeypatch, name):
    environment, message = LAUNCHERS[name]
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    before = files(here)
    for flags in ([], ["--dry-run"], *([["--no-dp"]] if name == "one process only" else [])):
        result = train("--output_dir", "other", *flags)
        assert result.exit_code == 1
        assert message in result.stderr
        assert "torchrun --nproc-per-node N" in result.stderr
    assert files(here) == before


@pytest.mark.slow
def test_L9_T5_torchrun_with_one_process(here):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "dpfunc.cli.main", "train"]
    options = ["job.yaml", "--output_dir", "launched", "--steps", "2", "--save_steps", "2", "--dp-epsilon", "3"]
    result = subprocess.run([*command, *options], cwd=here, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Spent: epsilon=" in result.stdout
    assert record("launched")["epsilon"] <= 3.0
    assert adapters("launched")


def test_L18_bf16_with_gradient_checkpointing(here):
    result = train("--bf16", "--gradient_checkpointing", "--steps", 2, "--output_dir", "narrow")
    assert result.exit_code == 0, result.output
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in adapters("narrow").values())


def test_text_classification(tmp_path, monkeypatch):
    from transformers import AutoModelForSequenceClassification

    write_job(tmp_path, "text_classification", "gpt2")
    monkeypatch.chdir(tmp_path)
    result = train("--strategy", "head", "--eval_steps", 2)
    assert result.exit_code == 0, result.output
    assert "eval_accuracy: 0." in result.stdout
    model = AutoModelForSequenceClassification.from_pretrained("run/model")
    assert model.config.id2label == {0: "sport", 1: "money"}


def test_L7_L8_vqa(tmp_path, monkeypatch):
    from dpfunc.hf.vision_language.tiny_llava import write

    write(tmp_path, 24)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(
        "task: vqa\nstrategy: projector\noutput_dir: run\nmodel: {path: llava}\n"
        "data: {train: data.jsonl, max_length: 24, eval_fraction: 0.2}\n"
        "privacy: {dp_epsilon: 8, dp_delta: 1e-3, dp_max_grad_norm: 1.0}\n"
        "training: {learning_rate: 1e-2, batch_size: 8, steps: 2, physical_batch_size: 4}\n"
    )
    assert "(lora)" in train("--strategy", "lora", "--dry-run").stdout
    result = train()
    assert result.exit_code == 0, result.output
    assert "eval_loss" in result.stdout
    Path("images/003.png").unlink()
    missing = train("--output_dir", "other")
    assert missing.exit_code == 1
    assert "Expected an image file for row 4 of data.jsonl" in missing.stderr


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


def test_importing_the_commands_is_light():
    heavy = ("opacus", "transformers", "peft", "scipy", "yaml", "pydantic")
    code = f"import sys, dpfunc.cli.main; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert result.stdout.strip() == "[]"


# The guide

GUIDE = ROOT / "docs" / "guides" / "train.md"


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.slow
def test_T12_T13_commands_of_the_guide_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)  # for its tokenizer and its configuration
    job = read_job("job.yaml")
    processing = load_processing(job)
    load_base(job, processing).save_pretrained("my-model")
    processing.save_pretrained("my-model")
    write_table(Path("mails.jsonl"), 600)
    Path("job.yaml").write_text(blocks("yaml")[0])
    Path("prompts.jsonl").write_text(blocks("json")[0])
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
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


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_in_the_guide_as_it_is(section):
    guide = GUIDE.read_text()
    for key in dataclasses.fields(SECTIONS[section]):
        default = "required" if key.default is dataclasses.MISSING else key.default
        shown = {None: "", True: "`true`", False: "`false`", "required": "required"}.get(default, f"`{default}`")
        if default in (0, 1) and not isinstance(default, bool):
            shown = f"`{default}`"
        assert f"| `{key.name}` | {shown} | {key.metadata['help']} |" in guide, f"{section}.{key.name}"


def test_every_flag_and_strategy_is_in_the_guide():
    guide = GUIDE.read_text()
    for flag in ("--dry-run", "--no-dp", "--resume", "--insecure-seed", "--allow-non-private", *STRATEGIES):
        assert flag in guide
    for strategies in STRATEGIES.values():
        assert all(f"`{strategy}`" in guide for strategy in strategies)
