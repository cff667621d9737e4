"""The benchmark of the engines: it runs, refuses to time what is wrong, and names who takes part; JAX is a stub."""

from __future__ import annotations

import json
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from local_process import Local, locally, threads_stay_as_they_were  # noqa: F401  (fixtures)

import dpfunc
from benchmarks import measure, small_steps
from benchmarks.engines import contestants, plots
from benchmarks.engines.__main__ import main
from benchmarks.engines.cases import ALL_CASES, CASES
from benchmarks.engines.contestants import ENGINES, OPACUS, known, problem_of
from benchmarks.engines.problem import Truth, relative_error
from benchmarks.engines.runner import Settings, Truths, run_case
from benchmarks.measure import TOLERANCE
from dpfunc.engines import vmap

STUB = """
import json, os, shutil, sys, time
here = os.environ["STUB"]
manner = open(os.path.join(here, "manner")).read()
spec = json.loads(sys.argv[3])
json.dump({**spec, "flags": os.environ.get("XLA_FLAGS")}, open(os.path.join(here, spec["mode"] + ".json"), "w"))
if manner == "broken":
    sys.exit("ImportError: no jax")
print(json.dumps({"versions": {"jax": "0"}, "compared": True}), flush=True)
for line in sys.stdin:
    command, _, file = line.strip().partition(" ")
    if manner == "slow":
        time.sleep(60)
    if manner == "error":
        print(json.dumps({"failed": "ValueError: 3 does not divide 4"}), flush=True)
    elif command == "sums":
        shutil.copy(os.path.join(here, spec["mode"] + ".npz"), file)
        print('{"seconds": 1.0}', flush=True)
    else:
        numbers = {"seconds": 250.0, "cpu_seconds": 1.0, "page_faults": 0, "resident_mib": 9.0}
        print(json.dumps({**numbers, "peak_mib": 7.0}), flush=True)
"""

pytestmark = pytest.mark.usefixtures("threads_stay_as_they_were")


def judged(case, names, cases="benchmarks.engines.cases"):
    """The error of each contestant on a tiny case, without processes."""
    spec = {"cases": cases, "case": case, "quick": True, "device": "cpu"}
    problem = problem_of(spec)
    spec["clip_norm"] = sorted(Truth.of(problem.module, problem, ()).norms)[1]
    truths, found = Truths(problem_of(spec)), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus: hooks on layers whose input needs no gradient; and of a step's key
        for name in names:
            contestant = contestants.contestant({**spec, "contestant": name})
            found[name] = truths.error(name, contestant.sums(contestant.step()), False)
            contestant.clear()
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("locally")
def test_the_command_measures_appends_and_draws(tmp_path):
    """Memory alone keeps the times of the file; sizes are not mixed."""
    out = tmp_path / "engines.json"
    common = ["--out", str(out), "--cases", "w3", "--engines", "vmap"]
    result = CliRunner().invoke(main, [*common, "--quick", "--rounds", "2", "--no-memory"])
    assert result.exit_code == 0, result.output
    before = json.loads(out.read_text())["cases"]["w3"]
    assert before["batch_size"] == 4
    assert 0 < before["trained_parameters"] <= before["parameters"]
    assert CliRunner().invoke(main, [*common, "--quick", "--rounds", "0", "--append"]).exit_code == 0
    written = json.loads(out.read_text())
    plain, private = written["cases"]["w3"]["contestants"].values()
    for found in (plain, private):
        assert found["status"] == found["memory"]["status"] == "ok"
        assert len(found["time"]["ratio_quartiles"]) == 2
        assert min(found[number]["ratio"] for number in ("time", "cpu", "memory")) > 0
        assert found["memory"]["resident_mib"] > found["memory"]["total_mib"] > found["memory"]["peak_mib"]
    assert plain["time"] == before["contestants"]["plain"]["time"]
    assert private["relative_error"] < TOLERANCE
    assert private["memory"]["ratio"] > 1  # it holds all gradients
    refused = CliRunner().invoke(main, ["--out", str(out), "--append", "--cases", ""])
    assert refused.exit_code == 2
    assert "leave out --append" in refused.output
    written["cases"]["w3"]["contestants"]["opacus-ghost"] = {"status": "x: NotImplementedError: Parameter tying"}
    out.write_text(json.dumps(written))
    result = CliRunner().invoke(plots.main, [str(out), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["engines_memory.svg", "engines_time.svg"]


def test_cases_are_the_same_each_time_and_have_a_loss_a_sample():
    for name, case in ALL_CASES.items():
        problem, again = case.problem(quick=True), case.problem(quick=True)
        assert torch.equal(problem.inputs, again.inputs)
        pairs = zip(problem.module.parameters(), again.module.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)
        losses = problem.losses(problem.module(problem.inputs), problem.targets)
        assert losses.shape == (problem.batch_size,)
        assert problem.module.training
        assert bool(problem.jax_model) != bool(problem.no_jax_model)
        assert not list(problem.module.buffers()) or name in ("gpt2", "bert")
        assert case.quick.keys() == case.sizes.keys()


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("w1", [*ENGINES, "vmap/3", "whole-dpfunc", *OPACUS]),
        ("w3", [*ENGINES, "auto/2", *OPACUS]),
        ("layer:attention", OPACUS),
        ("layer:lstm", OPACUS),
    ],
)
def test_engines_and_peers_agree(case, names):
    found = judged(case, names)
    assert all(error < TOLERANCE for error in found.values()), found


@pytest.mark.parametrize("case", small_steps.ALL_CASES)
def test_small_steps_are_right(case):
    assert judged(case, ["auto"], "benchmarks.small_steps")["auto"] < TOLERANCE


def test_a_peer_that_does_not_run_is_an_error():
    with pytest.raises(NotImplementedError, match="Parameter tying"):
        judged("gpt2", ["opacus-ghost"])


@pytest.mark.parametrize(("scale", "forgotten"), [(1.0, "nothing"), (1.001, "nothing"), (0.999, "nothing"), (1, "1.w")])
def test_a_wrong_contestant_is_caught(scale, forgotten, monkeypatch):
    """Sums that are a little off, or a parameter that is forgotten."""

    class Faulty:
        def __call__(self, loss_fn, params, batch):
            self.inner = vmap()(loss_fn, params, batch)
            self.losses_B, self.sq_norms = self.inner.losses_B, self.inner.sq_norms
            return self

        def weighted_sum(self, factors):
            sums = self.inner.weighted_sum(factors)
            return {name: scale * value * (forgotten not in name) for name, value in sums.items()}

    monkeypatch.setattr(dpfunc.engines, "ghost", Faulty, raising=False)
    assert (judged("w3", ["ghost"])["ghost"] <= TOLERANCE) == (scale == 1.0 and forgotten == "nothing")


def test_an_engine_that_does_not_clip_is_caught():
    """The clip norm is set so that some samples are clipped, and some are not."""
    problem = CASES["w3"].problem(quick=True)
    norms = sorted(Truth.of(problem.module, problem, ()).norms)
    truth = Truth.of(problem.module, problem, (norms[1], 2 * norms[-1]))
    clipped, not_clipped = truth.sums.values()
    assert truth.error(not_clipped, norms[1]) > TOLERANCE
    assert truth.error(clipped, norms[1]) == 0


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


def test_names_of_contestants():
    right = "plain auto/4 ghost/auto auto/none opacus-ghost jax-privacy/4 whole-jax/2"
    wrong = "auto/0 plain/4 opacus-ghost/2 vmap/ gost jax-plain/4 jax-privacy/auto"
    assert [known(name) for name in f"{right} {wrong}".split()] == [True] * 7 + [False] * 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "w1,w8"], "no case w8"),
        (["--engines", "gost"], "no contestant gost"),
        (["--against", "docs"], "no checkout of dpfunc"),
        (["--against", "."], "name a file with --out"),
    ],
)
def test_misspelt_options_are_refused(arguments, message):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A function that puts a stub in place of the interpreter, which answers in some manner with sums `scale` x right."""
    script, python = tmp_path / "stub.py", tmp_path / "python"
    script.write_text(STUB)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("STUB", str(tmp_path))
    monkeypatch.setenv(contestants.VARIABLE, str(python))
    processes = measure.Process  # of JAX; contestants of torch run here
    monkeypatch.setattr(measure, "Process", lambda spec: (processes if "python" in spec else Local)(spec))

    def install(manner="right", scale=1.0):
        (tmp_path / "manner").write_text(manner)
        problem = CASES["perceptron"].problem(quick=True)
        clip_norm = sorted(Truth.of(problem.module, problem, ()).norms)[1]
        truth = Truth.of(problem.module, problem, (clip_norm, math.inf))
        for mode, bound in (("plain", math.inf), ("clipped", clip_norm)):
            np.savez(tmp_path / f"{mode}.npz", **{k: scale * v.numpy() for k, v in truth.sums[bound].items()})
        return tmp_path

    return install


def test_steps_of_jax_are_compared_first_and_timed_by_their_own_clock(stub):
    folder = stub()
    settings = Settings(rounds=1, quick=True)
    found = run_case("perceptron", ["jax-plain", "jax-privacy/2"], settings)["contestants"]
    assert [found[name]["status"] for name in ("jax-plain", "jax-privacy/2")] == ["ok", "ok"]
    assert found["jax-privacy/2"]["time"]["median_seconds"] == 250.0
    assert found["jax-privacy/2"]["memory"]["peak_mib"] == 7.0
    assert found["jax-plain"]["versions"] == {"jax": "0"}
    spec = json.loads((folder / "clipped.json").read_text())
    assert (spec["model"], spec["microbatch"], spec["threads"]) == ("perceptron", 2, 1)
    assert spec["flags"] == contestants.ONE_THREAD


@pytest.mark.parametrize(
    ("manner", "scale", "status"),
    [
        ("right", 1.001, "wrong: "),
        ("broken", 1, "x: RuntimeError: the process ended with code 1: ImportError: no jax"),
        ("error", 1, "x: ValueError: 3 does not divide 4"),
        ("slow", 1, "x: TimeoutError: no step within 1 s, compiling included"),
    ],
)
def test_a_process_that_fails_is_a_line_of_the_table(stub, manner, scale, status, monkeypatch):
    monkeypatch.setattr(contestants, "LIMIT_SECONDS", 1.0 if manner == "slow" else 60.0)
    stub(manner, scale)
    settings = Settings(rounds=1, memory=False, quick=True)
    found = run_case("perceptron", ["jax-privacy"], settings)["contestants"]["jax-privacy"]
    assert found["status"].startswith(status)
    assert "time" not in found


def test_cases_that_jax_does_not_take_say_why(stub, monkeypatch, tmp_path):
    def told(case):
        problem = CASES[case].problem(quick=True)
        with pytest.raises(contestants.TakesNoPart) as why:
            contestants.jax_spec("jax-privacy", problem, {"device": "cpu", "threads": 1}, None)
        return str(why.value)

    assert all(told(case).startswith("left out: a ") for case in ("vgg11", "gpt2"))
    monkeypatch.delenv(contestants.VARIABLE, raising=False)
    monkeypatch.setattr(contestants, "INSTALLED", tmp_path / "absent")
    assert told("perceptron").startswith("not installed. Run `make jax`")
