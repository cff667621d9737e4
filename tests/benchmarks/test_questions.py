"""Each question runs in small, and the pages show the committed results."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner
from local_process import locally, settings_stay_as_they_were  # noqa: F401  (fixtures)

from benchmarks import (
    audit_power,
    beside,
    distributed,
    freed_memory,
    gpu,
    gpu_steps,
    growth,
    loader,
    noise_cost,
    overhead,
    padding,
    scaling,
    small_steps,
)
from benchmarks import targets as goals
from benchmarks.measure import ROOT
from benchmarks.recipes import __main__ as recipes
from benchmarks.results import filled, read, rows_of
from benchmarks.survey import __main__ as survey

TABLES = {
    "beside": (beside.PAGE, lambda: beside.tables(rows_of(beside.RESULT))),
    "performance": (goals.PAGE, lambda: goals.tables(goals.reports())),
    "growth": (growth.PAGE, lambda: {"growth": growth.table(read(growth.RESULT)["cases"])}),
    "distributed": (distributed.GUIDE, lambda: distributed.tables(read(distributed.RESULT)["cases"])),
    "padding": (padding.PAGE, lambda: padding.tables(read(padding.RESULT))),
    "recipes": (recipes.PAGE, lambda: recipes.tables(rows_of(recipes.RESULT))),
    "scaling": (scaling.DOCUMENT, scaling.tables),
    "trust": (audit_power.PAGE, audit_power.tables),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_tables_of_the_committed_results(name):
    """After a new run nothing is to be done: the command writes both."""
    page, tables = TABLES[name]
    text = page.read_text("utf-8")
    assert filled(text, tables()) == text


def test_the_survey_page_is_that_of_the_committed_result():
    found = survey.saved(survey.RESULT)
    assert survey.page(found.values(), read(survey.RESULT)["versions"]) == survey.PAGE.read_text("utf-8")


@pytest.mark.slow
def test_padding(tmp_path):
    """Each way of a batch and of a long record has the same clipped sum, but the one that clips rows of many records."""
    out = tmp_path / "padding.json"
    run = CliRunner().invoke(padding.main, ["--quick", "--rounds", "1", "--out", str(out)])
    assert run.exit_code == 0, run.output
    found = json.loads(out.read_text())
    errors = [row["error"] for row in [*found["rows"], *found["long"]]]
    assert errors.count(None) == 1
    assert all(error < 1e-5 for error in errors if error is not None)


def numbers_of(module, *arguments, out):
    run = CliRunner().invoke(module.main, ["--quick", "--rounds", "1", *arguments, "--out", str(out)])
    assert run.exit_code == 0, run.output
    return json.loads(out.read_text())["cases"]


@pytest.mark.slow
@pytest.mark.usefixtures("locally", "settings_stay_as_they_were")
def test_questions_run_in_small(tmp_path, monkeypatch):
    """Each measures every contestant, and its tables can be made of that."""
    cases = numbers_of(freed_memory, "--cases", "w3", out=tmp_path / "freed.json")
    assert len(cases["w3"]["contestants"]) == 4
    assert [len(line) for line in freed_memory.rows(cases)] == [len(freed_memory.HEADS)] * 2
    cases = numbers_of(overhead, "--cases", "w3", out=tmp_path / "overhead.json")
    assert list(cases["w3"]["contestants"]) == ["plain", "audit", "whole", "first"]
    assert [len(line) for line in overhead.rows(cases)] == [len(overhead.HEADS)]
    cases = numbers_of(loader, "--cases", "nested", out=tmp_path / "loader.json")
    assert [len(line) for line in loader.rows(cases)] == [len(loader.HEADS)]
    cases = numbers_of(noise_cost, out=tmp_path / "noise.json")
    assert all(len(case["contestants"]) == 8 for case in cases.values())
    known = {name: small_steps.ALL_CASES[name] for name in ("LSTM in both directions, packed", "chain")}
    monkeypatch.setattr(small_steps, "ALL_CASES", known)
    cases = numbers_of(small_steps, "--no-memory", out=tmp_path / "small.json")
    assert "One more use of a parameter takes" in small_steps.section(cases)


@pytest.mark.slow
@pytest.mark.usefixtures("settings_stay_as_they_were")
def test_steps_of_processes_are_measured(tmp_path, monkeypatch):
    """One process, this one: what several do is what `tests/distributed` compares."""
    document = tmp_path / "guide.md"
    document.write_text("before\n<!-- processes -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(distributed.mp, "spawn", lambda work, arguments, nprocs: work(0, *arguments))
    arguments = ["--cases", "w1", "--processes", "1", "--document", str(document)]
    case = numbers_of(distributed, *arguments, out=tmp_path / "distributed.json")["w1 x 1"]
    assert document.read_text().splitlines()[2] == f"| {' | '.join(distributed.HEADS)} |"
    assert set(case["contestants"]) == {"plain", "dp_step", *distributed.PARTS}
    assert case["contestants"]["plain"]["cpu"]["ratio"] == 1
    assert case["counts"]["normals"] >= case["trained_parameters"]


def test_both_loaders_make_the_same_batches(monkeypatch):
    """A contestant compares them before it is timed; a package that is missing is named."""
    numbers = loader.contestant({"case": "nested", "contestant": "dpfunc", "quick": True}).step()
    assert all(numbers[f"{span} steps"] > 0 for span in loader.SPANS)
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    found = {"hugging_face": loader.measure("hugging_face", 1, quick=True)}
    assert found["hugging_face"]["status"] == "not installed"
    assert loader.rows(found) == []


def test_pictures(tmp_path):
    growth.picture(read(growth.RESULT)["cases"], tmp_path / "growth.svg")
    goals.picture(read(goals.FOLDER / "engines.json")["cases"], "memory", tmp_path / "engines.svg")
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gpu.main, ["--results", str(tmp_path), "--pages", str(tmp_path)])
    assert result.exit_code == gpu.NO_GPU
    assert "No GPU was found" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("failing", "code"), [(None, 0), ("tests", 1), ("steps", 1)])
def test_every_part_on_a_gpu_is_run_and_noted(monkeypatch, tmp_path, failing, code):
    row = {"numbers": 10**7, "source": "secure", "best_ns": 8.0}
    monkeypatch.setattr(gpu, "noise", lambda device: [row])
    monkeypatch.setattr(gpu, "machine", lambda threads, device: {"gpu": "a GPU"})
    names, left = list(gpu.commands(tmp_path, tmp_path)), []

    def runner(command, seconds):
        left.append(seconds)
        return {"status": "exit code 3" if names[len(left) - 1] == failing else "ok", "seconds": 1.0}

    assert gpu.everything(tmp_path, tmp_path, runner) == code
    assert all(0 < seconds <= gpu.LIMIT_SECONDS for seconds in left)
    assert list(json.loads((tmp_path / "gpu.json").read_text())["parts"]) == names
    page = (tmp_path / "gpu.md").read_text()
    assert "| 10,000,000 | secure | 8.00 |" in page
    assert page.count(": exit code 3") == code


def test_parts_on_a_gpu(tmp_path):
    """The options of the commands exist; one is stopped when the time is over; noise is measured on the CPU too."""
    command = gpu.commands(tmp_path, tmp_path)["steps"]
    known = {option for each in gpu_steps.main.params for option in each.opts}
    assert {word for word in command if word.startswith("--")} <= known
    assert "cuda:" in (ROOT / "pyproject.toml").read_text()
    for program, status in (("exit(3)", "exit code 3"), ("while True: pass", "stopped: the time was over")):
        assert gpu.run([sys.executable, "-c", program], 1)["status"] == status
    assert gpu.noise("cpu", (1000,), 2)[0]["best_ns"] > 0


def test_every_target_is_measured_and_what_is_missed_has_a_reason():
    found = goals.judged(goals.reports())
    assert not [target.title for target, value, _ in found if value is None]
    said, whys = goals.PAGE.read_text("utf-8"), {target.why for target in goals.TARGETS} - {""} | {"small"}
    assert all(f"- **{why}**: " in said for why in whys)
    assert all(target.why for target, value, _ in found if value > target.limit)


@pytest.mark.parametrize(("value", "expected"), [(1.5, "met"), (1.65, "missed by 10 %"), (None, "not measured")])
def test_verdicts(value, expected):
    target = goals.Target("toy", 1.5, "x", "file", ("cases", "private"))
    found = {"file": {"cases": {} if value is None else {"private": value}}}
    assert goals.row_of(target, target.measured(found))[-1] == expected
