"""The benchmark of several processes runs, and the guide shows what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.distributed import HEADS, RESULT, table

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_measures_all_parts(tmp_path):
    out, document = tmp_path / "out.json", tmp_path / "guide.md"
    document.write_text("before\n<!-- processes -->\nold\n<!-- end -->\n")
    command = [
        sys.executable, "-W", "ignore", "-m", "benchmarks.distributed", "--quick", "--rounds", "2", "--cases", "w1",
        "--processes", "2", "--out", str(out), "--document", str(document),
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert row["processes"] == 2
    assert document.read_text().splitlines()[2] == f"| {' | '.join(HEADS)} |"
    parts = {"clipped sum", "handshake", "all-reduce", "noise", "checksum"}
    assert set(row["seconds"]) == {"plain", "dp_step", *parts}
    assert all(value > 0 for name in ("seconds", "cpu_seconds") for value in row[name].values())
    assert row["ratio"]["plain"] == row["cpu_ratio"]["plain"] == 1.0
    assert row["counts"]["collectives"] == 3  # agreement, sum, confirmation
    # Half of the noise each: tiles are whole, and of some only a part is wanted.
    assert 0.3 < row["counts"]["normals"] / row["trained_parameters"] < 0.7


def test_the_guide_shows_the_committed_result():
    lines = table(json.loads(RESULT.read_text())["rows"])
    guide = (ROOT / "docs" / "guides" / "distributed.md").read_text()
    assert f"| {' | '.join(HEADS)} |" in guide
    for line in lines:
        assert f"| {' | '.join(line)} |" in guide
