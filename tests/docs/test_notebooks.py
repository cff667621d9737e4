"""The notebooks run, cell by cell, and learn what they say they learn."""

from __future__ import annotations

import json

import torch
from pages import DOCS
from pages import run as run_blocks

FOLDER = DOCS / "notebooks"


def run(name):
    cells = json.loads((FOLDER / name).read_text())["cells"]
    with torch.random.fork_rng():
        return run_blocks(*("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))


def test_they_are_all_listed_and_committed_without_results():
    paths = sorted(FOLDER.glob("*.ipynb"))
    assert [path.name for path in paths] == ["first_loop.ipynb", "images.ipynb", "lora.ipynb", "report.ipynb"]
    for path in paths:
        assert f"({path.name})" in (FOLDER / "README.md").read_text()
        notebook = json.loads(path.read_text())
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_first_loop(capsys):
    names = run("first_loop.ipynb")
    assert names["state"].step == 60
    assert names["accuracy"]() > 0.75  # chance is 0.5
    assert 2.9 < names["state"].ledger.epsilon(1e-5).epsilon <= 3.0 < names["both"].epsilon(1e-5).epsilon
    shown = capsys.readouterr().out
    assert "No step is left" in shown
    assert "already released" in shown or "released before" in shown


def test_lora():
    names = run("lora.ipynb")
    assert names["state"].step == 60
    assert names["state"].ledger.epsilon(1e-5).epsilon <= 3.0
    assert names["after"] > names["before"]


def test_images(capsys):
    names = run("images.ipynb")
    assert names["accuracy"] > 0.7  # chance is 0.25
    assert 7.9 < names["state"].ledger.epsilon(1e-5).epsilon <= 8.0
    assert names["dp_step"].decision.engine == "one pass"
    assert "Use dpfunc.functional.replace_batchnorm(model)" in capsys.readouterr().out


def test_the_report(capsys):
    names = run("report.ipynb")
    assert names["record"].global_step == 30
    assert names["accuracy"] > 0.7  # the most frequent topic: 0.23
    assert all(finding.agrees for finding in names["findings"])
    shown = capsys.readouterr().out
    assert "Not covered by this epsilon:" in shown
    assert "Holds: 3 steps" in shown
    assert "is not refuted" in shown
    agrees, claim, rest, certified = shown.split("Checks")
    assert "nobody vouches for it" in certified
    assert "one text" in agrees
    assert "All agrees." in claim
    assert "WRONG" not in claim
    assert "WRONG" in rest
    assert "exit code 1" in rest
