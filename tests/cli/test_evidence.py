"""Replays and audits on the command line: what an audit needs is there before it runs, and no result is lost after it."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

from click.testing import CliRunner

from dpfunc.cli import _evidence
from dpfunc.cli.main import main
from dpfunc.evidence import script


def audit(folder, *flags):
    (folder / "loop.py").write_text("raise AssertionError('it ran')")
    return CliRunner().invoke(main, ["audit", str(folder / "loop.py"), "--plot", str(folder / "audit.png"), *flags])


def test_an_audit_asks_for_matplotlib_before_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(_evidence, "find_spec", lambda name: None)
    found = audit(tmp_path)
    assert (found.exit_code, type(found.exception)) == (1, SystemExit), found.exception
    assert "Expected matplotlib for --plot" in found.stderr


def test_a_picture_has_another_file_than_the_result(tmp_path, monkeypatch):
    """After the training the result had the place of the picture, which ended in a traceback."""
    monkeypatch.setattr(_evidence, "find_spec", lambda name: "there")
    found = audit(tmp_path, "--out", str(tmp_path / "audit.png"))
    assert (found.exit_code, type(found.exception)) == (1, SystemExit), found.exception
    assert "Expected two files for --out and --plot" in found.stderr


def test_a_result_without_a_picture_is_not_lost(tmp_path, monkeypatch):
    """Of a run without noise, whose claim is infinite, nothing can be drawn."""
    monkeypatch.setattr(_evidence, "find_spec", lambda name: "there")
    values = {"steps": 3, "space": "gradient", "holds": True}
    monkeypatch.setattr(script, "audit", lambda *_, **__: (SimpleNamespace(claim=math.inf), values))
    found = audit(tmp_path, "--out", str(tmp_path / "audit.json"))
    assert found.exit_code == 1
    assert "Expected audits with finite claims" in found.stderr
    assert "3 steps, canaries in gradient space" in found.stdout
    assert json.loads((tmp_path / "audit.json").read_text()) == values
    assert not (tmp_path / "audit.png").exists()
