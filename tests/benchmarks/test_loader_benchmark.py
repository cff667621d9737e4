"""The script that measures loaders, and that its committed result keeps the bound."""

from __future__ import annotations

import json

from click.testing import CliRunner

from benchmarks import loader


def test_a_tiny_run_measures_both_loaders(tmp_path):
    out = tmp_path / "loader.json"
    names = "small batch,nested"
    run = CliRunner().invoke(loader.main, ["--quick", "--rounds", "1", "--cases", names, "--out", str(out)])
    assert run.exit_code == 0, run.output
    cases = json.loads(out.read_text())["cases"]
    assert list(cases) == names.split(",")
    for case in cases.values():
        assert all(case["steps"][str(span)]["ratio"] > 0 for span in loader.SPANS)
        assert all(case["memory"]["resident_mib"][who] > 0 for who in loader.LOADERS)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    assert loader.measure("hugging_face", 1, quick=True) == {"status": "not installed"}
    assert loader.rows({"hugging_face": {"status": "not installed"}}) == []
