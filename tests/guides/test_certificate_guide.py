"""The guide of certificates: its code runs, and an outsider finds the epsilon of a certificate with Opacus alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from certified import plan_of, trained
from click.testing import CliRunner

from dpfunc import sampling
from dpfunc.cli.main import main

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "certificate.md").read_text()
PEER = Path(__file__).parents[2] / ".cache" / "dp_accounting"
MAKE, OUTSIDE = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guide_runs_and_an_outsider_finds_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(sampling.Poisson(1000, 0.1), adjacency="add_remove", delta=1e-5, noise_multiplier=0.8)
    trained(tmp_path / "run", plan)
    exec(compile(MAKE, "certificate.md", "exec"), {})
    path = tmp_path / "run" / "certificate.json"
    lines = [line for line in OUTSIDE.splitlines() if line]
    assert len(lines) <= 40
    assert "import dpfunc" not in OUTSIDE
    paths = os.pathsep.join([str(PEER), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, path],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    values = json.loads(path.read_text())
    second = values["result"]["accountants"][1]["epsilon"]
    claimed, found = re.match(r"claimed ([\d.]+); Opacus, by Renyi: ([\d.]+)", done.stdout).groups()
    assert float(found) == pytest.approx(second, abs=1e-4)
    assert values["claim"]["epsilon"] == pytest.approx(float(claimed), abs=1e-4)
    assert float(claimed) <= float(found)
    if (PEER / "dp_accounting").is_dir():  # which `make downloads` leaves there
        by_losses = float(re.search(r"by privacy loss distributions: ([\d.]+)", done.stdout).group(1))
        assert by_losses == pytest.approx(float(claimed), rel=1e-3)


def test_the_commands_of_the_guide(tmp_path, monkeypatch):
    """In order, in a folder with a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    trained(tmp_path / "runs" / "mails")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL) for line in block.splitlines()]
    assert len(commands) == 6
    for command in commands:
        words = command.replace("--check certificate.json", "--check runs/mails/certificate.json").split()
        if words[0] == "dpfunc":
            assert CliRunner().invoke(main, words[1:]).exit_code == 0, command
        else:
            subprocess.run(words, check=True)
