"""The commands and the script of the guide of budgets run, one after the other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from text_job import run

from dpfunc.budget import Budget

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "budget.md").read_text()


def test_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"(?m)^dpfunc (.*?)(?: +#.*)?$", GUIDE)
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    create, *others = map(shlex.split, commands)
    assert run(*create).exit_code == 0
    names = {"__name__": "guide"}
    exec(compile(code, "budget.md", "exec"), names)
    account = Budget("patients.db").account()
    assert account.entries["first model"].charged == names["state"].ledger == names["plan"].ledger()
    assert 2.9 < account.charged().epsilon(1e-6).epsilon <= 3.0
    assert len(others) == 2
    for command in others:  # to settle once more changes nothing
        result = run(*command)
        assert result.exit_code == 0, result.output
    assert Budget("patients.db").account().number == 2
