"""The script that measures what trust costs."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks import overhead


def test_a_tiny_run_writes_each_figure(tmp_path):
    out = tmp_path / "overhead.json"
    run = CliRunner().invoke(overhead.main, ["--quick", "--rounds", "1", "--cases", "w3", "--out", str(out)])
    assert run.exit_code == 0, run.output
    case = json.loads(out.read_text())["cases"]["w3"]
    assert case["seconds"].keys() == {"plain", "traced", "untraced", "audit", "whole"}
    assert all(value > 0 for value in case["seconds"].values())
    assert {"typing", "audits", "first"} <= case.keys()


def test_other_norms_are_an_error():
    with pytest.raises(RuntimeError, match="norms of w differ"):
        overhead.check_parity({"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.1])}, "case")
