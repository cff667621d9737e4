"""Killed runs: resumed bit for bit; see kills.py. `tools/kill_fuzz.py` is the long version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import json, sys
from pathlib import Path
from kills import first_problems, fuzz, summary, warm
folder, kills = Path(sys.argv[1]), json.loads(sys.argv[2])
warm(list(kills), folder)
tallies = {name: fuzz(name, points=points, folder=folder, seed=1) for name, points in kills.items()}
print(json.dumps({**summary(tallies), "said": first_problems(tallies)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [{"plain": 12, "sharded": 3}, {"trainer": 3, "command": 3}], ids=["loop", "trainer"])
def test_killed_runs_go_on_bit_for_bit(tmp_path, kills):
    """A process of its own, which computes nothing itself: its forks are killed at any change of a file."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "_support")])
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), json.dumps(kills)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found.pop("said")
    for name, points in kills.items():
        assert found[name]["kills"] >= points
        assert found[name]["resumed"] >= 1
        assert found[name]["changes"] > 100
