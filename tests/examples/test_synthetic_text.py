"""Synthetic text: the short mode runs, and a classifier trained on what the model wrote works on real texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "synthetic_text"


@pytest.fixture(scope="module")
def example():
    """The modules of the example; other examples have modules of the same names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        for name in ("run", "classify", "made"):
            sys.modules.pop(name, None)
        import classify
        import run

        yield run, classify
        for name in ("run", "classify", "made"):
            sys.modules.pop(name, None)


@pytest.mark.slow
def test_synthetic_text_trains_a_classifier(example, tmp_path):
    run, _ = example
    out = tmp_path / "out"
    result = CliRunner().invoke(run.main, ["--short", "--out", str(out)])
    assert result.exit_code == 0, result.output
    values = json.loads((out / "result.json").read_text())
    assert values["epsilon"] <= 8.0
    assert values["num_synthetic"] == 240
    assert values["majority"] < 0.45
    assert values["on_real"] > 0.9
    assert values["on_synthetic"] > 0.8
    texts = [json.loads(line) for line in (out / "synthetic.jsonl").read_text().splitlines()]
    assert {text["epsilon"] for text in texts} == {values["epsilon"]}
    assert "240 synthetic texts" in result.output
    again = CliRunner().invoke(run.main, ["--short", "--out", str(out)])
    assert again.exit_code == 1
    assert "Expected an empty output_dir" in again.output


def test_the_classifier_learns_and_can_fail(example):
    _, classify = example
    texts, labels = ["good fine", "fine", "bad", "bad poor"] * 5, ["yes", "yes", "no", "no"] * 5
    model = classify.fit(texts, labels, ("no", "yes"))
    assert classify.accuracy(model, ["good", "poor"], ["yes", "no"]) == 1.0
    assert classify.accuracy(model, ["good", "poor"], ["no", "yes"]) == 0.0


def test_what_is_missing_is_said(example):
    run, _ = example
    result = CliRunner().invoke(run.main, ["--labels", "a,b"])
    assert result.exit_code == 2
    assert "--train, --test, --model and --labels, or --short" in result.output
