"""Files of earlier runs become a ledger; what cannot be read is never free."""

from __future__ import annotations

import json

import pytest
import search_cases
from journal_cases import line, written
from record_cases import LEDGER, RECORD, record
from run_cases import PLAN, Run

from dpfunc import Event, Ledger
from dpfunc._utils.validation import signed
from dpfunc.checkpoint._prior_ledgers import read_cost, read_spent
from dpfunc.errors import InvalidArgument, LedgerConflict


def test_a_killed_run_without_checkpoints_is_counted(tmp_path):
    assert read_spent([Run(tmp_path).step().path]) == PLAN.ledger(1)


def test_all_kinds_of_files_together(tmp_path):
    ledger = PLAN.ledger(3)
    (tmp_path / "b.json").write_text(ledger.to_json())
    (tmp_path / "c.json").write_text(
        record(ledger=ledger, epsilon=ledger.epsilon(1e-5).epsilon, accountant="tilted").to_json()
    )
    names = [written(tmp_path / "a.jsonl", line(0)), tmp_path / "b.json", str(tmp_path / "c.json")]
    assert read_spent(names).num_steps == 7
    assert read_spent(()) is read_spent(None) is None


def test_other_neighbours_do_not_add_up(tmp_path):
    names = [written(tmp_path / f"{kind}.jsonl", line(0, adjacency=kind)) for kind in ("add_remove", "zero_out")]
    with pytest.raises(LedgerConflict):
        read_spent(names)


WRITTEN = {
    "ledger.json": lambda path: path.write_text(Ledger((Event(0.01, 1.0, 1000),)).to_json()),
    "privacy_accounting.json": lambda path: path.write_text(RECORD.to_json()),
    "journal.jsonl": lambda path: written(path, line(0)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_no_flipped_bit_changes_what_is_spent(tmp_path, name):
    """It is refused, or read as the same; of each byte three bits of a ledger, of longer files one of each third byte."""
    path, refused, every = tmp_path / name, 0, 1 if name == "ledger.json" else 3
    WRITTEN[name](path)
    text, spent = path.read_bytes(), read_spent([path])
    for place, byte in list(enumerate(text))[::every]:
        for bit in (0, 1, 4) if name == "ledger.json" else (place % 5,):
            path.write_bytes(text[:place] + bytes([byte ^ 1 << bit]) + text[place + 1 :])
            try:
                assert read_spent([path]) == spent, (place, bit)
            except InvalidArgument:
                refused += 1
    assert refused > 0.8 * len(text) / every


@pytest.mark.parametrize("steps", [1, 9, 11, 100])
def test_a_record_costs_what_it_states(tmp_path, steps):
    """An edited ledger in it that has a digest of its own, and another one of the record."""
    path = tmp_path / "privacy_accounting.json"
    path.write_text(record(ledger=Ledger((Event(1.0, 5.0, steps),))).to_json())
    with pytest.raises(
        InvalidArgument, match=r"Expected a record whose epsilon is that of its ledger, .*got epsilon=2.59"
    ):
        read_spent([path])
    path.write_text(record(epsilon=RECORD.epsilon * (1 + 5e-5)).to_json())
    assert read_spent([path]) == LEDGER  # as another version of a library may round


@pytest.mark.parametrize("name", ["ledger", "record"])
def test_a_file_without_a_digest_is_refused_with_what_to_do(tmp_path, name):
    """As earlier versions wrote it; or by hand."""
    values = json.loads((LEDGER if name == "ledger" else RECORD).to_json())
    path = tmp_path / "x.json"
    path.write_text(json.dumps({key: value for key, value in values.items() if key != "digest"}))
    with pytest.raises(InvalidArgument, match="The file was changed or damaged after it was written, or by hand"):
        read_spent([path])
    path.write_text(json.dumps(signed({**values, "schema": f"{values['schema'][:-1]}1"})))
    with pytest.raises(
        InvalidArgument,
        match=r"Expected (a ledger|the record of a run .*) with schema '.*/[23]', .*/1'.*name its journal",
    ):
        read_spent([path])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", None, "which is no file"),
        ("x.jsonl", "", "which is empty"),
        ("x.jsonl", "{}\n", "cannot be read"),
        ("x.json", "{", "cannot be read"),
        ("x.json", "[]", "cannot be read"),
        ("x.json", "{}", "cannot be read"),
        ("x.json", '{"ledger": {}, "ledger": {}}', "the name 'ledger' occurs twice"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgument, match=message):
        read_spent([tmp_path / name])


def test_what_holds_a_ledger_and_is_none_is_refused(tmp_path):
    """The state of a checkpoint, which lacks the steps after it, and records before they had a schema."""
    path, inside = tmp_path / "x.json", json.loads(LEDGER.to_json())
    old = {"epsilon": 1.0, "delta": 1e-5, "global_step": 3, "ledger": inside}
    path.write_text(json.dumps(old))
    with pytest.raises(
        InvalidArgument, match=r"none of them.* or name its journal: before version 2 files had no digest"
    ):
        read_spent([path])
    for other in (
        signed({"schema": 1, "ledger": inside}),
        signed({"schema": RECORD.schema, "ledger": inside}),
        [3],
    ):
        path.write_text(json.dumps(other))
        with pytest.raises(InvalidArgument):
            read_spent([path])
    path.write_text(search_cases.RECORD.to_json())
    with pytest.raises(InvalidArgument, match="the record of a search"):  # whose cost is no sum over events
        read_spent([path])
    assert read_cost(path) == search_cases.RECORD
