"""The documents: the loop of the README runs, its commands work, links lead somewhere, numbers are those of the result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dpfunc.cli.main import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
README = (ROOT / "README.md").read_text()


def test_the_loop_of_the_readme_runs(capsys, tmp_path, monkeypatch):
    """As it stands, with fewer of its own data: the model learns them, and each step is in the journal."""
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    torch.manual_seed(0)
    names = {}
    assert "torch.randn(4000, 20)" in code
    exec(compile(code.replace("4000", "1000"), "README.md", "exec"), names)
    assert "epsilon" in capsys.readouterr().out
    assert names["state"].step == names["plan"].num_steps
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) >= names["plan"].num_steps
    x, y = names["dataset"].tensors
    logits = names["model"](x).detach()
    assert float((logits.argmax(1) == y).float().mean()) > 0.9
    assert float(torch.nn.functional.cross_entropy(logits, y)) < 0.4


COMMANDS = [
    line.split("#")[0].split()[1:]
    for line in README.splitlines()
    if re.match(r"dpfunc (epsilon|sigma|requirements)", line)
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_commands_of_the_readme_work(command):
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output


def test_links_lead_somewhere():
    links = [(path, target) for path in DOCUMENTS for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text())]
    assert len(links) > 100
    assert [f"{path} links to {target}" for path, target in links if not (path.parent / target).exists()] == []


def test_the_table_of_the_readme_is_the_committed_result():
    results = json.loads((ROOT / "docs" / "results" / "demo.json").read_text())["results"]
    for row in results:
        low, high = row["interval"]
        assert f"{row['accuracy']:.3f} ({low:.3f} - {high:.3f})" in README
    private = results[-1]
    assert private["accuracy"] >= 0.92
    assert f"{private['epsilon_prv']:.2f} | {private['epsilon_rdp']:.2f}" in README
