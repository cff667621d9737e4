"""Steps on a GPU by precision and batch size: the same code on a CPU, with tiny models."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from local_process import settings_stay_as_they_were  # noqa: F401  (a fixture)

from benchmarks import gpu_steps
from benchmarks.engines.cases import ALL_CASES, GPU_CASES
from benchmarks.gpu_steps import BATCHES, PRECISIONS, WHO, row
from benchmarks.results import read

pytestmark = pytest.mark.usefixtures("settings_stay_as_they_were")


def test_what_is_measured():
    """Sizes from 8 to 256, three precisions, sums and whole steps, of all cases for a GPU."""
    assert (min(BATCHES), max(BATCHES)) == (8, 256)
    assert set(PRECISIONS) == {"float32", "tf32", "bfloat16"}
    assert {"plain", "auto", "opacus-hooks", "opacus-ghost", "whole-dpfunc", "whole-dpfunc-device"} <= set(WHO)
    assert set(gpu_steps.CASES) == {"mnist", *GPU_CASES} <= set(ALL_CASES)


def test_the_command_on_a_cpu(tmp_path, monkeypatch):
    """The default engine under autocast, compared with float32; what begins too late is left out."""
    monkeypatch.setattr(gpu_steps, "WHO", {"plain": "plain", "auto": "dpfunc"})
    monkeypatch.setattr(gpu_steps, "ROUNDS", 2)
    out = tmp_path / "steps.json"
    options = ["--device", "cpu", "--quick", "--cases", "mnist", "--precisions", "bfloat16", "--batches", "8"]
    run = CliRunner().invoke(gpu_steps.main, [*options, "--out", str(out)])
    assert run.exit_code == 0, run.output
    (found,) = read(out)["rows"]
    plain, ours = found["contestants"].values()
    assert ours["status"] == plain["status"] == "ok"
    assert 1e-5 < ours["relative_error"] < PRECISIONS["bfloat16"].tolerance  # it is bfloat16
    assert all(plain[number] > 0 for number in ("seconds", "peak_mib"))
    assert ours["operations"] > plain["operations"] > 0
    late = CliRunner().invoke(gpu_steps.main, [*options, "--seconds", "-1", "--out", str(out)])
    assert late.exit_code == 0
    assert read(out)["left_out"] == ["mnist, bfloat16, 8 rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "precision"), [*((case, "bfloat16") for case in gpu_steps.CASES), ("mnist", "tf32")])
def test_each_contestant_in_each_precision(case, precision, monkeypatch):
    """No sum is wrong; dpfunc takes part everywhere."""
    monkeypatch.setattr(gpu_steps, "ROUNDS", 2)
    found = row(case, precision, 8, "cpu", quick=True)["contestants"]
    assert not [who for who, one in found.items() if one["status"].startswith("wrong")]
    assert all(one["status"] == "ok" for who, one in found.items() if not who.startswith("opacus"))


def test_products_are_as_before_afterwards():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with gpu_steps.products(tf32=True):
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


OK = {"status": "ok", "seconds": 0.0125, "peak_mib": 1234.0, "operations": 1000}


def test_the_table_has_ratios_and_their_limits():
    """Of a clipped sum to the plain step, and of a whole step with noise of the device to a clipped sum."""
    found = {"plain": OK, "auto": {**OK, "seconds": 0.02}, "whole-dpfunc-device": {**OK, "seconds": 0.03}}
    found |= {"opacus-hooks": {"status": "x: RuntimeError: no memory. Much is said"}}
    (line,) = gpu_steps.lines(
        [{"case": "mnist", "title": "a net", "precision": "tf32", "rows": 64, "contestants": found}]
    )
    assert len(line) == len(gpu_steps.HEADS)
    assert line[:6] == [
        "a net",
        "tf32",
        "64",
        "12.5 (1,234; 1,000)",
        "20.0 (1,234; 1,000)",
        "x: RuntimeError: no memory",
    ]
    assert line[-2:] == ["1.60 (at most 2)", "1.50 (at most 1.1)"]


def test_no_others_where_the_plain_step_is_too_long(monkeypatch):
    monkeypatch.setattr(gpu_steps, "measured", lambda who, *_: {"status": "x: a step takes 9.0 s"})
    assert list(row("mnist", "float32", 64, "cpu", quick=True)["contestants"]) == ["plain"]


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(gpu_steps.torch.cuda, "is_available", lambda: False)
    assert "no GPU is there" in CliRunner().invoke(gpu_steps.main, []).output
