"""The survey of models: its cases have names of their own, and a row says what the engine did."""

from __future__ import annotations

from benchmarks.survey import table, tables
from benchmarks.survey.measure import measure


def test_a_row_of_the_table():
    row = measure(tables.cases()["other/MLP/full/eval/none"])
    assert row["engine"] == "one pass"
    assert row["parity"] < 1e-4
    assert row["ratio"] > 0


def test_a_refusal_is_a_row():
    row = measure(tables.cases()["other/spectral norm/full/train/none"])
    assert row["engine"] == "refused"
    assert "samples would influence each other" in row["reason"]
    assert "spectral norm" in table.page([row], {"torch": "2"})


def test_what_cannot_be_built_is_no_row():
    case = tables.cases()["other/MLP/full/eval/none"]

    def broken():
        raise KeyError("no such configuration")

    row = measure(type(case)(case.field, case.family, broken))
    assert "left_out" in row
    assert "engine" not in row


def test_there_are_cases_of_every_field():
    fields = {case.field for case in tables.cases().values()}
    assert fields >= {
        "decoder",
        "encoder",
        "encoder-decoder",
        "vision",
        "multimodal",
        "audio",
        "series",
        "PEFT",
        "other",
    }
    assert len(tables.cases()) > 1000
