"""The notebooks run, cell by cell, and learn what they say they learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path, kind):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def run(name):
    names = {}
    with torch.random.fork_rng():
        for number, code in enumerate(cells(FOLDER / name, "code")):
            exec(compile(code, f"{name}, code cell {number}", "exec"), names)
    return names


def test_they_are_all_listed():
    page = (FOLDER / "README.md").read_text()
    assert [path.name for path in NOTEBOOKS] == ["first_loop.ipynb", "images.ipynb", "lora.ipynb", "report.ipynb"]
    assert all(f"({path.name})" in page for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_without_results(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


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
    assert "Use dpfunc.replace_batchnorm(model)" in capsys.readouterr().out


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
    assert "All agrees." in certified
    assert "one text" in agrees
    assert "All agrees." in claim
    assert "WRONG" not in claim
    assert "WRONG" in rest
    assert "exit code 1" in rest
