"""The guide of audits and replays runs, and what it prints is what it says."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "evidence.md").read_text()


def test_blocks_run_in_their_order(capsys):
    names = {}
    replayed, audited = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(replayed, "evidence.md", "exec"), names)
    told = capsys.readouterr().out
    assert "DOES NOT HOLD" in told
    assert "rows of other records" in told
    exec(compile(replayed.replace(" - data.mean(0)", ""), "evidence.md", "exec"), names)
    assert "Replay(holds" in capsys.readouterr().out
    exec(compile(audited, "evidence.md", "exec"), names)
    assert "claim" in capsys.readouterr().out
