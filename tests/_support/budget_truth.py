"""What a budget must say after the processes of `budget_jobs` were killed, by what these have told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

JOBS = Path(__file__).with_name("budget_jobs.py")


def killed(url, folder, kills, cuts=False):
    """What is left after so many kills, with four processes at once."""
    folder.mkdir()
    command = [sys.executable, str(JOBS), url, str(folder), str(kills), str(cuts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["failures"], done.stderr
    return found


def check(found):
    """No charge is lost, and none is counted twice. Returns where the processes were when they were killed."""
    entries, runs = found["entries"], {}
    for lines in found["told"]:
        for what, run, count in lines:
            runs.setdefault(run, {})[what] = count
    assert set(entries) <= set(runs)
    where = Counter()
    for run, said in runs.items():
        last = list(said)[-1]
        where[last] += 1
        if run not in entries:
            assert "reserved" not in said, (run, said)
            continue
        state, planned, charged = entries[run]
        assert planned == said["planned"]
        assert said.get("spent", 0) <= charged <= planned, (run, said, charged)
        if "settled" in said:
            assert (state, charged) == ("settled", said["settled"])
        elif "settling" in said:
            assert charged in (planned, said["settling"])
        else:
            assert (state, charged) == ("reserved", planned)
        if "refused" in said:
            assert "reserved" in said  # it was tried again
    assert found["total"] == sum(charged for _, _, charged in entries.values())
    assert found["events"] == len(entries) + sum(state == "settled" for state, _, _ in entries.values())
    assert found["epsilon"] <= 5.0
    return where
