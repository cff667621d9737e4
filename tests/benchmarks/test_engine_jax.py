"""JAX in the benchmark of engines, where no JAX is installed: a stub takes its place, or nothing does."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import targets
from benchmarks.engines import jax_peer, worker
from benchmarks.engines.cases import CASES
from benchmarks.engines.contestants import known
from benchmarks.engines.parity import Truth
from benchmarks.engines.runner import Settings, run_case

QUICK = Settings(rounds=1, threads=1, memory=False, quick=True)
STUB = """
import json, os, shutil, sys, time
here = os.environ["STUB"]
manner = open(os.path.join(here, "manner")).read()
spec = json.loads(sys.argv[3])
json.dump({**spec, "flags": os.environ.get("XLA_FLAGS")}, open(os.path.join(here, spec["mode"] + ".json"), "w"))
if manner == "broken":
    sys.exit("ImportError: no jax")
print(json.dumps({"versions": {"jax": "0"}}), flush=True)
for line in sys.stdin:
    command, _, file = line.strip().partition(" ")
    if manner == "slow":
        time.sleep(60)
    if manner == "error":
        print(json.dumps({"error": "ValueError: 3 does not divide 4"}), flush=True)
    elif command == "sums":
        shutil.copy(os.path.join(here, spec["mode"] + ".npz"), file)
        print("{}", flush=True)
    else:
        print(json.dumps({"seconds": 250.0, "peak_mib": 7.0, "resident_mib": 9.0}), flush=True)
"""


@pytest.fixture(autouse=True)
def threads_stay_as_they_were():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A function that puts a stub in place of the interpreter, which answers in some manner with sums `scale` x right."""
    script, python = tmp_path / "stub.py", tmp_path / "python"
    script.write_text(STUB)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("STUB", str(tmp_path))
    monkeypatch.setenv(jax_peer.VARIABLE, str(python))

    def install(manner="right", scale=1.0):
        (tmp_path / "manner").write_text(manner)
        problem = CASES["perceptron"].problem(quick=True)
        clip_norm = sorted(Truth.of(problem.module, problem, ()).norms)[1]
        truth = Truth.of(problem.module, problem, (clip_norm, math.inf))
        for mode, bound in (("plain", math.inf), ("clipped", clip_norm)):
            np.savez(tmp_path / f"{mode}.npz", **{k: scale * v.numpy() for k, v in truth.sums[bound].items()})
        return tmp_path

    return install


def test_steps_are_compared_first_and_timed_by_their_own_clock(stub):
    folder = stub()
    found = run_case("perceptron", ["jax-plain", "jax-privacy/2"], QUICK)["contestants"]
    assert [found[name]["status"] for name in ("jax-plain", "jax-privacy/2")] == ["ok", "ok"]
    assert found["jax-privacy/2"]["time"]["median_seconds"] == 250.0
    assert found["jax-plain"]["versions"] == {"jax": "0"}
    spec = json.loads((folder / "clipped.json").read_text())
    assert (spec["model"], spec["microbatch"], spec["threads"]) == ("perceptron", 2, 1)
    assert spec["flags"] == jax_peer.ONE_THREAD
    assert json.loads((folder / "plain.json").read_text())["microbatch"] is None


@pytest.mark.parametrize("scale", [0.999, 1.001])
def test_a_wrong_sum_is_not_timed(stub, scale):
    stub(scale=scale)
    found = run_case("perceptron", ["jax-plain", "jax-privacy"], QUICK)["contestants"]
    for name in ("jax-plain", "jax-privacy"):
        assert found[name]["status"].startswith("wrong: "), found
        assert "time" not in found[name]


@pytest.mark.parametrize(
    ("manner", "status"),
    [
        ("broken", "x: RuntimeError: the process ended with code 1: ImportError: no jax"),
        ("error", "x: RuntimeError: ValueError: 3 does not divide 4"),
        ("slow", "x: TimeoutError: no step within 1 s, compiling included"),
    ],
)
def test_a_process_that_fails_is_a_line_of_the_table(stub, manner, status, monkeypatch):
    if manner == "slow":
        monkeypatch.setattr(jax_peer, "LIMIT_SECONDS", 1.0)
    stub(manner)
    assert run_case("perceptron", ["jax-privacy"], QUICK)["contestants"]["jax-privacy"] == {"status": status}


def test_memory_is_what_the_process_says(stub):
    stub()
    spec = {"case": "perceptron", "contestant": "jax-privacy", "quick": True, "microbatch": "none", "device": "cpu"}
    found = worker.answer({**spec, "threads": 1})
    assert (found["status"], found["peak_mib"], found["resident_mib"]) == ("ok", 7.0, 9.0)


@pytest.mark.parametrize("case", ["vgg11", "resnext", "layer:linear"])
def test_cases_that_are_left_out_say_why(stub, case):
    stub()
    status = run_case(case, ["jax-privacy"], Settings(0, 1, memory=False, quick=True))["contestants"]["jax-privacy"]
    assert status["status"].startswith("x: left out: a ")


def test_without_jax_the_tables_say_not_installed(monkeypatch, tmp_path):
    monkeypatch.delenv(jax_peer.VARIABLE, raising=False)
    monkeypatch.setattr(jax_peer, "INSTALLED", tmp_path / "python")
    record = run_case("perceptron", ["jax-privacy", "jax-plain"], QUICK)
    for name in ("jax-plain", "jax-privacy"):
        assert record["contestants"][name]["status"].startswith("x: not installed.")
    report = {"cases": {"perceptron": record}}
    assert targets.engine_rows(report)[0][-2:] == ["not installed", ""]
    assert targets.jax_section(report) == "JAX Privacy: not installed."


def test_the_table_names_both_bases():
    """The plain step of PyTorch, and the plain step of JAX."""

    def one(seconds, mib):
        return {"status": "ok", "time": {"median_seconds": seconds, "ratio": seconds / 2}, "memory": {"peak_mib": mib}}

    contestants = {
        **{"plain": one(2.0, 10), "auto": one(2.2, 11), "jax-plain": one(3.0, 20), "jax-privacy": one(6.0, 60)},
        **{"jax-privacy/4": one(4.5, 25), "jax-privacy/8": one(5.0, 35), "whole-plain": one(2.5, 10)},
        **{"whole-dpfunc": one(5.0, 10), "whole-jax": one(7.5, 10), "whole-jax/4": one(6.25, 10)},
    }
    row = targets.jax_rows({"cases": {"w1": {"contestants": contestants}}})[0]
    assert row[:5] == ["w1", "1.50", "3.00", "2.25 (4)", "1.50"]
    assert row[5:] == ["10", "11", "20", "60", "25", "2.00", "2.50"]
    assert len(row) == len(targets.JAX_HEADS)


@pytest.mark.parametrize(("name", "expected"), [("jax-privacy/4", True), ("whole-jax/2", True), ("jax-plain/4", False),
                                                ("jax-privacy/auto", False), ("whole-plain/2", False)])  # fmt: skip
def test_names(name, expected):
    assert known(name) == expected
