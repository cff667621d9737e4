"""The command line: answers, JSON, exit codes, and errors that are no tracebacks."""

from __future__ import annotations

import json

import pytest
from text_job import run

from dpfunc.accounting import Ledger
from dpfunc.types import Event

RUN = ("--sigma", 1, "--delta", 1e-5, "--json")


def test_epsilon_and_its_inverse():
    result = run("epsilon", "-q", 0.01, "--steps", 1000, *RUN)
    values = json.loads(result.stdout)
    assert result.exit_code == 0
    assert 1.828 < values["epsilon"] < 1.839
    assert (values["method"], values["steps"]) == ("tilted", 1000)
    sigma = json.loads(run("sigma", "-q", 0.1, "--steps", 50, "--epsilon", 2, "--delta", 1e-5, "--json").stdout)
    back = run("epsilon", "-q", 0.1, "--steps", 50, "--sigma", sigma["noise_multiplier"], "--delta", 1e-5, "--json")
    assert 1.95 < json.loads(back.stdout)["epsilon"] <= 2.0


def test_two_ways_to_say_it_agree():
    """A part of a step is a step, and epochs that fit exactly are not rounded up."""
    one, two = (("-q", 0.25, "--steps", 12), ("-n", 64, "-b", 16, "--epochs", 3))
    assert json.loads(run("epsilon", *one, *RUN).stdout) == json.loads(run("epsilon", *two, *RUN).stdout)
    cases = {
        ("-n", 1000, "-b", 32, "--epochs", 3): 94, ("-q", 0.07, "--epochs", 7): 100, ("-q", 1 / 3, "--epochs", 1): 3,
        ("-n", 30, "-b", 1, "--epochs", 1.00000001): 31, ("-n", 30, "-b", 12.5, "--epochs", 5): 12,
    }  # fmt: skip
    for given, steps in cases.items():
        assert json.loads(run("epsilon", *given, *RUN).stdout)["steps"] == steps


def test_requirements():
    arguments = ("requirements", "-n", 5000, "-b", 128, "--epochs", 5, "--epsilon", 3)
    values = json.loads(run(*arguments, "--json").stdout)
    assert (values["total_steps"], values["recommended_batch_size"]) == (196, 4096)
    assert values["delta"] < 1 / (10 * 5000)
    text = run(*arguments).stdout
    assert "clip norm" in text
    assert "belief of 1/2" in text


def test_large_delta_is_warned_about():
    result = run("epsilon", "-n", 1000, "-b", 100, "--steps", 10, "--sigma", 1, "--delta", 0.01)
    assert result.exit_code == 0
    assert "Warning: delta=0.01 is not below 1 / dataset_size = 0.001" in result.stderr


GOOD = ["epsilon", "-q", 0.1, "--steps", 10, "--sigma", 1, "--delta", 1e-5]
BAD = {
    "q > 1": (["epsilon", "-q", 1.5, "--steps", 10, "--sigma", 1, "--delta", 1e-5], 1, "0 <= sampling_prob <= 1"),
    "no noise": (["epsilon", "-q", 0.1, "--steps", 10, "--sigma", 0, "--delta", 1e-5], 2, "epsilon is infinite"),
    "no steps": (["epsilon", "-q", 0.1, "--steps", 0, "--sigma", 1, "--delta", 1e-5], 1, "steps >= 1"),
    "neither steps nor epochs": (["epsilon", "-q", 0.1, "--sigma", 1, "--delta", 1e-5], 1, "either --steps or --epochs"),
    "both": ([*GOOD, "--epochs", 3], 1, "either --steps or --epochs"),
    "no sampling": (["epsilon", "--steps", 3, "--sigma", 1, "--delta", 1e-5], 1, "either --sampling-prob, or"),
    "a batch size beside q": ([*GOOD, "-b", 10], 1, "either --sampling-prob, or --dataset-size together with"),
    "all three": ([*GOOD, "-n", 100, "-b", 10], 1, "either --sampling-prob, or --dataset-size together with"),
    "endless epochs": (["epsilon", "-q", 0.1, "--epochs", "inf", "--sigma", 1, "--delta", 1e-5], 1, "0 < epochs < inf"),
    "epochs of no records": (["epsilon", "-q", 0, "--epochs", 3, "--sigma", 1, "--delta", 1e-5], 1, "0 < sampling_prob <= 1"),
    "missing delta": (["epsilon", "-q", 0.1, "--steps", 10, "--sigma", 1], 2, "Missing option '--delta'"),
    "misspelt option": ([*GOOD, "--adjacancy", "x"], 2, "No such option"),
    "GDP": ([*GOOD, "--method", "gdp-approximation"], 2, "is not one of"),
    "no such file": (["ledger", "show", "nowhere.json", "--delta", 1e-5], 2, "does not exist"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "message"), BAD.values(), ids=BAD)
def test_errors_are_messages_with_exit_codes(arguments, code, message):
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output


DAMAGED = {  # file -> content, message
    "empty.json": (b"{}", "Expected a ledger, as Ledger.to_json writes it, or a journal (.jsonl)"),
    "state.json": (json.dumps({"schema": 1, "ledger": {}}).encode(), "Expected a ledger, as Ledger.to_json writes it"),
    "weights.json": (b"\xff\xfe\x00", "Expected a ledger, as Ledger.to_json writes it"),
    "later.json": (b'{"schema": "dpfunc.ledger/9"}', "Use the version of dpfunc that wrote it"),
    "twice.json": (b'{"schema": "dpfunc.ledger/2", "schema": "dpfunc.ledger/2"}', "occurs twice"),
    "deep.json": (b"[" * 100_000, ""),
    "short.json": (Ledger((Event(1.0, 5.0, 10),)).to_json()[:-4].encode(), ""),
    "pair.json": (b'{"schema": "dpfunc.ledger/2", "adjacency": "\\ud800", "events": []}', ""),
    "deep.jsonl": (b"[" * 100_000 + b"\n", ""),
    "list.jsonl": (b"[1]\n", ""),
    "bytes.jsonl": (b"\xff\xfe\n", ""),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_ledgers_and_journals_that_are_none(tmp_path, name):
    """An error in one line, never a traceback."""
    content, message = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    result = run("ledger", "show", tmp_path / name, "--delta", 1e-5)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.exception
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr


def test_exit_codes_are_as_the_help_says(monkeypatch):
    text = " ".join(run("--help").stdout.split())
    assert "Exit codes: 0, done; 1, refused or interrupted" in text
    assert "2, an option, argument or file name that does not exist, or one that is missing." in text
    assert run(*GOOD).exit_code == 0

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dpfunc.accounting.ledger.epsilon", stop)
    stopped = run(*GOOD)
    assert (stopped.exit_code, stopped.stdout) == (1, "")
