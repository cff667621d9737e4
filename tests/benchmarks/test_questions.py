"""Each question runs in small, and the pages show the committed results."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner
from local_process import locally, threads_stay_as_they_were  # noqa: F401  (fixtures)

from benchmarks import distributed, freed_memory, gpu, growth, loader, noise_cost, overhead, small_steps, targets
from benchmarks.growth import AXES, Axis, exponent
from benchmarks.measure import ROOT, timed_in_turn
from benchmarks.recipes import __main__ as recipes
from benchmarks.recipes import trainer
from benchmarks.results import filled, read, rows_of
from benchmarks.scaling import __main__ as scaling
from benchmarks.survey import __main__ as survey
from benchmarks.targets import MS, RATIO, REASONS, TARGETS, Target, judged, reports, verdict

TABLES = {
    "performance": (targets.PAGE, lambda: targets.tables(reports())),
    "growth": (growth.PAGE, lambda: {"growth": growth.table(read(growth.RESULT)["cases"])}),
    "distributed": (distributed.GUIDE, lambda: distributed.tables(read(distributed.RESULT)["cases"])),
    "recipes": (recipes.PAGE, lambda: recipes.tables(rows_of(recipes.RESULT))),
    "readme": (recipes.README, lambda: recipes.short(rows_of(recipes.RESULT))),
    "trainer": (recipes.PAGE, lambda: trainer.tables(rows_of(trainer.RESULT))),
    "scaling": (scaling.DOCUMENT, lambda: scaling.filled_in(read(scaling.RESULT))),
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


def numbers_of(module, *arguments, out):
    run = CliRunner().invoke(module.main, ["--quick", "--rounds", "1", *arguments, "--out", str(out)])
    assert run.exit_code == 0, run.output
    return json.loads(out.read_text())["cases"]


@pytest.mark.slow
@pytest.mark.usefixtures("locally", "threads_stay_as_they_were")
def test_questions_over_the_engines_run_in_small(tmp_path):
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
    assert all(len(case["contestants"]) == 9 for case in cases.values())


@pytest.mark.slow
@pytest.mark.usefixtures("locally", "threads_stay_as_they_were")
def test_small_steps_are_measured(tmp_path, monkeypatch):
    known = {name: small_steps.ALL_CASES[name] for name in ("LSTM in both directions, packed", "chain")}
    monkeypatch.setattr(small_steps, "ALL_CASES", known)
    cases = numbers_of(small_steps, "--no-memory", out=tmp_path / "small.json")
    assert "One more use of a parameter takes" in small_steps.section(cases)


@pytest.mark.slow
def test_several_processes_are_measured(tmp_path):
    document = tmp_path / "guide.md"
    document.write_text("before\n<!-- processes -->\nold\n<!-- end -->\n")
    arguments = ["--cases", "w1", "--processes", "2", "--document", str(document)]
    case = numbers_of(distributed, *arguments, out=tmp_path / "distributed.json")["w1 x 2"]
    assert document.read_text().splitlines()[2] == f"| {' | '.join(distributed.HEADS)} |"
    assert set(case["contestants"]) == {"plain", "dp_step", *distributed.PARTS}
    assert case["contestants"]["plain"]["cpu"]["ratio"] == 1
    assert case["counts"]["collectives"] == 3  # agreement, sum, confirmation
    # Half of the noise each: tiles are whole, and of some only a part is wanted.
    assert 0.3 < case["counts"]["normals"] / case["trained_parameters"] < 0.7


def test_a_line_says_what_keeping_memory_saves():
    both = {
        f"{step}, {freed}": {"time": {"median_seconds": seconds}, "page_faults": faults, "resident_mib": 50.0}
        for step in freed_memory.STEPS
        for freed, seconds, faults in (("given back", 0.2, 900.0), ("kept", 0.15, 0.0))
    }
    line = ["200", "150", "25 %", "900", "0", "50", "50"]
    assert freed_memory.rows({"w1": {"contestants": both}}) == [["w1", "plain", *line], ["w1", "private", *line]]


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    found = {"hugging_face": loader.measure("hugging_face", 1, quick=True)}
    assert found["hugging_face"]["status"] == "not installed"
    assert loader.rows(found) == []


@pytest.mark.parametrize("name", ["small batch", "nested"])
def test_both_loaders_make_the_same_batches(name):
    """A contestant compares them before it is timed."""
    numbers = loader.contestant({"case": name, "contestant": "dpfunc", "quick": True}).step()
    assert all(numbers[f"{span} steps"] > 0 for span in loader.SPANS)


def test_an_audit_is_one_step():
    spec = {"cases": "benchmarks.engines.cases", "case": "w3", "quick": True, "device": "cpu", "contestant": "audit"}
    found = timed_in_turn({"audit": overhead.contestant(spec).step}, 1)
    assert found["audit"]["time"]["best_seconds"] > 0


def test_sizes_of_growth():
    """T = 128..4096, B = 1..1024, 1M..300M parameters, rank 1..64."""
    ends = {name: (min(axis.sizes), max(axis.sizes)) for name, axis in AXES.items()}
    assert (ends["T"], ends["B"], ends["r"]) == ((128, 4096), (1, 1024), (1, 64))
    assert ends["P"][0] <= 1e6
    assert ends["P"][1] >= 3e8
    assert growth.ALL_CASES["T/LoRA/512"].problem().inputs.shape == (2, 512)
    assert growth.ALL_CASES["B/all parameters/16"].problem().batch_size == 16
    ranks = {tuple(p.shape) for p in growth.ALL_CASES["r/LoRA/4"].problem().module.parameters() if p.requires_grad}
    assert all(4 in shape for shape in ranks)
    smallest = min(AXES["P"].sizes)
    blocks = growth.ALL_CASES[f"P/all parameters/{smallest}"].problem().module[1:-2]
    assert sum(p.numel() for p in blocks.parameters()) == pytest.approx(smallest, rel=0.03)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_exponents_are_those_of_the_large_end(power):
    sizes = [1, 2, 4, 8, 16]
    assert exponent(sizes, [7.0, 7.0, *(3 * size**power for size in sizes[2:])]) == pytest.approx(power)


def test_the_picture_of_growth(tmp_path, monkeypatch):
    axis = Axis("positions", {4: {}, 8: {}}, {})
    monkeypatch.setattr(growth, "AXES", {"T": axis})
    each = {"time": {"best_seconds": 1.0}, "memory": {"peak_mib": 2.0}}
    case = {"contestants": dict.fromkeys(growth.CONTESTANTS, each)}
    growth.picture({f"T/{tuning}/{size}": case for tuning in axis.tunings for size in axis.sizes}, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gpu.main, ["--results", str(tmp_path), "--pages", str(tmp_path)])
    assert result.exit_code == gpu.NO_GPU
    assert "No GPU was found" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("failing", "code"), [(None, 0), ("tests", 1), ("engines", 1)])
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
    assert page.count("| exit code 3 |") == code


@pytest.mark.parametrize(
    ("program", "seconds", "status"),
    [("pass", 60, "ok"), ("import sys; sys.exit(3)", 60, "exit code 3"),
     ("import time; time.sleep(600)", 1, "stopped: the time was over")],
)  # fmt: skip
def test_a_part_is_stopped_when_the_time_is_over(program, seconds, status):
    assert gpu.run([sys.executable, "-c", program], seconds)["status"] == status


def test_the_commands_for_a_gpu_exist(tmp_path):
    """Their options are those of the programs; the marker is known to pytest."""
    from benchmarks.engines.__main__ import main
    from benchmarks.engines.cases import CASES

    command = gpu.commands(tmp_path, tmp_path)["engines"]
    known = {option for each in main.params for option in each.opts}
    assert {word for word in command if word.startswith("--")} <= known
    assert set(gpu.CASES.split(",")) <= set(CASES)
    assert "cuda:" in (ROOT / "pyproject.toml").read_text()


def test_noise_is_measured_on_the_cpu_too():
    (row,) = gpu.noise("cpu", (1000,), 2)
    assert row["best_ns"] > 0


def test_every_target_is_measured_and_what_is_missed_has_a_reason():
    found = judged(reports())
    assert not [target.title for target, value in found if value is None]
    assert {target.why for target in TARGETS} - {""} | {"small"} == set(REASONS)
    assert all(target.why for target, value in found if value is not None and value > target.limit)


@pytest.mark.parametrize(("value", "expected"), [(1.5, "met"), (1.65, "missed by 10 %"), (None, "not measured")])
def test_verdicts(value, expected):
    target = Target("toy", 1.5, RATIO, "file", ("cases", "private"))
    found = {"file": {"cases": {} if value is None else {"private": value}}}
    assert verdict(target, target.measured(found)) == expected
    assert verdict(target, target.measured({})) == "not measured"


def test_small_steps_have_their_own_limit():
    """1.5 x plain + 3 ms, for steps of at most 5 ms."""

    def case(plain):
        seconds = {"plain": plain, "auto": 0.01}
        return {"contestants": {who: {"cpu": {"best_seconds": value}} for who, value in seconds.items()}}

    small = judged({"small_steps": {"cases": {"a": case(0.004), "b": case(0.006)}}})
    small = [(t.title, t.limit, value) for t, value in small if t.unit == MS and "step of" in t.title]
    assert small == [("a: a step of 4.0 ms", pytest.approx(9.0), pytest.approx(10.0))]


def timed(seconds, mib):
    return {"status": "ok", "time": {"median_seconds": seconds, "ratio": seconds / 2}, "memory": {"peak_mib": mib}}


def test_the_table_of_jax_names_both_bases():
    """The plain step of PyTorch, and the plain step of JAX."""
    contestants = {
        **{"plain": timed(2.0, 10), "auto": timed(2.2, 11), "jax-plain": timed(3.0, 20), "jax-privacy": timed(6.0, 60)},
        **{"jax-privacy/4": timed(4.5, 25), "jax-privacy/8": timed(5.0, 35), "whole-plain": timed(2.5, 10)},
        **{"whole-dpfunc": timed(5.0, 10), "whole-jax": timed(7.5, 10), "whole-jax/4": timed(6.25, 10)},
    }
    (row,) = targets.jax_rows({"w1": {"contestants": contestants}})
    assert row[:5] == ["w1", "1.50", "3.00", "2.25 (4)", "1.50"]
    assert row[5:] == ["10", "11", "20", "60", "25", "2.00", "2.50"]
    assert len(row) == len(targets.JAX_HEADS)


def test_the_table_of_engines_names_the_fastest_of_a_peer():
    absent = {"jax-privacy": {"status": "x: not installed."}}
    contestants = {"plain": timed(2.0, 10), "opacus-hooks": timed(6.0, 9), "opacus-ghost": timed(4.0, 9), **absent}
    cases = {"w1": {"title": "LoRA", "contestants": contestants}}
    assert targets.engine_rows(cases) == [
        ["LoRA (w1)", "2000", "", "", "", "", "2.00 (ghost)", "", "not installed", ""]
    ]
    assert targets.jax_section(cases) == "JAX Privacy: not installed."
