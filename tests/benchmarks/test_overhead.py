"""The script that measures what trust costs."""

from __future__ import annotations

import json

from click.testing import CliRunner

from benchmarks import overhead


def test_a_tiny_run_writes_each_figure(tmp_path):
    out = tmp_path / "overhead.json"
    run = CliRunner().invoke(overhead.main, ["--quick", "--rounds", "1", "--cases", "w3", "--out", str(out)])
    assert run.exit_code == 0, run.output
    case = json.loads(out.read_text())["cases"]["w3"]
    assert case["seconds"].keys() == {"plain", "audit", "whole"}
    assert all(value > 0 for value in case["seconds"].values())
    assert {"audits", "first"} <= case.keys()
