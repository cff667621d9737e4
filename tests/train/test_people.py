"""People as the unit of `dpfunc train`: what is one person, what a person gives, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from text_job import rows, train, write_job, write_rows

from dpfunc._utils.validation import signed
from dpfunc.errors import InvalidArgument
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import collator, read_records
from dpfunc.train._dry_run import dry_run
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._model import choose_parameters, load_base, load_processing
from dpfunc.train._recipe import with_shape
from dpfunc.train.tables import read_table, split

UNIT = "one person: all records with the same value of the unit column"
PEOPLE = ["--unit_column", "author", "--max_records_per_unit", "3"]


def authored(count=120, people=30):
    """Rows of people with 1 to 6 records each, and the rest of the first ones."""
    authors = [f"p{i}" for i in range(people) for _ in range(1 + i % 6)]
    authors = (authors * count)[:count]
    random.Random(0).shuffle(authors)
    return [{**row, "author": author} for row, author in zip(rows(count), authors, strict=True)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a language model, a table with authors and a job over them."""
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_rows("mails.jsonl", authored())
    return tmp_path


def records_of(*flags):
    job = read_job("job.yaml", flags)
    return job, read_records(job, load_processing(job))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a finished run over people, and what it printed."""
    place = tmp_path_factory.mktemp("people")
    write_job(place)
    write_rows(place / "mails.jsonl", authored())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        result = train(*PEOPLE, "--eval_fraction", 0.2, "--batch_size", 6, "--dp_delta", 1e-2)
    assert result.exit_code == 0, result.output
    return place, result.stdout


def test_the_accounting_says_that_a_person_is_protected(finished):
    place, output = finished
    record = json.loads((place / "run/privacy_accounting.json").read_text())
    assert record["unit"] == UNIT
    people = {row["author"] for row in authored()}
    assert record["dataset_size"] < len(people)  # without those who are held out
    assert record["expected_batch_size"] == pytest.approx(6)
    assert "add_remove, one person protected." in output
    assert "eval_loss" in output


def test_costs_for_records_and_for_people_do_not_add_up(finished, monkeypatch):
    place, _ = finished
    monkeypatch.chdir(place)
    flags = ["--eval_fraction", 0.2, "--dp_delta", 1e-2, "--dp_epsilon", 20, "--output_dir", "next", "--dry-run"]
    for spent in ("run/privacy_accounting.json", "run/privacy_journal.jsonl"):
        assert "with 4 steps of earlier runs" in train(*flags, *PEOPLE, "--batch_size", 6, "--spent", spent).stdout
        refused = train(*flags, "--batch_size", 6, "--spent", spent)
        assert refused.exit_code == 1
        assert "Their costs do not add up" in refused.stderr
    Path("bare.json").write_text(json.dumps(json.loads(Path("run/privacy_accounting.json").read_text())["ledger"]))
    unknown = train(*flags, *PEOPLE, "--batch_size", 6, "--spent", "bare.json")
    assert "which protected 'an unknown unit'" in unknown.stderr
    assert "with 4 steps of earlier runs" in train(*flags, "--batch_size", 6, "--spent", "bare.json").stdout
    own = {**json.loads(Path("run/privacy_accounting.json").read_text()), "unit": "one person: all texts of one author"}
    Path("own.json").write_text(json.dumps(signed(own)))  # of a DPTrainer, whose unit is a text of its user
    refused = train(*flags, "--batch_size", 6, "--spent", "own.json")
    assert "which protected 'one person: all texts of one author'" in refused.stderr
    assert not Path("next").exists()
    flags = ["--eval_fraction", 0.2, "--batch_size", 6, "--dp_delta", 1e-2, "--resume", "--dry-run"]
    assert train(*flags, *PEOPLE).exit_code == 0
    assert "data.unit_column was 'author', now None" in train(*flags).stderr  # nor does a run go on for the other


@pytest.mark.usefixtures("here")
def test_the_dry_run_counts_people():
    job = read_job("job.yaml", [*PEOPLE, "--batch_size", "6", "--dp_delta", "1e-2", "--physical_batch_size", "4"])
    people = len({row["author"] for row in authored()})
    lines = "\n".join(dry_run(job))
    assert f"people: {people}, each of them protected, with at most 3 records each" in lines
    assert f"sampling probability: {6 / people:.4g} (Poisson)" in lines
    small = read_job("job.yaml", [*PEOPLE, "--batch_size", "6"])  # delta 1e-3 of the file is below 1 / people
    assert small.privacy.dp_delta < 1 / people
    with pytest.raises(InvalidArgument, match="dataset_size"):
        dry_run(read_job("job.yaml", [*PEOPLE, "--batch_size", str(people + 1)]))
    for flags in (PEOPLE[:2], PEOPLE[2:]):
        with pytest.raises(InvalidArgument, match="data.unit_column and data.max_records_per_unit together"):
            read_job("job.yaml", flags)
    with pytest.raises(InvalidArgument, match="data.max_records_per_unit >= 1"):
        read_job("job.yaml", [*PEOPLE[:3], "0"])


@pytest.mark.usefixtures("here")
def test_a_person_is_the_mean_over_at_most_so_many_records():
    job, records = records_of(*PEOPLE)
    by_author = {}
    for row in authored():
        by_author.setdefault(row["author"], []).append(row)
    assert [len(own) for own in records.units] == [min(3, len(own)) for own in by_author.values()]
    tokenizer = load_processing(job)
    for own, theirs in zip(records.units, by_author.values(), strict=True):
        texts = {" ".join(tokenizer.convert_ids_to_tokens(record["input_ids"])) for record in own}
        known = {" ".join(f"<s> label : {r['label']} text : {r['text']} </s>".split()[:16]) for r in theirs}
        known = {" ".join(tokenizer.convert_ids_to_tokens(tokenizer.convert_tokens_to_ids(k.split()))) for k in known}
        assert texts <= known
    batch = collator(job, tokenizer)(records.units)
    assert batch["input_ids"].shape[:2] == batch["text_mask"].shape == (len(by_author), 3)
    assert batch["text_mask"].sum(1).tolist() == [len(own) for own in records.units]
    assert {len(own) for own in records.units} > {3}
    write_rows("mails.jsonl", [row for row in authored() if row["author"] != "p4"])  # who else is there changes nothing
    _, without = records_of(*PEOPLE)
    drawn, left = ({tuple(tuple(r["input_ids"]) for r in own) for own in each.units} for each in (records, without))
    assert (left < drawn, len(drawn) - len(left)) == (True, 1)


people = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("uvwxyz")), max_size=20)


@given(table=people, own=st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=5), seed=st.integers(0, 5))
def test_one_person_more_changes_nothing_of_the_others(tmp_path_factory, table, own, seed):
    """Not what is a duplicate, not which side of the split they are on, and not which records are drawn."""
    folder = tmp_path_factory.mktemp("t")
    before = [{"author": "first", "text": "goal"}, *({"author": a, "text": t} for a, t in table)]
    places = range(0, 2 * len(own), 2)
    after = list(before)
    for place, text in zip(places, own, strict=True):
        after.insert(min(place, len(after)), {"author": "new", "text": text})
    found = []
    for table_of in (before, after):
        write_rows(folder / "t.jsonl", table_of)
        read = read_table(folder / "t.jsonl", ["text", "author"], unit="author").rows
        sides = split(read, 0.4, seed, "author")
        found.append([[row for row in side if row["author"] != "new"] for side in sides])
        assert not {row["author"] for row in sides[0]} & {row["author"] for row in sides[1]}
    assert found[0] == found[1]


NOBODY = "Expected a person in the column 'author' in row 2"
BAD = {  # the value of one row -> message
    "missing": ({}, "Expected a text in the column 'author' in row 2"),
    "null": ({"author": None}, "Expected a text in the column 'author' in row 2"),
    "a list": ({"author": ["secret"]}, "Expected a text in the column 'author' in row 2"),
    "spaces around": ({"author": "secret "}, "Expected a person without spaces around"),
    **{str(value): ({"author": value}, NOBODY) for value in ("", "  ", 7.5, float("nan"), True)},
}


@pytest.mark.parametrize(("values", "message"), BAD.values(), ids=BAD)
def test_a_row_that_is_nobodys_is_refused(tmp_path, values, message):
    table = authored(6, 3)
    del table[1]["author"]
    table[1] |= values
    write_rows(tmp_path / "mails.jsonl", table)
    with pytest.raises(InvalidArgument, match=message) as caught:
        read_table(tmp_path / "mails.jsonl", ["text", "author"], unit="author")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("flags", [["--strategy", "head"], ["--strategy", "lora", "--top_layers", "1"]])
def test_frozen_layers_are_computed_once_for_people_as_well(tmp_path, monkeypatch, flags):
    """What is kept of each record of a person gives the logits of the whole model."""
    write_job(tmp_path, "text_classification", "bert")
    monkeypatch.chdir(tmp_path)
    write_rows("mails.jsonl", authored(40, 9))
    job = with_shape(read_job("job.yaml", ["--init", "pretrained", "--eval_fraction", "0", *flags, *PEOPLE]))
    processing = load_processing(job)
    model = choose_parameters(load_base(job, processing), job).eval()
    records = read_records(job, processing)
    computed, _ = compute_frozen(job, model, records, shows=False)
    whole, kept = (collator(job, processing)(each.units) for each in (records, computed))
    assert "input_ids" not in kept
    assert torch.equal(whole.pop("text_mask"), kept.pop("text_mask"))
    assert torch.equal(whole.pop("labels"), kept.pop("labels"))
    with torch.no_grad():
        logits = [model(**{k: v.flatten(0, 1) for k, v in batch.items()}).logits for batch in (whole, kept)]
    torch.testing.assert_close(*logits, rtol=1e-2, atol=1e-2)


def test_a_head_over_people_and_its_twin(tmp_path, monkeypatch):
    """On cached features, with what is missing from the recipe; batches and steps count people."""
    write_job(tmp_path, "text_classification", "bert")
    monkeypatch.chdir(tmp_path)
    write_rows("mails.jsonl", authored(200, 60))
    text = Path("job.yaml").read_text()
    for old, new in ((", init: random", ""), ("learning_rate: 1e-2, batch_size: 32, ", ""), ("1e-3", "1e-2")):
        text = text.replace(old, new)
    Path("job.yaml").write_text(text)
    flags = ["--strategy", "head", "--physical_batch_size", "null", *PEOPLE]
    result = train(*flags)
    assert result.exit_code == 0, result.output
    assert "Frozen layers were computed once for each record" in result.stdout
    assert "one person protected" in result.stdout
    record = json.loads(Path("run/privacy_accounting.json").read_text())
    assert f"from {record['dataset_size']} records" in result.stdout
    filled = json.loads(Path("run/job.json").read_text())["filled"]["training"]
    assert filled["physical_batch_size"] == min(64 // 3, filled["batch_size"])
    twin = train(*flags, "--no-dp")
    assert twin.exit_code == 0, twin.output
    assert "eval_accuracy" in json.loads(Path("run-no-dp/metrics.json").read_text())
