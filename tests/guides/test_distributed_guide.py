"""The script of the guide runs in one process and in two."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from jobs import document
from workers import run

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "distributed.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guide_runs(capsys):
    alone, ledger = document(CODE)
    assert "epsilon=2.99" in capsys.readouterr().out
    first, second = run(2, "jobs:document", CODE)
    assert first[1] == second[1] == ledger
    for name, value in alone.items():
        assert torch.equal(first[0][name], second[0][name])
        assert first[0][name].shape == value.shape
