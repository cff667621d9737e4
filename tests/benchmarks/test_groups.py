"""The scripts that measure clip groups and small steps."""

from __future__ import annotations

import json

import torch
from click.testing import CliRunner

from benchmarks import groups, small_steps


def test_a_tiny_run_writes_time_and_memory(tmp_path):
    out, threads = tmp_path / "groups.json", torch.get_num_threads()
    try:
        run = CliRunner().invoke(groups.main, ["--quick", "--rounds", "1", "--cases", "w3", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    assert run.exit_code == 0, run.output
    case = json.loads(out.read_text())["cases"]["w3"]
    assert case["time"].keys() == case["memory"].keys() == groups.GROUPINGS.keys()
    assert all(value > 0 for value in (*case["time"].values(), *case["memory"].values()))


def test_small_steps_are_measured(monkeypatch):
    monkeypatch.setattr(small_steps, "STEPS", 1)
    found = small_steps.measure(small_steps.CASES["perceptron, 3 layers"](), 1)
    assert found["private"] > 0
    assert found["ratio"] > 0
