"""torchrun with two processes: the command, the Trainer and an example give what one process gives, and die together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import launch_jobs
import pytest
import torch
from click.testing import CliRunner
from launcher import torchrun, works
from safetensors.torch import load_file
from sharded_cases import close
from text_job import write_job

import dpfunc
from dpfunc.checkpoint.journal import journal_ledger, read_steps
from dpfunc.cli.main import main
from dpfunc.distributed.ranks import check_alone, check_launch, from_environment
from dpfunc.errors import InvalidArgument

JOBS = launch_jobs.__file__
FLAGS = ("--steps", "6", "--eval_fraction", "0.2", "--eval_steps", "3", "--insecure-seed", "7707")
KILLED = ("train", "job.yaml", *FLAGS, "--output_dir", "killed")
TEXTS = ("-n", "6", "--batch-size", "2", "--max-new-tokens", "6", "--allow-non-private", "--seed", "4")


def weights(folder):
    return load_file(folder / "model" / "adapter_model.safetensors")


# Imports take longer than these runs do: one launch, of forks, is killed, and a second one does all the rest.


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a job, done by one process."""
    folder = tmp_path_factory.mktemp("job")
    write_job(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        one = CliRunner().invoke(main, ["train", "job.yaml", *FLAGS, "--output_dir", "one"])
    assert one.exit_code == 0, one.output
    return folder, one.stdout


@pytest.fixture(scope="module")
def killed(place):
    """Two processes of which the first is killed with a step in its journal that nobody got."""
    folder, _ = place
    code, _, errors = torchrun(JOBS, "killed", 5, *KILLED, cwd=folder)
    return code, errors, journal_ledger(folder / "killed" / "privacy_journal.jsonl").num_steps


@pytest.fixture(scope="module")
def launched(place, killed):
    """A run that one process may not resume; and what two processes printed, by part of `launch_jobs.all_parts`."""
    folder, _ = place
    with pytest.MonkeyPatch.context() as patch:  # one process would repeat step 5 with other last bits
        patch.chdir(folder)
        refused = CliRunner().invoke(main, [*KILLED, "--resume"])
    assert journal_ledger(folder / "killed" / "privacy_journal.jsonl").num_steps == 5
    (folder / "trainer").mkdir()
    generate = ("generate", "killed", *TEXTS, "--out", "two.jsonl")
    train = ("train", "job.yaml", *FLAGS, "--output_dir", "two")
    said = works(
        JOBS,
        "all_parts",
        *KILLED,
        "--resume",
        "then",
        *generate,
        "then",
        *train,
        "then",
        "trainer",
        cwd=folder,
        new=True,
    )
    return refused, *(dict(zip(launch_jobs.PARTS, text.split(launch_jobs.END), strict=False)) for text in said)


# The command


def test_killed_processes_die_together_and_resume_bit_for_bit(place, killed, launched):
    """The step that nobody got counts, and is repeated."""
    (folder, _), (code, errors, in_journal), (refused, output, _) = place, killed, launched
    assert code != 0
    assert "SIGKILL" in errors
    assert "lost the others" in errors or "SIGTERM" in errors
    assert in_journal == 5
    assert refused.exit_code == 1
    assert "machines or versions are others" in refused.stderr
    assert "data processes: saved 2, now 1" in refused.stderr
    resumed, whole = weights(folder / "killed"), weights(folder / "two")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    plan_ledger = json.loads((folder / "one" / "privacy_accounting.json").read_text())["ledger"]
    journal = folder / "killed" / "privacy_journal.jsonl"
    assert journal_ledger(journal) == dpfunc.Ledger.from_json(json.dumps(plan_ledger))
    assert output["generate"].count("6 texts in two.jsonl") == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        drawn = CliRunner().invoke(main, ["generate", "killed", *TEXTS, "--out", "one.jsonl"])
        assert drawn.exit_code == 0, drawn.output
        assert Path("one.jsonl").read_text() == Path("two.jsonl").read_text()
        # Nothing is left to repeat: any number of processes may go on.
        assert CliRunner().invoke(main, [*KILLED, "--resume"]).exit_code == 0


def test_the_command_is_the_same_on_two_processes(place, launched):
    """Plan, epsilon, ledger, parameters; and one process writes and prints."""
    (folder, expected), (_, outputs, errors) = place, launched
    output = outputs["train"]
    close(weights(folder / "two"), weights(folder / "one"))
    one, two = (json.loads((folder / name / "privacy_accounting.json").read_text()) for name in ("one", "two"))
    assert all(values.pop(name) != "" for values in (one, two) for name in ("date", "digest"))
    assert one == two
    assert [line.split("(")[0] for line in output.splitlines() if line.startswith("Spent: ")] == [
        line.split("(")[0] for line in expected.splitlines() if line.startswith("Spent: ")
    ]
    assert output.count("eval_loss: ") == 1
    assert "train_runtime" not in output  # times tell how many records were drawn
    [taken] = read_steps(folder / "two" / "privacy_journal.jsonl").values()
    assert sorted(taken) == list(range(6))
    assert len((folder / "two" / "privacy_journal.jsonl").read_text().splitlines()) == 6
    assert errors["train"].count("| 0/6") == 1  # one progress bar
    saved = sorted(path.name for path in (folder / "two").glob("checkpoint-*"))
    assert saved == ["checkpoint-4", "checkpoint-6"]


# The Trainer


@pytest.fixture(scope="module")
def trained(place, launched):
    """Results of each of two processes with the Trainer, their output, and the same run by one process."""
    folder = place[0] / "trainer"
    found = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    return folder, found, launched[1]["trainer"], launch_jobs.train(folder / "one", 10)


def test_the_trainer_is_the_same_on_two_processes(trained):
    folder, found, output, one = trained
    assert output.count("train_runtime") == 1  # of the twin alone
    assert output.count("'privacy/steps_left'") == sum("privacy/steps_left" in logs for logs in one["logs"])
    assert any(0 in row and sum(row) for row in zip(*(each["run"]["draws"] for each in found), strict=True))
    for each in found:
        close(each["run"]["params"], one["params"])  # also: the second process began with another model
        assert each["run"]["ledger"] == one["ledger"]
        assert each["run"]["epsilon"] == one["epsilon"]
        assert each["run"]["wrapped"] == "BertForSequenceClassification"  # no DistributedDataParallel
        for name in ("eval_loss", "eval_accuracy"):
            assert each["run"]["metrics"][name] == pytest.approx(one["metrics"][name], abs=1e-6)
        assert len(each["run"]["logs"]) == len(one["logs"])
        for ours, theirs in zip(each["run"]["logs"], one["logs"], strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours.keys() & {"unreleased/loss", "privacy/epsilon", "learning_rate", "eval_loss"}:
                assert ours[name] == pytest.approx(theirs[name], abs=1e-6)
    names = " ".join(sorted(path.name for path in (folder / "run").iterdir()))
    files = "privacy_accounting.json privacy_journal.jsonl privacy_journal.jsonl.head"
    assert names == f"checkpoint-4 checkpoint-8 {files}"
    assert journal_ledger(folder / "run" / "privacy_journal.jsonl").to_json() == one["ledger"]


def test_what_the_processes_share(trained):
    """The twin is the Trainer's own; a loader that accelerate sharded gives each process whole draws of other steps."""
    _, found, _, _ = trained
    assert [each["twin"]["wrapped"] for each in found] == ["DistributedDataParallel"] * 2
    assert all(torch.equal(found[0]["twin"]["params"][name], p) for name, p in found[1]["twin"]["params"].items())
    assert [each["sharded loader"][0] for each in found] == ["SamplingMismatch", "SamplingMismatch"]
    assert [each["place"] for each in found] == [(0, 2), (1, 2)]
    assert [each["writer"] for each in found] == [True, False]
    for each in found:
        assert each["timeout"] == timedelta(minutes=4)
        assert each["again"]
        assert each["same"][0] == "ok"
        assert each["other"][0] == "RankMismatch"
        assert each["alone"][0] == "InvalidArgument"
        assert "use_cpu=True" in each["alone"][1]
    assert [each["once"][0] for each in found] == ["OSError", "StepAborted"]


def test_what_one_process_cannot_write_stops_all(trained):
    """At once, and not when the others have waited for half an hour."""
    folder, found, _, _ = trained
    for name in ("finish", "write_accounting"):
        assert [each[name][0] for each in found] == ["NotWritten", "StepAborted"], name
    assert [each["_commit"][0] for each in found] == ["NotWritten", "CheckpointError"]
    assert [each["verify"][0] for each in found] == ["CheckpointError", "OSError"]
    for name in ("there", "full"):
        assert [each[name][0] for each in found] == ["InvalidArgument", "StepAborted"], name
    assert [each["draw"][0] for each in found] == ["CheckpointError", "OSError"]
    assert [each["written"] for each in found] == [3, 3]
    assert len((folder / "texts.jsonl").read_text().splitlines()) == 3


# The environment


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "Expected RANK beside WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "Expected 3 processes, as OMPI_COMM_WORLD_SIZE says, got 1"),
        ({"MASTER_ADDR": "here", "ACCELERATE_MIXED_PRECISION": "no"}, "accelerate launch"),
    ],
)
def test_an_environment_that_promises_more_is_refused(monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=message):
        from_environment()


def test_what_one_process_may_do(monkeypatch):
    """It needs no launcher; launchers of one process are accepted; without ranks there must be no others."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert from_environment() is None
    check_launch({"WORLD_SIZE": "1", "MASTER_ADDR": "here", "ACCELERATE_MIXED_PRECISION": "no"}, 1)
    check_launch({"SLURM_STEP_NUM_TASKS": "1", "MASTER_ADDR": "here"}, 1)
    check_launch({"WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "9"}, 2)  # srun starts torchrun
    with pytest.raises(InvalidArgument, match="because WORLD_SIZE=2: without it each process is a run of its own"):
        check_alone({"WORLD_SIZE": "2"})


LEAVES = """
import atexit, weakref
import torch.distributed as dist

def last():  # the first one registered runs last
    print(dist.is_initialized(), group() is None)
    try:
        ranks.group
    except InvalidArgument as error:
        print(error)

atexit.register(last)
from dpfunc.distributed import from_environment
from dpfunc.errors import InvalidArgument
ranks = from_environment()
group = weakref.ref(ranks.group)
print(dist.is_initialized(), group() is dist.group.WORLD)
"""


def test_nothing_holds_the_group_when_python_ends():
    """One that is still there then aborts the process now and then, after a run that went well."""
    alone = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run([sys.executable, "-c", LEAVES], env={**os.environ, **alone}, capture_output=True, text=True)
    inside, after, message = found.stdout.splitlines()
    assert (inside, after) == ("True True", "False True"), found.stderr
    assert message.startswith("Expected ranks of a process group that is there")
