"""The record of a search: read back exactly, refused where it was changed, shown, and checked."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from click.testing import CliRunner
from search_cases import RECORD, search_record

from dpfunc._utils.validation import signed
from dpfunc.accounting import Ledger, RunCount
from dpfunc.accounting.record import GUESSABLE, SelectionRecord, is_record, read_ledger, search_cost
from dpfunc.cli.main import main
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.types import Event


@pytest.mark.parametrize("changes", [{}, {"chosen": None, "chosen_score": None}, {"runs": RunCount(3.0, math.inf)}])
def test_a_record_reads_back_exactly(changes):
    written = search_record(**changes)
    text = written.to_json()
    assert SelectionRecord.from_json(text) == written
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


DAMAGED = {
    "no JSON": lambda v: "{",
    "a list": lambda v: "[]",
    "another schema": lambda v: {**v, "schema": "dpfunc.selection/9"},
    "a field less": lambda v: {k: x for k, x in v.items() if k != "score_noise"},
    "a field more": lambda v: {**v, "comment": "fine"},
    "negative epsilon": lambda v: {**v, "epsilon": -1.0},
    "no mean": lambda v: {**v, "runs": {"shape": 1.0}},
    "half a run": lambda v: {**v, "runs": {"mean": 0.5, "shape": 1.0}},
    "a candidate more than ledgers": lambda v: {**v, "candidates": [*v["candidates"], {"steps": 1}]},
    "no candidates": lambda v: {**v, "candidates": [], "ledgers": [], "chosen": None, "chosen_score": None},
    "candidates in words": lambda v: {**v, "candidates": [{"steps": "one"}] * 2},
    "another chosen one": lambda v: {**v, "chosen": 2},
    "a score of nothing": lambda v: {**v, "chosen": None},
    "no score noise": lambda v: {**v, "score_noise": 0.0},
    "a ledger that is none": lambda v: {**v, "ledgers": [None, None]},
    "ledgers that are none": lambda v: {**v, "ledgers": 3},
    "other words for neighbours": lambda v: {**v, "neighbours": "none"},
    "control characters": lambda v: {**v, "unit": "one row\x1b[2K"},
    "replaced records": lambda v: {**v, "spent": signed({**v["spent"], "adjacency": "replace_one"})},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_records_are_refused(name):
    changed = DAMAGED[name](json.loads(RECORD.to_json()))
    with pytest.raises(DPFuncError):
        SelectionRecord.from_json(changed if isinstance(changed, str) else json.dumps(signed(changed)))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SelectionRecord)])
def test_each_field_is_checked(name):
    with pytest.raises((InvalidArgument, DPFuncError)):
        search_record(**{name: object()})


def test_the_score_is_counted_and_replaced_records_are_refused():
    exact = search_cost(RECORD.runs, RECORD.ledgers, 1.0, 1e-5, Ledger()).epsilon
    assert exact > 2 * RECORD.epsilon
    with pytest.raises(InvalidArgument, match="may go from those that are trained on"):
        search_cost(RECORD.runs, [Ledger((Event(1.0, 9.0, 1),), "replace_one")], 6.0, 1e-5, Ledger((), "replace_one"))


def test_a_search_is_not_counted_as_steps():
    """Nor taken for a run: its cost is no sum over events, and an empty ledger would be free."""
    assert not is_record(json.loads(RECORD.to_json()))
    with pytest.raises(InvalidArgument, match="the record of a search"):
        read_ledger(RECORD.to_json())


def ledger(*arguments):
    return CliRunner().invoke(main, ["ledger", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "privacy_accounting.json").write_text(RECORD.to_json())
    return tmp_path


def test_show(folder):
    result = ledger("show", folder)
    assert result.exit_code == 0, result.output
    for text in ("8 on average", "learning_rate=0.3", "88.5", "one patient", "how many there"):
        assert text in result.stdout, text
    assert json.loads(ledger("show", folder, "--json").stdout)["chosen"] == 1
    assert json.loads(ledger("show", folder, "--delta", 1e-3, "--json").stdout)["epsilon"] < RECORD.epsilon
    assert "rdp" in ledger("show", folder / "privacy_accounting.json", "--delta", 1e-3).stdout
    assert ledger("show", folder, "--method", "prv").exit_code == 2


WRONG = {
    "epsilon": {"epsilon": RECORD.epsilon * 0.99},
    "delta": {"delta": 0.02},
    "key": {"noise_key": GUESSABLE},
    "budget": {"target_epsilon": 0.5},
    "sampling": {"dataset_size": 99, "ledgers": (Ledger((Event(0.5, 20.0, 10),)),) * 2},
}


def test_check(folder):
    result = ledger("check", folder)
    assert (result.exit_code, "All agrees" in result.stdout) == (0, True), result.output
    assert ledger("check", folder, "--epsilon", RECORD.epsilon / 2).exit_code == 1


@pytest.mark.parametrize("name", WRONG)
def test_check_finds(name, folder):
    (folder / "privacy_accounting.json").write_text(search_record(**WRONG[name]).to_json())
    result = ledger("check", folder, "--json")
    checks = {each["check"]: each["agrees"] for each in json.loads(result.stdout)["checks"]}
    assert (result.exit_code, checks[name]) == (1, False)
