"""How steps are measured: meters, rounds, processes; what fails is a line of the table."""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import pytest
import torch
from local_process import locally  # noqa: F401  (a fixture)

from benchmarks import measure, results
from benchmarks.measure import MIB, Contestant, Failed, Numbers, Process, compete, in_turn, summary

SUMS = {"right": {"w": np.ones(3)}, "wrong": {"w": np.full(3, 1.001)}, "float32": {"w": np.full(3, 1.001)}}


def contestant(spec):
    """A question of its own: contestants named after what they do."""
    name = spec["contestant"]
    if name == "broken":
        raise KeyError("no such model")
    if name == "no sums":
        return Contestant(lambda: Numbers({"batches": 2.0}))
    sums = SUMS["right"] if name == "float32" and spec.get("double") else SUMS[name]
    memory = {"peak_mib": 1.0 if name == "right" else 2.0}
    return Contestant(lambda: sums, lambda result: result, memory=lambda: memory, facts={"fact": name})


@pytest.mark.usefixtures("locally")
def test_contestants_are_compared_timed_and_weighed():
    names = ("no sums", "right", "right@against", "wrong", "float32", "broken")
    specs = {name: {"module": __name__, "contestant": name.partition("@")[0]} for name in names}
    error = lambda name, sums, double: float(np.abs(sums["w"] - 1).max())
    found = compete(specs, 3, base="right", error=error, memory=True)
    statuses = ["ok", "ok", "ok", "wrong: 0.001", "ok", "x: KeyError: 'no such model'"]
    assert [found[name]["status"] for name in names] == statuses
    assert found["right"]["fact"] == "right"
    assert found["right"]["time"]["ratio"] == found["right"]["cpu"]["ratio"] == 1
    assert found["no sums"]["batches"]["median_seconds"] == 2
    assert "time" not in found["wrong"]
    assert found["float32"]["relative_error"] > 1e-4 > found["float32"]["relative_error_float64"]
    assert found["float32"]["memory"]["ratio"] == 2
    assert found["right"]["against"]["ratio"] > 0  # another checkout
    assert "against" not in found["no sums"]


def test_a_process_answers_and_dies_by_itself(tmp_path):
    """Another dpfunc is imported where one is named; what a contestant prints is no answer; an end is an error."""
    (tmp_path / "dpfunc").mkdir()
    (tmp_path / "dpfunc" / "__init__.py").write_text("")
    (tmp_path / "question.py").write_text(
        "import dpfunc\nfrom benchmarks.measure import Contestant\n"
        "def contestant(spec):\n"
        "    print('noise')\n"
        "    return Contestant(lambda: exit(3), facts={'file': dpfunc.__file__}, answer=lambda word: {'word': word})\n"
    )
    spec = {"module": "question", "dpfunc": str(tmp_path), "freed": "kept", "python": sys.executable}  # without torch
    process = Process(spec)
    try:
        assert process.facts["file"] == str(tmp_path / "dpfunc" / "__init__.py")
        assert process.ask("answer a b") == {"word": "a b"}
        with pytest.raises(Failed, match="the process ended with code 3"):
            process.ask("step")
    finally:
        process.close()
    with pytest.raises(Failed, match="ModuleNotFoundError: No module named 'absent'"):
        Process({**spec, "module": "absent"})
    with pytest.raises(Failed, match="no step within 0 s"):
        Process({**spec, "limit_seconds": 0})


def test_the_meters():
    kept = [torch.empty(8 * MIB, dtype=torch.uint8)]

    def pattern():
        first = torch.empty(3 * MIB, dtype=torch.uint8)
        second = torch.empty(MIB, dtype=torch.uint8)
        del first
        kept.clear()  # was there before: neither counted nor subtracted
        third = torch.empty(2 * MIB, dtype=torch.uint8)
        del second
        return third

    result, used = measure.allocated(pattern)
    assert result.numel() == 2 * MIB
    assert used == (4 * MIB, 2 * MIB)
    assert measure.resident() > 10 * MIB
    found = measure.timed(lambda: time.sleep(0.05))
    assert found["seconds"] >= 0.05 > found["cpu_seconds"]
    assert measure.timed(lambda: Numbers(seconds=3.0))["seconds"] == 3


def test_rounds_are_interleaved_and_ratios_are_taken_within_them():
    seen = []
    found = in_turn({name: (lambda name=name: seen.append(name)) for name in "abc"}, 3)
    assert "".join(seen) == "abc" + "bca" + "cab" + "abc"
    assert all(len(values) == 3 for values in found.values())
    found = summary([2.0, 40.0, 6.0], [1.0, 20.0, 2.0])  # the second round was slow for both
    assert found["ratio"] == 2
    assert found["ratio_quartiles"] == [2, 2.5]
    assert (found["median_seconds"], found["best_seconds"]) == (6, 2)


@pytest.mark.parametrize("kept", [True, False])
def test_a_result_says_on_what_it_was_measured(monkeypatch, kept, tmp_path):
    for name, value in measure.KEEPS.items():
        monkeypatch.setenv(name, value) if kept else monkeypatch.delenv(name, raising=False)
    file = tmp_path / "result.json"
    results.write(file, {"cases": {"a": {"number": 1 / 3, "none": math.inf}}})
    found = results.read(file)
    assert found["machine"]["freed_memory"] == ("kept" if kept else "as the system has it")
    assert {"cpu", "cores", "load_1min", "torch_threads", "gpu"} <= found["machine"].keys()
    assert {"python", "torch", "opacus", "dpfunc"} <= found["versions"].keys()
    assert found["cases"] == {"a": {"number": 0.33333, "none": "inf"}}
    for row in ({"data": "b", "x": 1}, {"data": "a", "x": 2}, {"data": "b", "x": 3}):
        results.keep(file, row, lambda row: row["data"])
    assert results.rows_of(file) == [{"data": "a", "x": 2}, {"data": "b", "x": 3}]
