"""The record of a run: read back exactly, and refused where it was changed."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from record_cases import RECORD, record

from dpfunc._utils.validation import signed
from dpfunc.accounting import Ledger
from dpfunc.accounting.record import NEIGHBOURS, NOT_COVERED, Record, is_record, read_ledger
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.types import ADJACENCIES, Event


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epsilon": math.inf, "epsilon_rdp": math.inf, "ledger": Ledger((Event(1.0, 0.0, 10),))},
        {"target_epsilon": None},
    ],
)
def test_a_record_reads_back_exactly(changes):
    written = record(**changes)
    text = written.to_json()
    assert Record.from_json(text) == written
    assert read_ledger(text) == written.ledger
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_published_facts_are_in_sentences():
    values = json.loads(RECORD.to_json())
    assert values["schema"] == "dpfunc.accounting/2"
    assert values["neighbours"] == NEIGHBOURS["add_remove"]
    assert set(NEIGHBOURS) == set(ADJACENCIES)
    assert list(NOT_COVERED) == values["not_covered"]


DAMAGED = {
    "no JSON": lambda v: "{",
    "a list": lambda v: "[]",
    "another schema": lambda v: {**v, "schema": "dpfunc.accounting/9"},
    "no schema": lambda v: {k: x for k, x in v.items() if k != "schema"},
    "a field less": lambda v: {k: x for k, x in v.items() if k != "unit"},
    "a field more": lambda v: {**v, "comment": "fine"},
    "negative epsilon": lambda v: {**v, "epsilon": -1.0},
    "epsilon in words": lambda v: {**v, "epsilon": "3"},
    "delta 0": lambda v: {**v, "delta": 0},
    "steps in parts": lambda v: {**v, "global_step": 1.5},
    "q above 1": lambda v: {**v, "sampling_prob": 1.5},
    "other neighbours": lambda v: {**v, "adjacency": "replace_one"},
    "other words for them": lambda v: {**v, "neighbours": NEIGHBOURS["zero_out"]},
    "unknown key": lambda v: {**v, "noise_key": "fine"},
    "control characters": lambda v: {**v, "unit": "one row\x1b[2K"},
    "lines": lambda v: {**v, "not_covered": ["a\nb"]},
    "not a list": lambda v: {**v, "not_covered": "nothing"},
    "a list of numbers": lambda v: {**v, "not_covered": [1]},
    "no versions": lambda v: {**v, "versions": {}},
    "a ledger that lost its events": lambda v: {
        **v,
        "ledger": signed({"schema": "dpfunc.ledger/2", "adjacency": "add_remove"}),
    },
    "no ledger": lambda v: {**v, "ledger": None},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_records_are_refused(name):
    changed = DAMAGED[name](json.loads(RECORD.to_json()))
    with pytest.raises(DPFuncError):
        Record.from_json(changed if isinstance(changed, str) else json.dumps(signed(changed)))


def test_a_name_that_occurs_twice_is_refused():
    text = RECORD.to_json().replace('"epsilon":', '"epsilon": 0.1, "epsilon":', 1)
    with pytest.raises(InvalidArgument, match="'epsilon' occurs twice"):
        Record.from_json(text)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Record)])
def test_each_field_is_checked(name):
    with pytest.raises(InvalidArgument, match=r"Expected|adjacency"):
        record(**{name: object()})


def test_a_ledger_that_is_read_from_other_files():
    """Not of the state of a checkpoint, which lacks the steps after it, nor of records before they had a schema."""
    ledger = json.loads(RECORD.ledger.to_json())
    old = {"epsilon": 1.0, "delta": 1e-5, "global_step": 3, "ledger": ledger}
    with pytest.raises(InvalidArgument, match="or name its journal: before version 2 files had no digest"):
        read_ledger(json.dumps(old))
    assert is_record({"schema": "dpfunc.accounting/1"})
    assert not is_record(old)
    for other in ({"schema": 1, "ledger": ledger}, {"schema": "dpfunc.accounting/2", "ledger": ledger}, 3):
        with pytest.raises(InvalidArgument):
            read_ledger(json.dumps(signed(other) if isinstance(other, dict) else [other]))
    assert not is_record(json.loads(Ledger().to_json()))
