"""Killed runs: resumed bit for bit; see kills.py. `tools/kill_fuzz.py`, which is run here, kills more by default."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "times"), [("plain,sharded", 0.1), ("trainer,command", 0.1)])
def test_killed_runs_go_on_bit_for_bit(tmp_path, kinds, times):
    """A process of its own, which computes nothing itself: its forks are killed at any change of a file."""
    out = tmp_path / "kills.json"
    options = ["--kinds", kinds, "--times", str(times), "--seed", "1", "--out", str(out)]
    command = [sys.executable, str(ROOT / "tools" / "kill_fuzz.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    for found in json.loads(out.read_text())["kinds"].values():
        assert found["kills"] >= 2
        assert found["resumed"] >= 1
        assert found["changes"] > 100
