"""The benchmark of the engines: it runs, refuses to time what is wrong, and names who takes part; JAX is a stub."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from local_process import Local, locally, settings_stay_as_they_were  # noqa: F401  (fixtures)

import dpfunc
from benchmarks import small_steps
from benchmarks.engines import contestants
from benchmarks.engines.__main__ import main
from benchmarks.engines.cases import ALL_CASES, CASES
from benchmarks.engines.contestants import ENGINES, OPACUS, problem_of
from benchmarks.engines.problem import Truth
from benchmarks.engines.runner import Truths
from benchmarks.measure import TOLERANCE, TakesNoPart
from dpfunc.engines import vmap

pytestmark = pytest.mark.usefixtures("settings_stay_as_they_were")


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
def test_the_command_measures_and_appends(tmp_path):
    out = tmp_path / "engines.json"
    common = ["--out", str(out), "--engines", "vmap", "--quick", "--rounds", "2", "--append"]
    for case in ("w3", "perceptron"):
        result = CliRunner().invoke(main, [*common, "--cases", case])
        assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    case = written["cases"]["w3"]
    assert (list(written["cases"]), case["batch_size"]) == (["w3", "perceptron"], 4)
    assert 0 < case["trained_parameters"] <= case["parameters"]
    plain, private = written["cases"]["w3"]["contestants"].values()
    for found in (plain, private):
        assert found["status"] == found["memory"]["status"] == "ok"
        assert len(found["time"]["ratio_quartiles"]) == 2
        assert min(found[number]["ratio"] for number in ("time", "cpu", "memory")) > 0
        assert found["memory"]["resident_mib"] > found["memory"]["total_mib"] > found["memory"]["peak_mib"]
    assert private["relative_error"] < TOLERANCE
    assert private["memory"]["ratio"] > 1  # it holds all gradients
    refused = CliRunner().invoke(main, ["--out", str(out), "--append", "--cases", ""])
    assert refused.exit_code == 2
    assert "leave out --append" in refused.output


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


def test_a_peer_that_is_not_installed_says_how(monkeypatch, tmp_path):
    monkeypatch.setattr(contestants, "OPAKE_FOLDER", tmp_path / "missing")
    with pytest.raises(TakesNoPart, match="make opake"):
        judged("w3", ["opake"])


def test_every_program_is_in_the_table_of_programs():
    folder = Path(contestants.__file__).parents[1]
    files = [path for path in folder.glob("*.py") if "__main__" in path.read_text()]
    programs = {path.stem for path in files} | {path.parent.name for path in folder.glob("*/__main__.py")}
    text = (folder / "README.md").read_text()
    assert len(programs) > 20
    assert [name for name in sorted(programs) if f"`{name}`" not in text] == []
    assert all((folder / "results" / name).exists() for name in re.findall(r"`(\w+\.json)`", text))


def test_a_peer_that_does_not_run_is_an_error():
    with pytest.raises(NotImplementedError, match="Parameter tying"):
        judged("gpt2", ["opacus-ghost"])


@pytest.mark.parametrize(
    ("scale", "forgotten"),
    [(1.0, "nothing"), (1.001, "nothing"), (0.999, "nothing"), (math.nan, "nothing"), (1, "1.w")],
)
def test_a_wrong_contestant_is_caught(scale, forgotten, monkeypatch):
    """Sums that are a little off or no numbers, or a parameter that is forgotten."""

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


def test_misspelt_options_are_refused():
    refused = {"--cases w1,w8": "no case w8", "--engines gost": "no contestant gost"}
    refused |= {"--against docs": "no checkout of dpfunc", "--against .": "name a file with --out"}
    for arguments, message in refused.items():
        result = CliRunner().invoke(main, arguments.split())
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())


def test_what_a_process_of_jax_is_told(monkeypatch, tmp_path):
    """The same weights and batch, one thread, and the interpreter that is named; its sums have bounds of their own."""
    monkeypatch.setattr(contestants, "INSTALLED", tmp_path / "absent")
    with pytest.raises(contestants.TakesNoPart, match="not installed. Run `make jax`"):
        contestants.jax_spec("jax-privacy", None, {}, tmp_path)
    monkeypatch.setenv(contestants.VARIABLE, "/a/python")
    problem, spec = CASES["perceptron"].problem(quick=True), {"device": "cpu", "threads": 1, "clip_norm": 1.0}
    told = contestants.jax_spec("jax-privacy/2", problem, spec, tmp_path)
    assert [told[key] for key in ("python", "model", "mode", "microbatch")] == ["/a/python", "perceptron", "clipped", 2]
    assert told["variables"]["XLA_FLAGS"] == contestants.ONE_THREAD
    with np.load(told["arrays"]) as arrays:
        assert np.array_equal(arrays["inputs"], problem.inputs.numpy())
        assert {"trained/0.weight", "trained/4.bias"} <= set(arrays.files)
    truth = Truth.of(problem.module, problem, (problem.clip_norm, math.inf))
    error = lambda name, bound: Truths(problem).error(name, truth.sums[bound], False)
    assert error("jax-plain", math.inf) == error("jax-privacy/2", problem.clip_norm) == 0
    assert error("jax-privacy/2", math.inf) > TOLERANCE
