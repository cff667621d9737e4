"""Features of tables: nothing is fitted, norms are public, unknown and missing values have slots of their own."""

from __future__ import annotations

import math

import pytest
from feature_jobs import TABLE, people, write_csv
from hypothesis import given, settings
from hypothesis import strategies as st
from yaml import safe_load

from dpfunc.errors import InvalidArgument
from dpfunc.train._dataset import read_records
from dpfunc.train._feature_model import load_front
from dpfunc.train._table_features import MISSING, TableFeatures
from dpfunc.train.config import job_from_dict
from dpfunc.train.tables import Table

FRONT = TableFeatures({"age": (0.0, 100.0), "hours": (-8.0, 8.0)}, {"work": ("a", "b")}, missing="feature")
texts = st.one_of(st.floats(-1e6, 1e6).map(repr), st.sampled_from(MISSING))
rows = st.fixed_dictionaries({"age": texts, "hours": texts, "work": st.sampled_from(["a", "b", " a ", "c", ""])})


@given(row=rows, missing=st.sampled_from(["feature", "refuse"]))
@settings(derandomize=True, deadline=None)
def test_rows_have_a_public_norm(row, missing):
    front = TableFeatures(FRONT.numbers, FRONT.categories, missing)
    if missing == "refuse":
        row = {name: "5" if text in MISSING and name != "work" else text for name, text in row.items()}
    found = front.encode(row)
    assert found.shape == (front.size,)
    assert float(found.norm()) == pytest.approx(math.sqrt(3), rel=1e-6)


def test_what_each_value_becomes():
    found = FRONT.encode({"age": "150", "hours": " na", "work": "x"}).tolist()
    assert found == pytest.approx([1, 0, 0, 0, 0, 1, 0, 0, 1], abs=1e-7)  # clipped; missing; unknown
    found = FRONT.encode({"age": "25", "hours": "-8", "work": "b"}).tolist()
    assert found == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0, -1, 0, 0, 0, 1, 0], abs=1e-7)


def job(path, **data):
    values = safe_load(TABLE)
    values["data"] |= {"train": str(path), **data}
    return job_from_dict(values)


@given(seed=st.integers(0, 99), count=st.integers(20, 40), age=st.integers(-500, 500), work=st.sampled_from("abc"))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_one_row_more_changes_no_other_row(tmp_path_factory, seed, count, age, work):
    """Whatever the row: one that fitted scales, levels, or a shuffle over the table would move the others."""
    folder = tmp_path_factory.mktemp("neighbours")
    given, more = people(count, seed), {"age": age, "hours": 3, "work": work, "income": "low"}
    found = []
    for name, table in (("one.csv", given), ("other.csv", [*given[:7], more, *given[7:]])):
        one = job(write_csv(folder / name, table))
        found.append(read_records(one, load_front(one, {})))
    before, after = ([(r["features"].tolist(), r["labels"]) for r in (*each.train, *each.evaluation)] for each in found)
    for record in before:
        after.remove(record)
    assert len(after) == 1
    sizes = [(len(each.train), len(each.evaluation)) for each in found]
    assert sum(abs(a - b) for a, b in zip(*sizes, strict=True)) == 1


def test_a_fitted_scale_would_be_seen(monkeypatch, tmp_path_factory):
    """The property above is one that can fail."""
    real = TableFeatures.check_table
    top = []

    def fitted(self, table, name):
        real(self, table, name)
        top[:] = [max(float(row["age"]) for row in table.rows)]

    encode = TableFeatures.encode
    monkeypatch.setattr(TableFeatures, "check_table", fitted)
    monkeypatch.setattr(TableFeatures, "encode", lambda self, row, where="": encode(self, row, where) / (top or [1])[0])
    with pytest.raises(ValueError, match="not in list"):
        test_one_row_more_changes_no_other_row(tmp_path_factory)


BAD = {  # change of the rows -> message
    "a text for a number": (
        {"age": "old"},
        "Expected a finite number in the column 'age' in row 3 of people.csv, got another",
    ),
    "infinity": ({"age": "inf"}, "Expected a finite number in the column 'age' in row 3"),
    "missing": ({"hours": "NA"}, r"column 'hours' in row 3 of people.csv, which has none. .* data.missing: feature"),
    "another class": (
        {"income": "middle"},
        r"Expected one of data.labels \(low, high\) in row 3 of people.csv, got another.",
    ),
    "another class in capitals": ({"income": "High"}, "which differs in capitals"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_does_not_fit_is_refused_by_number(tmp_path, name):
    change, message = BAD[name]
    table = people(30)
    table[2] |= change
    one = job(write_csv(tmp_path / "people.csv", table))
    with pytest.raises(InvalidArgument, match=message) as caught:
        read_records(one, load_front(one, {}))
    assert not any(str(value) in str(caught.value) for value in change.values() if value not in ("NA", "High"))


COLUMNS = {  # change of the job -> message
    "all unknown": ({"categories": {"work": ["Private", "Public"]}}, "in the column 'work' of people.csv, got none of them in any row"),
    "another unit": ({"numbers": {"age": [0, 1]}}, r"in the range data.numbers.age: \[0, 1\] in the column 'age' .* unit of the table"),
    "no such column": ({"numbers": {"Age": [0, 99]}}, r"Expected a text in the column 'Age' in row 1 of people.csv, got none. There is 'age'"),
    "no rows left": ({"labels": ["low", "high"], "eval_fraction": 0.99}, "Expected records"),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_public_facts_that_are_not_of_this_table_are_refused(tmp_path, name):
    change, message = COLUMNS[name]
    one = job(write_csv(tmp_path / "people.csv", people(30)), **change)
    with pytest.raises(InvalidArgument, match=message):
        read_records(one, load_front(one, {}))


def test_rows_of_the_check_are_those_of_the_table(tmp_path):
    with pytest.raises(InvalidArgument, match="in row 9 of t"):
        FRONT.check_table(Table(({"age": "x", "hours": "1", "work": "a"},), (9,)), "t")


def test_equal_rows_are_two_records(tmp_path):
    table = people(30)
    path = write_csv(tmp_path / "people.csv", [*table, table[0]])
    for deduplicate, count in ((None, 31), (False, 31), (True, 30)):
        one = job(path, deduplicate=deduplicate)
        found = read_records(one, load_front(one, {}))
        assert len(found.train) + len(found.evaluation) == count
        assert found.duplicates == 31 - count
