"""Growth of the work: sizes are what they say, exponents are slopes, the command writes its files."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import growth
from benchmarks.growth import AXES, Axis, exponent
from benchmarks.pages import filled


def test_sizes_of_the_points():
    lengths = AXES["T"].problem(512, "LoRA")
    assert lengths.inputs.shape == (2, 512)
    assert AXES["B"].problem(16, "all parameters").batch_size == 16
    for rank in (1, 4):
        shapes = {tuple(p.shape) for p in AXES["r"].problem(rank, "LoRA").module.parameters() if p.requires_grad}
        assert all(rank in shape for shape in shapes)
    for size in list(AXES["P"].sizes)[:3]:
        blocks = AXES["P"].problem(size, "all parameters").module[1:-2]
        assert sum(p.numel() for p in blocks.parameters()) == pytest.approx(size, rel=0.03)


def test_ranges():
    """T = 128..4096, B = 1..1024, 1M..300M parameters, rank 1..64."""
    ends = {name: (min(axis.sizes), max(axis.sizes)) for name, axis in AXES.items()}
    assert ends["T"] == (128, 4096)
    assert ends["B"] == (1, 1024)
    assert ends["r"] == (1, 64)
    assert ends["P"][0] <= 1e6
    assert ends["P"][1] >= 3e8


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_exponents_are_those_of_the_large_end(power):
    sizes = [1, 2, 4, 8, 16]
    assert exponent(sizes, [7.0, 7.0, *(3 * size**power for size in sizes[2:])]) == pytest.approx(power)


@pytest.fixture
def tiny(monkeypatch):
    axis = Axis("positions", {size: {"length": size} for size in (4, 8)}, {"samples": 2, "layers": 1, "width": 16})
    monkeypatch.setattr(growth, "AXES", {"T": axis})


@pytest.mark.slow
def test_the_command_writes_its_files(tiny, tmp_path):
    out, page, plot = tmp_path / "growth.json", tmp_path / "page.md", tmp_path / "growth.png"
    page.write_text("<!-- growth -->\n<!-- end -->\n")
    arguments = ["--axes", "T", "--rounds", "1", "--threads", "1", "--out", out, "--page", page, "--plot", plot]
    result = CliRunner().invoke(growth.main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["axes"]["T"]
    assert set(found) == {"LoRA", "all parameters"}
    assert all(record[who]["peak_mib"] > 0 for record in found["LoRA"].values() for who in growth.CONTESTANTS)
    assert page.read_text().count("| positions |") == 2
    assert plot.stat().st_size > 1000


def test_the_page_has_the_table_of_the_committed_results():
    """After a new run nothing is to be done: the command writes both."""
    found = json.loads(growth.RESULT.read_text())["axes"]
    assert filled(growth.PAGE.read_text(), {"growth": growth.table(found)}) == growth.PAGE.read_text()
