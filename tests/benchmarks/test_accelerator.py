"""Counts of small steps that are scaled to other sizes: against counts at those sizes, and the page."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.pages import filled
from benchmarks.scaling import accelerator
from benchmarks.scaling.accelerator import DOCUMENT, JOBS, RESULT, Sizes, error, released, tables

FOUND = json.loads(RESULT.read_text())


@pytest.mark.parametrize("tuning", ["full", pytest.param("LoRA", marks=pytest.mark.slow)])
def test_predictions_are_what_is_counted(tuning):
    """Exact for the step without privacy; a threshold for long gradients makes the private one differ a little."""
    found = error(tuning)
    assert all(abs(value) < 1e-9 for value in found["plain"])
    assert all(abs(value) < 0.05 for value in found["private"])


def test_numbers_are_scaled_by_their_factors():
    small = Sizes(7, 241, 11, 251, 19, 17, 1)
    large = Sizes(2, 3, 4, 6, 8, 10, 1)
    assert accelerator._scaled(7 * 241 * 11 * 64, small, large) == 2 * 3 * 4 * 64
    assert accelerator._scaled(12 * 241 * 241, small, large) == 12 * 9
    assert accelerator._scaled(0, small, large) == 0


@pytest.mark.parametrize("name", JOBS)
def test_parameters_of_the_jobs(name):
    """Those of the decoder that would be built."""
    tiny = Sizes(
        **{**vars(JOBS[name]), "samples": 1, "positions": 2, "heads": 1, "hidden": 24, "vocabulary": 9, "layers": 2}
    )
    module = tiny.problem().module
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == tiny.trained


def test_the_release_moves_each_number():
    one, two = released(JOBS["1B full"]), released(JOBS["7B full"])
    assert two.bytes / one.bytes == pytest.approx(JOBS["7B full"].trained / JOBS["1B full"].trained)
    assert one.bytes > 4 * 2 * JOBS["1B full"].trained


def test_the_page_has_the_tables_of_the_committed_results():
    """After a new run nothing is to be done: the command writes both."""
    assert filled(DOCUMENT.read_text(), tables(FOUND)) == DOCUMENT.read_text()
    assert all(
        abs(value) < 0.05 for phases in FOUND["errors"].values() for values in phases.values() for value in values
    )
