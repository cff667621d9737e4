"""The script that measures what keeping freed memory saves."""

from __future__ import annotations

import json
import subprocess

import pytest
from click.testing import CliRunner

from benchmarks import freed_memory
from benchmarks.engines import report, worker


def test_a_tiny_run_measures_both_steps_with_both_memories(tmp_path):
    out = tmp_path / "freed_memory.json"
    run = CliRunner().invoke(freed_memory.main, ["--quick", "--rounds", "1", "--cases", "w3", "--out", str(out)])
    assert run.exit_code == 0, run.output
    case = json.loads(out.read_text())["cases"]["w3"]
    assert list(case) == list(freed_memory.STEPS)
    for both in case.values():
        assert list(both) == list(freed_memory.MEMORIES)
        assert all(each["seconds"] > 0 and each["resident_mib"] > 0 for each in both.values())


def test_a_line_says_what_is_saved():
    given_back = {"seconds": 0.2, "page_faults": 900.0, "resident_mib": 50.0}
    kept = {"seconds": 0.15, "page_faults": 0.0, "resident_mib": 55.0}
    lines = freed_memory.rows({"w1": {"private": {"given back": given_back, "kept": kept}}})
    assert lines == [["w1", "private", "200", "150", "25 %", "900", "0", "50", "55"]]


@pytest.mark.parametrize("kept", [True, False])
def test_a_result_says_whether_freed_memory_was_kept(monkeypatch, kept):
    for name, value in report.KEEPS.items():
        monkeypatch.setenv(name, value) if kept else monkeypatch.delenv(name, raising=False)
    assert report.machine(1, "cpu")["freed_memory"] == ("kept" if kept else "as the system has it")


def test_memory_is_measured_where_freed_memory_goes_back(monkeypatch):
    seen = {}

    def run(command, env, **rest):
        seen.update(env)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    monkeypatch.setattr(worker.subprocess, "run", run)
    worker.ask({})
    assert "PATH" in seen
    assert not [name for name in seen if name.startswith("MALLOC_")]
