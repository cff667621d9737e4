"""The survey of models: its cases have names of their own, and a row says what the engine did."""

from __future__ import annotations

import pytest

from benchmarks.survey.__main__ import page, run
from benchmarks.survey.cases import cases
from benchmarks.survey.measure import measure


def test_a_row_of_the_table():
    row = measure(cases()["other/MLP/full/eval/none"])
    assert row["engine"] == "one pass"
    assert row["parity"] < 1e-4
    assert row["ratio"] > 0


def test_a_refusal_is_a_row():
    row = measure(cases()["other/spectral norm/full/train/none"])
    assert row["engine"] == "refused"
    assert "samples would influence each other" in row["reason"]
    assert "spectral norm" in page([row], dict.fromkeys(("torch", "transformers", "peft"), "2"))


def test_what_cannot_be_built_is_no_row():
    case = cases()["other/MLP/full/eval/none"]

    def broken():
        raise KeyError("no such configuration")

    row = measure(type(case)(case.field, case.family, broken))
    assert "left_out" in row
    assert "engine" not in row


def test_there_are_cases_of_every_field():
    fields = "decoder encoder encoder-decoder vision multimodal audio series PEFT other"
    assert {case.field for case in cases().values()} == set(fields.split())
    assert len(cases()) > 1000


@pytest.mark.slow
def test_a_process_measures_several_cases():
    rows = []
    run([case for name, case in cases().items() if name.startswith("other/MLP/")], 1, 60, rows.append)
    assert len(rows) == 2
    assert all(row["engine"] == "one pass" for row in rows)
