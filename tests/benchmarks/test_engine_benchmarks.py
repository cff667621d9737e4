"""The benchmark of the engines: it runs, refuses to time what is wrong, and its meters are right."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import dpfunc
from dpfunc.engines import vmap

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import memory, plots, worker
from benchmarks.engines.__main__ import main
from benchmarks.engines.cases import ALL_CASES, CASES, LAYER_CASES
from benchmarks.engines.contestants import ENGINES, OPACUS, known, prepare
from benchmarks.engines.parity import TOLERANCE, Truth, relative_error
from benchmarks.engines.runner import Settings, run_case
from benchmarks.engines.timing import interleaved, rotated, summary

MIB = 2**20
PRESENT = [name for name in ENGINES if hasattr(dpfunc.engines, name)]
QUICK = Settings(rounds=1, threads=1, memory=False, quick=True)


@pytest.fixture(autouse=True)
def threads_stay_as_they_were():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("benchmark") / "engines.json"
    options = {"--cases": "w1,w3", "--engines": "vmap", "--rounds": "2", "--threads": "1"}
    arguments = [word for pair in options.items() for word in pair]
    result = CliRunner().invoke(main, ["--quick", *arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "x plain" in result.output
    return json.loads(out.read_text())


@pytest.mark.slow
def test_the_result_file_has_its_fields(written):
    assert {"cpu", "cores", "load_1min", "torch_threads", "freed_memory", "gpu"} == written["machine"].keys()
    assert {"python", "torch", "opacus", "dpfunc"} <= written["versions"].keys()
    assert list(written["cases"]) == ["w1", "w3"]
    for record in written["cases"].values():
        assert record["batch_size"] == 4
        assert 0 < record["trained_parameters"] <= record["parameters"]
        assert list(record["contestants"]) == ["plain", "vmap"]
        for result in record["contestants"].values():
            assert result["status"] == "ok"
            assert result["time"]["ratio"] > 0
            assert len(result["time"]["ratio_quartiles"]) == 2
            assert result["memory"]["status"] == "ok"
            assert result["memory"]["ratio"] > 0
            assert result["memory"]["resident_mib"] > result["memory"]["total_mib"] > result["memory"]["peak_mib"]
        plain = record["contestants"]["plain"]
        assert plain["time"]["ratio"] == plain["memory"]["ratio"] == 1
        assert record["contestants"]["vmap"]["relative_error"] < TOLERANCE
        assert record["contestants"]["vmap"]["memory"]["ratio"] > 1  # it holds all gradients


def test_engines_that_exist_agree():
    for case in ("w1", "w3"):
        results = run_case(case, [*PRESENT, "vmap/3"], QUICK)["contestants"]
        assert all(result["status"] == "ok" for result in results.values()), results


@pytest.mark.slow
def test_page_and_pictures(written, tmp_path):
    source = tmp_path / "engines.json"
    broken = {"status": "x: NotImplementedError: Parameter tying"}
    written["cases"]["w3"]["contestants"]["opacus-ghost"] = broken
    written["largest_batch"] = {"vgg19": {"limit_mib": 2048.0, "contestants": {"vmap": {"largest_batch": 21}}}}
    source.write_text(json.dumps(written))
    result = CliRunner().invoke(plots.main, [str(source), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["engines_memory.png", "engines_time.png"]
    page = (tmp_path / "engines.md").read_text()
    assert "- opacus-ghost in w3: NotImplementedError: Parameter tying" in page
    assert "| vmap | 21 |" in page
    rows = [line for line in page.splitlines() if line.startswith("| w3 ")]
    assert len(rows) == 3  # time, memory, what it is
    assert rows[0].endswith("x |")
    assert "**" in rows[0]


@pytest.mark.parametrize("name", ALL_CASES)
def test_cases_are_the_same_each_time_and_have_a_loss_a_sample(name):
    problem, again = ALL_CASES[name].problem(quick=True), ALL_CASES[name].problem(quick=True)
    assert torch.equal(problem.inputs, again.inputs)
    assert all(torch.equal(p, q) for p, q in zip(problem.module.parameters(), again.module.parameters(), strict=True))
    losses = problem.losses(problem.module(problem.inputs), problem.targets)
    assert losses.shape == (problem.batch_size,)
    assert problem.module.training
    assert bool(problem.jax_model) != bool(problem.no_jax_model)
    assert not list(problem.module.buffers()) or name in ("gpt2", "bert")
    assert ALL_CASES[name].problem(quick=True, batch_size=1).batch_size == 1
    assert ALL_CASES[name].quick.keys() == ALL_CASES[name].sizes.keys()


@pytest.mark.parametrize("case", ["w1", "w3", "layer:attention", "layer:lstm"])
def test_peers_agree_or_say_why_not(case):
    record = run_case(case, OPACUS, QUICK)
    assert all(result["status"] == "ok" for result in record["contestants"].values()), record
    assert all(record["contestants"][name]["relative_error"] < TOLERANCE for name in OPACUS)


def test_a_peer_that_does_not_run_is_reported():
    results = run_case("gpt2", ["opacus-ghost", "vmap"], QUICK)["contestants"]
    assert results["opacus-ghost"] == {"status": results["opacus-ghost"]["status"]}
    assert results["opacus-ghost"]["status"].startswith("x: NotImplementedError: Parameter tying")
    assert "time" in results["vmap"]


class Faulty:
    """An engine whose sums are a little off, or that forgets a parameter."""

    def __init__(self, scale, forgotten):
        self.scale, self.forgotten = scale, forgotten

    def __call__(self, loss_fn, params, batch):
        self.inner = vmap()(loss_fn, params, batch)
        self.losses_B = self.inner.losses_B
        return self

    def sq_norms(self):
        return self.inner.sq_norms()

    def weighted_sum(self, factors):
        sums = {name: self.scale * value for name, value in self.inner.weighted_sum(factors).items()}
        return {name: value * (self.forgotten not in name) for name, value in sums.items()}


@pytest.mark.parametrize(("scale", "forgotten"), [(1.0, "nothing"), (1.001, "nothing"), (0.999, "nothing"), (1, "1.w")])
def test_a_wrong_contestant_is_caught_and_not_timed(scale, forgotten, monkeypatch):
    monkeypatch.setattr(dpfunc.engines, "ghost", lambda: Faulty(scale, forgotten), raising=False)
    results = run_case("w3", ["ghost"], QUICK)["contestants"]
    if scale == 1.0 and forgotten == "nothing":
        assert results["ghost"]["status"] == "ok"
        assert "time" in results["ghost"]
    else:
        assert results["ghost"]["status"].startswith("wrong: ")
        assert results["ghost"]["relative_error"] > TOLERANCE
        assert "time" not in results["ghost"]


def test_an_engine_that_does_not_clip_is_caught():
    """The clip norm is set so that some samples are clipped, and some are not."""
    problem = CASES["w3"].problem(quick=True)
    norms = Truth.of(problem.module, problem, ()).norms
    clip_norm = run_case("w3", [], QUICK)["clip_norm"]
    assert min(norms) <= clip_norm < max(norms)
    truth = Truth.of(problem.module, problem, (clip_norm, 2 * max(norms)))
    clipped, not_clipped = truth.sums.values()
    assert truth.error(not_clipped, clip_norm) > TOLERANCE
    assert truth.error(clipped, clip_norm) == 0


def test_relative_error():
    truth = {"large": torch.ones(100).double(), "small": torch.full((2,), 1e-3).double(), "none": torch.zeros(3)}
    sizes = {"large": 10.0, "small": 1e-3 * 2**0.5, "none": 0.0}

    def error(**changed):
        return relative_error({**truth, **changed}, truth, sizes)

    assert error() == 0
    assert error(small=1.01 * truth["small"]) > TOLERANCE
    assert error(none=torch.full((3,), 1e-7)) < TOLERANCE
    assert relative_error({name: truth[name] for name in ("large", "none")}, truth, sizes) > TOLERANCE
    assert error(other=truth["large"]) == math.inf
    assert error(none=torch.full((3,), math.nan)) == math.inf
    assert relative_error(None, truth, sizes) == 1


def test_the_meter_is_exact():
    kept = [torch.empty(8 * MIB, dtype=torch.uint8)]

    def pattern():
        first = torch.empty(3 * MIB, dtype=torch.uint8)
        second = torch.empty(MIB, dtype=torch.uint8)
        del first
        kept.clear()  # was there before: neither counted nor subtracted
        third = torch.empty(2 * MIB, dtype=torch.uint8)
        del second
        return third

    result, used = memory.allocated(pattern)
    assert result.numel() == 2 * MIB
    assert used == (4 * MIB, 2 * MIB)
    assert memory.peak_resident() > 10 * MIB


def test_the_meter_sees_a_backward_pass():
    x = torch.ones(2**18, requires_grad=True)  # 1 MiB

    def step():
        x.grad = None
        x.exp().sum().backward()  # exp is kept, and its gradient is made

    _, used = memory.allocated(step)
    assert used.left == pytest.approx(MIB, abs=100)
    assert 2 * MIB <= used.peak <= 2 * MIB + 1000


def test_largest_batch_is_the_largest():
    spec = {"case": "layer:linear", "contestant": "vmap", "quick": True, "microbatch": "none", "device": "cpu"}
    spec |= {"threads": 1, "limit_mib": 0.2, "largest_tried": 4096}
    found = worker.answer(spec)
    assert found["total_mib"] <= 0.2
    assert worker.step_memory(spec, found["largest_batch"])["total_mib"] == found["total_mib"]
    assert worker.step_memory(spec, found["largest_batch"] + 1)["total_mib"] > 0.2
    assert worker.answer({**spec, "limit_mib": 0.001})["largest_batch"] == 0
    assert worker.answer({**spec, "limit_mib": 1e6, "largest_tried": 3})["largest_batch"] == 3
    assert worker.answer({**spec, "contestant": "vmap/auto", "case": "?"})["status"] == "x: KeyError: '?'"


def test_rounds_are_interleaved_and_rotated():
    seen = []
    steps = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    seconds = interleaved(steps, 3)
    assert "".join(seen) == "abc" + "bca" + "cab" + "abc"
    assert all(len(values) == 3 for values in seconds.values())
    assert sorted(rotated("abc", 7)) == ["a", "b", "c"]


def test_ratios_are_taken_within_rounds():
    found = summary([2.0, 40.0, 6.0], [1.0, 20.0, 2.0])  # the second round was slow for both
    assert found["ratio"] == 2
    assert found["ratio_quartiles"] == [2, 2.5]
    assert (found["median_seconds"], found["best_seconds"]) == (6, 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[("plain", True), ("auto/4", True), ("ghost/auto", True), ("auto/none", True), ("opacus-ghost", True)],
        *[("auto/0", False), ("plain/4", False), ("opacus-ghost/2", False), ("vmap/", False), ("gost", False)],
    ],
)
def test_names_of_contestants(name, expected):
    assert known(name) == expected


def test_a_microbatch_changes_memory_and_not_the_sum():
    problem = CASES["w1"].problem(quick=True)
    whole, parts = prepare("vmap", problem.copy()), prepare("vmap/1", problem.copy())
    truth = Truth.of(problem.module, problem, (whole.bound,))
    assert max(truth.error(whole.step(), whole.bound), truth.error(parts.step(), parts.bound)) < TOLERANCE
    assert memory.allocated(parts.step)[1].peak < memory.allocated(whole.step)[1].peak


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "w1,w8"], "no case w8"),
        (["--engines", "gost"], "no contestant gost"),
        (["--microbatch", "0"], "positive number"),
        (["--largest", "huge"], "no case huge"),
    ],
)
def test_misspelt_options_are_refused(arguments, message):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_memory_alone_keeps_the_times_of_the_file(tmp_path):
    out = tmp_path / "engines.json"
    common = ["--out", str(out), "--quick", "--cases", "layer:linear", "--engines"]
    assert CliRunner().invoke(main, [*common, "plain,vmap", "--rounds", "2", "--no-memory"]).exit_code == 0
    before = json.loads(out.read_text())["cases"]["layer:linear"]["contestants"]
    assert CliRunner().invoke(main, [*common, "plain", "--rounds", "0", "--append"]).exit_code == 0
    after = json.loads(out.read_text())["cases"]["layer:linear"]["contestants"]
    assert [name for name in after if "memory" in after[name]] == ["plain"]
    assert after["plain"]["memory"]["peak_mib"] > 0
    assert {name: after[name]["time"] for name in after} == {name: before[name]["time"] for name in before}


def test_append_keeps_other_cases_but_mixes_no_sizes(tmp_path):
    out = tmp_path / "engines.json"
    common = ["--engines", "plain", "--rounds", "0", "--no-memory", "--threads", "1", "--out", str(out)]
    for case in ("w3", "layer:linear"):
        assert CliRunner().invoke(main, [*common, "--quick", "--append", "--cases", case]).exit_code == 0
    assert list(json.loads(out.read_text())["cases"]) == ["w3", "layer:linear"]
    refused = CliRunner().invoke(main, [*common, "--append", "--cases", ""])
    assert refused.exit_code == 2
    assert "leave out --append" in refused.output


def test_every_layer_is_also_a_case():
    assert len(LAYER_CASES) == 13
    assert ALL_CASES.keys() == CASES.keys() | LAYER_CASES.keys()
