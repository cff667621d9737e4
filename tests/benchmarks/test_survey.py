"""The survey of models: its cases have names of their own, and a row says what the engine did."""

from __future__ import annotations

import pytest

from benchmarks.survey.__main__ import page, run
from benchmarks.survey.measure import cases, measure

MLP = "other/MLP/full/eval/none"


@pytest.fixture(scope="module")
def known():
    return cases()


def test_there_are_cases_of_every_field(known):
    fields = "decoder encoder encoder-decoder vision multimodal audio series PEFT other"
    assert {case.field for case in known.values()} == set(fields.split())
    assert len(known) == 1112


def test_rows_of_the_table(known):
    """A model, a refusal, and what cannot be built, which is no row."""

    def broken():
        raise KeyError("no such configuration")

    row, refused = (measure(known[name]) for name in (MLP, "other/spectral norm/full/train/none"))
    assert row["engine"] == "one pass"
    assert row["parity"] < 1e-4
    assert row["ratio"] > 0
    assert refused["engine"] == "refused"
    assert "samples would influence each other" in refused["reason"]
    assert "spectral norm" in page([refused], dict.fromkeys(("torch", "transformers", "peft"), "2"))
    row = measure(type(known[MLP])("other", "MLP", broken))
    assert "left_out" in row
    assert "engine" not in row


@pytest.mark.slow
def test_a_process_measures_several_cases(known):
    rows = list(run([case for name, case in known.items() if name.startswith("other/MLP/")], 1, 60))
    assert len(rows) == 2
    assert all(row["engine"] == "one pass" for row in rows)
