"""The records of runs and of searches: read back exactly, refused where they were changed, shown, and checked."""

import dataclasses
import json
import math

import pytest
import search_cases
from click.testing import CliRunner
from record_cases import RECORD, record
from search_cases import search_record

from dpfunc._utils.validation import signed
from dpfunc.accounting import Ledger, RunCount
from dpfunc.accounting.record import EXACT_SIZE, GUESSABLE, NEIGHBOURS, NOT_COVERED, search_cost
from dpfunc.cli.main import main
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.types import ADJACENCIES, Event

SEARCH = search_cases.RECORD
WITHOUT_NOISE = {"epsilon": math.inf, "epsilon_rdp": math.inf, "ledger": Ledger((Event(1.0, 0.0, 10),))}
WRITTEN = {
    "run": RECORD,
    "run without noise": record(**WITHOUT_NOISE),
    "run without a budget": record(target_epsilon=None),
    "search": SEARCH,
    "search without a result": search_record(**search_cases.NOTHING),
    "search of Poisson": search_record(runs=RunCount(3.0, math.inf)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_record_reads_back_exactly(name):
    written = WRITTEN[name]
    text = written.to_json()
    assert type(written).from_json(text) == written
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert json.loads(text)["neighbours"] == NEIGHBOURS["add_remove"]
    assert NEIGHBOURS.keys() == set(ADJACENCIES)


def test_a_search_that_was_recorded_before_its_key_had_a_name_is_read():
    older = {**json.loads(SEARCH.to_json()), "schema": "dpfunc.selection/3"}
    with pytest.raises(InvalidArgument, match="a record without run"):
        type(SEARCH).from_json(json.dumps(signed(older)))
    del older["run"]
    assert type(SEARCH).from_json(json.dumps(signed(older))) == search_record(run="")


def without(name):
    return lambda v: {k: x for k, x in v.items() if k != name}


def changed(**values):
    return lambda v: {**v, **values}


COMMON = {
    "no JSON": lambda v: "{",
    "a list": lambda v: "[]",
    "another schema": lambda v: {**v, "schema": f"{v['schema'][:-1]}9"},
    "no schema": without("schema"),
    "a field less": without("unit"),
    "a field more": changed(comment="fine"),
    "negative epsilon": changed(epsilon=-1.0),
    "other words for neighbours": changed(neighbours=NEIGHBOURS["zero_out"]),
    "unknown key": changed(noise_key="fine"),
    "control characters": changed(unit="one row\x1b[2K"),
    "delta 0": changed(delta=0),
    "lines": changed(not_covered=["a\nb"]),
    "no versions": changed(versions={}),
}
OF_A_RUN = {
    "steps in parts": changed(global_step=1.5),
    "q above 1": changed(sampling_prob=1.5),
    "other neighbours": changed(adjacency="replace_one"),
    "a ledger that lost its events": changed(ledger=signed({"schema": "dpfunc.ledger/2", "adjacency": "add_remove"})),
}
OF_A_SEARCH = {
    "no epsilon": changed(epsilon=None),
    "no budget": changed(target_epsilon=None),
    "no mean": changed(runs={"shape": 1.0}),
    "half a run": changed(runs={"mean": 0.5, "shape": 1.0}),
    "a candidate more than ledgers": lambda v: {**v, "candidates": [*v["candidates"], {"steps": 1}]},
    "no candidates": changed(candidates=[], ledgers=[], **{**search_cases.NOTHING, "weights": []}),
    "another chosen one": changed(chosen=2),
    "a score of nothing": changed(chosen=None),
    "no settings": changed(settings=None),
    "no weights": changed(weights=[]),
    "settings without one": lambda v: {**v, "settings": {**v["settings"], "clip": 3}},
    "a setting less": lambda v: {**v, "settings": {"clip": "Flat"}},
    "no score noise": changed(score_noise=0.0),
    "a ledger that is none": changed(ledgers=[None, None]),
    "replaced records": lambda v: {**v, "spent": signed({**v["spent"], "adjacency": "replace_one"})},
}
DAMAGED = {
    f"{kind}: {name}": (whole, change)
    for kind, whole, table in (("run", RECORD, OF_A_RUN), ("search", SEARCH, OF_A_SEARCH))
    for name, change in {**COMMON, **table}.items()
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_records_are_refused(name):
    whole, change = DAMAGED[name]
    found = change(json.loads(whole.to_json()))
    with pytest.raises(DPFuncError):
        type(whole).from_json(found if isinstance(found, str) else json.dumps(signed(found)))


@pytest.mark.parametrize(
    ("whole", "name"),
    [(whole, field.name) for whole in (RECORD, SEARCH) for field in dataclasses.fields(whole)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_each_field_is_checked(whole, name):
    with pytest.raises(InvalidArgument, match=r"Expected|adjacency"):
        dataclasses.replace(whole, **{name: object()})


def test_the_score_is_counted_and_replaced_records_are_refused():
    assert search_cost(SEARCH.runs, SEARCH.ledgers, 1.0, 1e-5, Ledger()).epsilon > 2 * SEARCH.epsilon
    with pytest.raises(InvalidArgument, match="may go from those that are trained on"):
        search_cost(SEARCH.runs, [Ledger((Event(1.0, 9.0, 1),), "replace_one")], 6.0, 1e-5, Ledger((), "replace_one"))


def ledger(*arguments):
    return CliRunner().invoke(main, ["ledger", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "privacy_accounting.json").write_text(SEARCH.to_json())
    return tmp_path


def test_a_search_is_shown(folder):
    result = ledger("show", folder)
    assert result.exit_code == 0, result.output
    for text in ("8 on average", "learning_rate=0.3", "88.5", "one patient", "how many there"):
        assert text in result.stdout, text
    assert json.loads(ledger("show", folder, "--json").stdout)["chosen"] == 1
    assert json.loads(ledger("show", folder, "--delta", 1e-3, "--json").stdout)["epsilon"] < SEARCH.epsilon
    assert "rdp" in ledger("show", folder / "privacy_accounting.json", "--delta", 1e-3).stdout
    assert ledger("show", folder, "--method", "prv").exit_code == 2


WRONG = {
    "nothing": {},
    "epsilon": {"epsilon": SEARCH.epsilon * 0.99},
    "delta": {"delta": 0.02},
    "key": {"noise_key": GUESSABLE},
    "budget": {"target_epsilon": 0.5},
    "sampling": {"dataset_size": 99, "ledgers": (Ledger((Event(0.5, 20.0, 10),)),) * 2},
    "score": {"score": "number of records that are right"},
    "settings": {"settings": {**SEARCH.settings, "noise_source": "mine"}},
    "settings: its batches": {"settings": {**SEARCH.settings, "batches": "as they came"}},
    "sampler": {"settings": {**SEARCH.settings, "sampler": "Magic"}},
    "not covered": {"not_covered": (EXACT_SIZE, *NOT_COVERED)},
    "not covered: earlier runs": {"spent": Ledger((Event(1.0, 200.0, 1),))},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_search_is_found(name, folder):
    (folder / "privacy_accounting.json").write_text(search_record(**WRONG[name]).to_json())
    result = ledger("check", folder, "--json")
    wrong = [each["check"] for each in json.loads(result.stdout)["checks"] if not each["agrees"]]
    assert name.partition(":")[0] in wrong if name != "nothing" else not wrong
    assert result.exit_code == bool(wrong)
    assert ledger("check", folder, "--epsilon", SEARCH.epsilon / 2).exit_code == 1
