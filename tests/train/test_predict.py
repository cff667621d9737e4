"""Predictions for new records: those of the trained model, whatever else is asked; and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from feature_jobs import people, write_csv, write_job
from text_job import run, trained

from dpfunc.errors import InvalidArgument
from dpfunc.train.predict import predict


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("table")
    write_job(place, "table")
    write_csv(place / "held.csv", people(80, seed=1))
    trained(place, "--eval_fraction", 0, "--data.eval", "held.csv")
    return place


def test_predictions_are_those_of_the_evaluation(folder):
    rows, found = people(80, seed=1), list(predict(folder / "run", folder / "held.csv"))
    measured = json.loads((folder / "run/metrics.json").read_text())
    right = sum(each["label"] == row["income"] for each, row in zip(found, rows, strict=True))
    assert right / 80 == pytest.approx(measured["eval_accuracy"])
    for number, each in enumerate(found, start=1):
        assert each["row"] == number
        assert sum(each["probabilities"].values()) == pytest.approx(1, abs=1e-6)
        assert each["probabilities"][each["label"]] == max(each["probabilities"].values())


def test_rows_without_labels_one_by_one_and_a_model_elsewhere(folder, tmp_path):
    rows = [{name: row[name] for name in ("work", "hours", "age")} for row in people(80, seed=1)]
    moved = shutil.copytree(folder / "run" / "model", tmp_path / "moved")
    found = [
        next(predict(moved, write_csv(tmp_path / "one.csv", [row]))) | {"row": number}
        for number, row in enumerate(rows[:5], start=1)
    ]
    assert found == list(predict(folder / "run", folder / "held.csv"))[:5]


def test_the_command(folder, monkeypatch):
    monkeypatch.chdir(folder)
    result = run("predict", "run", "held.csv", "--out", "found.jsonl")
    assert result.stdout == "80 predictions in found.jsonl.\n"
    assert [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()] == list(
        predict("run", "held.csv")
    )
    assert Path("found.jsonl").stat().st_mode & 0o777 == 0o600  # as private as held.csv
    assert "Expected a new file" in run("predict", "run", "held.csv", "--out", "found.jsonl").stderr
    assert "Expected a file in a folder that" in run("predict", "run", "held.csv", "--out", "none/found.jsonl").stderr
    Path("bad.csv").write_text("age,hours,work\n30,20,private\nold,2,self\n")
    result = run("predict", "run", "bad.csv", "--out", "new.jsonl")
    assert "in the column 'age' in row 2 of bad.csv" in result.stderr
    assert not Path("new.jsonl").exists()


def test_a_folder_without_such_a_model_is_refused(folder):
    with pytest.raises(InvalidArgument, match="Expected the model of a run over a table or images in"):
        next(predict(folder / "run" / "checkpoint-0" / "dpfunc", folder / "held.csv"))
