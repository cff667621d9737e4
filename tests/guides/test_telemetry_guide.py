"""The guide of telemetry runs, and releases what it says."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "telemetry.md").read_text()


def test_the_block_runs(capsys):
    names = {}
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(block, "telemetry.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) == 21
    errors, state = names["plan"].telemetry_errors(), names["state"]
    assert abs(state.telemetry["accuracy"] - 1 / 3) < 6 * errors["accuracy"] + 0.2
    assert len(state.telemetry["norm"]) == 4
