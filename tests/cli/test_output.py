"""Tables and JSON of all commands: every number is shown, also in a narrow terminal."""

from __future__ import annotations

import json
import re

import pytest
from journal_cases import line, written
from text_job import run

from dpfunc.cli.main import main


def test_infinite_epsilon_is_valid_json_and_readable():
    command = ("epsilon", "-q", 1, "--steps", 10, "--sigma", 1e-160, "--delta", 1e-5)
    assert json.loads(run(*command, "--json").stdout)["epsilon"] is None
    table = run(*command).stdout
    assert "infinite" in table
    assert "None" not in table


def commands(group=main, path=()):
    """Each command by its words: [], [epsilon], [ledger], [ledger, show], ..."""
    found = [list(path)]
    for name, command in getattr(group, "commands", {}).items():
        found += commands(command, (*path, name))
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_and_json_of_every_command(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    group = " ".join(command) in ("", "ledger", "budget")
    assert ("--json" in result.stdout) != group
    if not group:
        assert "Example: dpfunc " + " ".join(command) in " ".join(result.stdout.split())


NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")
TABLES = {
    "epsilon": ("epsilon", "-n", 60000, "-b", 256, "--epochs", 60, "--sigma", 1.1, "--delta", 1e-5),
    "sigma": ("sigma", "-n", 60000, "-b", 256, "--epochs", 60, "--epsilon", 3, "--delta", 1e-5),
    "requirements": ("requirements", "-n", 60000, "-b", 256, "--epochs", 60, "--epsilon", 3),
}


@pytest.mark.parametrize("width", [20, 60])
@pytest.mark.parametrize("name", [*TABLES, "ledger"])
def test_narrow_terminals_show_every_number(tmp_path, monkeypatch, name, width):
    path = tmp_path / "journal.jsonl"
    written(path, *(line(step) for step in range(10)))
    command = TABLES.get(name, ("ledger", "show", path, "--delta", 1e-5))
    monkeypatch.setenv("COLUMNS", "250")
    wide = run(*command).stdout
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = run(*command).stdout
    assert sorted(NUMBERS.findall(narrow)) == sorted(NUMBERS.findall(wide))
    assert len(NUMBERS.findall(wide)) > 3
    assert "\u2026" not in narrow


@pytest.mark.parametrize("name", [*TABLES, "ledger"])
def test_every_accounting_command_has_json(tmp_path, name):
    """One JSON value on stdout, whatever is said beside it."""
    path = tmp_path / "journal.jsonl"
    written(path, *(line(step) for step in range(10)))
    result = run(*TABLES.get(name, ("ledger", "show", path, "--delta", 1e-5)), "--json")
    assert result.exit_code == 0
    values = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert "delta" in values
    if name == "ledger":
        assert values["events"] == [{"sampling_prob": 1.0, "noise_multiplier": 5.0, "num_steps": 10}]
