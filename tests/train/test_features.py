"""Features of rows and of images: nothing is fitted, each is encoded alone, what does not fit is refused; and runs."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from feature_jobs import IMAGES, JOBS, TABLE, people, write_csv, write_encoder, write_job, write_photos
from hypothesis import given, settings
from hypothesis import strategies as st
from text_job import ROOT, at_events, interrupt_at, record, run, same, train, trained, weights
from trainer_cases import again
from yaml import safe_load

from dpfunc.errors import InvalidArgument
from dpfunc.features import TableFeatures, images
from dpfunc.features.tables import MISSING
from dpfunc.recipes import Head, unit_rows
from dpfunc.rng import insecure_key
from dpfunc.train import _features as features
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import read_records
from dpfunc.train._model import load_processing
from dpfunc.train.config import job_from_dict
from dpfunc.train.run import prepare
from dpfunc.train.tables import read_images, visible_files


def job(source, model=None, text=TABLE, **data):
    values = safe_load(text)
    values["data"] |= {"train": str(source), **data}
    if model is not None:
        del values["data"]["image_size"]
        values["model"] = {"path": str(model)}
    return job_from_dict(values)


def read(one):
    return read_records(one, features.load_front(one, {}))


def check_neighbours(one, other):
    """All records of one are in the other, on the same side and bit for bit, and one more is."""
    before, after = ([(r["features"].tolist(), r["labels"]) for r in (*e.train, *e.evaluation)] for e in (one, other))
    for found in before:
        after.remove(found)
    assert len(after) == 1
    assert abs(len(other.train) - len(one.train)) + abs(len(other.evaluation) - len(one.evaluation)) == 1


# Tables

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


@given(seed=st.integers(0, 99), count=st.integers(20, 40), age=st.integers(-500, 500), work=st.sampled_from("abc"))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_one_row_more_changes_no_other_row(tmp_path_factory, seed, count, age, work):
    """Whatever the row: one that fitted scales, levels, or a shuffle over the table would move the others."""
    table, more = people(count, seed), {"age": age, "hours": 3, "work": work, "income": "low"}
    folder, both = (
        tmp_path_factory.mktemp("neighbours"),
        {"one.csv": table, "other.csv": [*table[:7], more, *table[7:]]},
    )
    check_neighbours(*(read(job(write_csv(folder / name, each))) for name, each in both.items()))


BAD_ROWS = {  # change of the rows -> message
    "a text for a number": ({"age": "old"}, "finite number in the column 'age' in row 3 of people.csv, got another"),
    "infinity": ({"age": "inf"}, "Expected a finite number in the column 'age' in row 3"),
    "missing": ({"hours": "NA"}, r"column 'hours' in row 3 of people.csv, which has none. .* data.missing: feature"),
    "another class": ({"income": "middle"}, r"one of data.labels \(low, high\) in row 3 of people.csv, got another."),
    "another class in capitals": ({"income": "High"}, "which differs in capitals"),
}


@pytest.mark.parametrize(("change", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_that_does_not_fit_is_refused_by_number(tmp_path, change, message):
    table = people(30)
    table[2] |= change
    with pytest.raises(InvalidArgument, match=message) as caught:
        read(job(write_csv(tmp_path / "people.csv", table)))
    assert not any(str(value) in str(caught.value) for value in change.values() if value not in ("NA", "High"))


COLUMNS = {  # change of the job -> message
    "all unknown": ({"categories": {"work": ["Private", "Public"]}}, "in the column 'work' of people.csv, got none of them in any row"),
    "another unit": ({"numbers": {"age": [0, 1]}}, r"in the range data.numbers.age: \[0, 1\] in the column 'age' .* unit of the table"),
    "no such column": ({"numbers": {"Age": [0, 99]}}, r"Expected a text in the column 'Age' in row 1 of people.csv, got none. There is 'age'"),
    "no rows left": ({"labels": ["low", "high"], "eval_fraction": 0.99}, "Expected records"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), COLUMNS.values(), ids=COLUMNS)
def test_public_facts_that_are_not_of_this_table_are_refused(tmp_path, change, message):
    with pytest.raises(InvalidArgument, match=message):
        read(job(write_csv(tmp_path / "people.csv", people(30)), **change))


def test_rows_of_the_check_are_those_of_the_table():
    with pytest.raises(InvalidArgument, match="in row 9 of t"):
        features.check_table(FRONT, {9: {"age": "x", "hours": "1", "work": "a"}}, "t")


def test_equal_rows_are_two_records(tmp_path):
    table = people(30)
    path = write_csv(tmp_path / "people.csv", [*table, table[0]])
    for deduplicate, count in ((None, 31), (False, 31), (True, 30)):
        found = read(job(path, deduplicate=deduplicate))
        assert len(found.train) + len(found.evaluation) == count


# Images


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos") / "photos", 24)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.mark.parametrize("grey", [False, True])
def test_an_image_is_encoded_alone(photos, grey):
    """In each group of three channels the mean is 0 and the variance at most 1, over the positions of this image."""
    front = images.ScatteringFeatures(12, 8, grey)
    found = front.encode(visible_files(photos)[0])
    assert found.shape == (front.size,) == ((1 if grey else 3) * 81 * 6,)
    groups = found.reshape(-1, 18)
    torch.testing.assert_close(groups.mean(1), torch.zeros(len(groups)), atol=1e-4, rtol=0)
    spread = groups.var(1, correction=0)
    assert float(spread.max()) <= 1 + 1e-4
    assert float(spread[0]) > 0.99
    assert torch.equal(front.encode(visible_files(photos)[0]), found)


def test_pooled_features_of_an_encoder(photos, encoder):
    front = features.load_encoder(str(encoder), {"local_files_only": True})
    one, other = (front.encode(path) for path in visible_files(photos)[:2])
    assert one.shape == (front.size,) == (16,)
    assert float(one.mean()) == pytest.approx(0, abs=1e-5)
    assert not torch.equal(one, other)
    assert not front.model.training


@pytest.mark.parametrize("model", [False, True], ids=["scattering", "encoder"])
def test_one_image_more_changes_no_other_one(tmp_path, photos, encoder, model):
    more = shutil.copytree(photos, tmp_path / "more")
    extra = write_photos(tmp_path / "others", 2, seed=9)
    shutil.copy(visible_files(extra / "bars")[0], more / "bars" / "0.png")  # the first of its class
    check_neighbours(*(read(job(folder, encoder if model else None, IMAGES)) for folder in (photos, more)))


def test_names_decide_nothing_and_copies_are_left_out(tmp_path, photos):
    renamed, copied = (shutil.copytree(photos, tmp_path / name) for name in ("renamed", "copied"))
    for number, path in enumerate(visible_files(renamed)):
        path.rename(path.with_name(f"x{number:03}{path.suffix}"))
    (copied / "flat" / "deep").mkdir()
    shutil.copy(visible_files(copied / "flat")[0], copied / "flat" / "deep" / "a.PNG")
    found = [read(job(folder, text=IMAGES)) for folder in (photos, renamed, copied)]
    sets = [[{tuple(r["features"].tolist()) for r in part} for part in (each.train, each.evaluation)] for each in found]
    assert sets[0] == sets[1] == sets[2]
    assert [len(each.train) + len(each.evaluation) for each in found] == [24] * 3
    assert len(read_images(copied, ["flat", "bars"], "label", deduplicate=False)) == 25


def damage(folder):
    path = visible_files(folder / "flat")[0]
    path.write_bytes(path.read_bytes()[:60])


def emptied(folder):
    for path in visible_files(folder):
        path.unlink()


BAD_FOLDERS = {
    "damaged": (damage, r"The image of file 1 of the class 'flat', in the order of names, cannot be used. Expected an image that can be read"),
    "another class": (lambda folder: (folder / "dots").mkdir(), r"each of data.labels \(flat, bars\), and no other, got .* with 1 others"),
    "a class less": (lambda folder: shutil.rmtree(folder / "bars"), r"without bars, with 0 others. .* has an empty folder"),
    "no folder": (shutil.rmtree, "Expected a folder with a folder for each of data.labels"),
    "no image": (emptied, "Expected images in the folders"),
    "one class alone": (lambda folder: emptied(folder / "bars"), "got one class alone"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_folders_that_are_not_those_of_the_job_are_refused(tmp_path, photos, change, message):
    folder = shutil.copytree(photos, tmp_path / "photos")
    change(folder)
    with pytest.raises(InvalidArgument, match=message):
        read(job(folder, text=IMAGES))


def test_a_model_that_is_none_and_features_that_do_not_fit_into_memory(tmp_path, photos):
    with pytest.raises(InvalidArgument, match=r"got model.path='.*nowhere': there is no such folder here"):
        load_processing(job(photos, tmp_path / "nowhere", IMAGES))
    text = IMAGES.replace("training: {", "training: {cache_mib: 0, ")
    with pytest.raises(InvalidArgument, match=r"at most training.cache_mib=0 MiB, got 24 records of 972 features"):
        read(job(photos, text=text))


# The scattering transform

# Means over positions of each channel by kymatio 0.3 (Scattering2D(J=2, shape=(16, 16))), of the image below.
KYMATIO = """
0.5377 0.0693 0.0577 0.058 0.0514 0.0588 0.0579 0.0675 0.0792 0.0321 0.0348 0.0336 0.0311 0.0298 0.0253 0.0361 0.0373
0.0069 0.0054 0.0063 0.0067 0.0043 0.0039 0.0057 0.0062 0.0042 0.0045 0.0044 0.0048 0.003 0.004 0.0046 0.0045 0.0045
0.0045 0.0059 0.0072 0.0053 0.0034 0.0034 0.0034 0.0049 0.0048 0.0067 0.0093 0.0062 0.0045 0.0057 0.0057 0.0031 0.0032
0.0049 0.0078 0.0066 0.0064 0.0059 0.0044 0.0037 0.0043 0.0037 0.0041 0.0048 0.0042 0.0064 0.005 0.0071 0.0042 0.0049
0.0078 0.0062 0.0059 0.0073 0.0062 0.0094 0.008 0.0067 0.0072 0.0077 0.0073 0.0067 0.0089
"""
PLACE = [0.5159, 0.1053, 0.0636, 0.0344, 0.0291, 0.0488, 0.0613, 0.077, 0.0601, 0.0374, 0.0436, 0.0186, 0.019, 0.0288]
"""The first channels at position (1, 2)."""


def picture(side=16):
    i, j = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return ((7 * i * i + 3 * i * j + 5 * j) % 32 / 31.0)[None]


def test_the_numbers_are_those_of_kymatio():
    """Kymatio throws pixels away between the two wavelets, which costs it up to 1 % of a mean."""
    found, means = images.scattering(picture())[0], torch.tensor([float(text) for text in KYMATIO.split()])
    assert found.shape == (images.CHANNELS, 4, 4)
    torch.testing.assert_close(found.mean((1, 2)), means, rtol=0.02, atol=1e-4)
    torch.testing.assert_close(found[: len(PLACE), 1, 2], torch.tensor(PLACE), rtol=0.06, atol=1e-4)


def test_a_constant_has_no_moduli_and_colours_are_apart():
    found = images.scattering(torch.stack([torch.full((8, 12), 0.5), picture(12)[0, :8]]))
    torch.testing.assert_close(found[0, 0], torch.full((2, 3), 0.5))
    assert found[0, 1:].abs().max() < 1e-5
    assert torch.equal(found[1:], images.scattering(picture(12)[:, :8]))


# Runs from end to end: the command, resume, people, a search, the twin; and the saved model


@pytest.fixture(scope="module", params=JOBS)
def folder(request, tmp_path_factory):
    """A folder with a job and its finished run; and what that said."""
    place = tmp_path_factory.mktemp(request.param)
    write_job(place, request.param)
    again(insecure_key(5))  # of the run over the other records
    return place, trained(place, "--insecure-seed", 5)


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder[0])
    return folder[0]


def test_a_run_leaves_what_runs_leave(folder, here):
    for text in (
        "Spent: epsilon=7.9", "6 steps, add_remove", "BUT anybody can guess the noise", "eval_loss: ",
        "Saved: run/model, for `dpfunc predict run", "eval_balanced_accuracy: ",
        "eval_loss of the shares of their classes for all: 0.6",
    ):  # fmt: skip
        assert text in folder[1], text
    values = record("run")
    assert values["epsilon"] <= 8.0
    assert (values["global_step"], values["unit"]) == (6, "one record of the training data set")
    checked = run("ledger", "check", "run").output
    assert checked.count("WRONG") == 2, checked  # the key, since anybody can guess it
    assert "WRONG │ guessable" in checked
    assert run("certify", "run", "--out", "run/certificate.json").exit_code == 0
    assert {path.name for path in Path("run/model").iterdir()} == {"config.json", "model.safetensors"}
    known = json.loads(Path("run/model/config.json").read_text())
    assert known["front"] == (
        {"numbers": [["age", [18, 90]], ["hours", [0, 80]]], "categories": [["work", ["private", "public", "self"]]],
         "missing": "refuse"} if known["task"] == "table_classification" else {"height": 8, "width": 8, "grey": False}
    )  # fmt: skip
    assert json.loads(Path("run/metrics.json").read_text())["eval_accuracy"] > 0.6


def test_an_interrupted_run_goes_on_bit_for_bit(here, monkeypatch):
    flags = ["--insecure-seed", 5, "--output_dir", "stopped"]
    again(insecure_key(5))
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(3))
        assert train(*flags).exit_code == 1
    assert not Path("stopped/model").exists()
    result = train(*flags, "--resume")
    assert result.exit_code == 0, result.output
    assert same("run", "stopped")
    assert record("run")["epsilon"] == record("stopped")["epsilon"]


def test_the_recipe_is_that_of_a_head_which_begins_at_zero(here):
    text = Path("job.yaml").read_text()
    bare = text[: text.index("training:")].replace(", dp_max_grad_norm: 1.0", "")
    Path("bare.yaml").write_text(bare)
    prepared = prepare(read_job("bare.yaml", ["--output_dir", "other"]))
    assert prepared.recipe.strategy == "head"
    assert isinstance(prepared.model.classifier, Head)
    assert not any(p.any() for p in prepared.model.parameters())


def test_a_network_and_the_twin(here):
    network = prepare(read_job("job.yaml", ["--strategy", "full", "--hidden", "5", "--learning_rate", "null"]))
    assert network.recipe.strategy == "full"
    assert [tuple(p.shape) for p in network.model.parameters()][1:] == [(5,), (2, 5), (2,)]
    k = network.model.config.num_features
    x = torch.randn(4, k)
    hidden = torch.relu(network.model.hidden(unit_rows(x) * (k + 1) ** 0.5))
    torch.testing.assert_close(network.model(x).logits, network.model.classifier(hidden))
    result = train("--strategy", "full", "--no-dp", "--output_dir", "twin", "--steps", 2)
    assert result.exit_code == 0, result.output
    assert set(weights("twin-no-dp")) == {"hidden.weight", "hidden.bias", "classifier.weight", "classifier.bias"}


def test_searches_take_tables_and_images(here):
    table = Path("people.csv").exists()
    flags = ["--private", "--mean-runs", 3, "--score-noise", 2, "--grid", "steps=2", "--factors", "1"]
    result = run("tune", "job.yaml", *flags, "--output_dir", "searched", "--insecure-seed", 13 if table else 15)
    assert result.exit_code == 0, result.output
    assert Path("searched/model/model.safetensors").exists(), result.output
    assert "number of held-out records whose most likely class is their label" in result.stdout
    assert run("tune", "job.yaml", "--public", "people.csv" if table else "photos").exit_code == 1
    if table:
        write_csv(here / "public.csv", people(200, seed=3))
        flags = ["--public", "public.csv", "--factors", "1", "--grid", "steps=2", "--out", "best.yaml"]
        result = run("tune", "job.yaml", *flags)
        assert result.exit_code == 0, result.output


def test_people_instead_of_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, "table")
    write_csv(Path("people.csv"), [{**row, "who": f"p{number // 2}"} for number, row in enumerate(people(160))])
    result = train("--unit_column", "who", "--max_records_per_unit", 2)
    assert result.exit_code == 0, result.output
    assert record("run")["unit"].startswith("one person")


def test_images_by_an_encoder(tmp_path, monkeypatch):
    """The folder of the model is whole: it opens where the encoder's own folder is gone."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, "images")
    encoder = write_encoder(tmp_path / "encoder")
    text = Path("job.yaml").read_text().replace(", image_size: [8, 8]", "")
    Path("job.yaml").write_text(f"{text}model: {{path: encoder}}\n")
    result = train("--steps", 2)
    assert result.exit_code == 0, result.output
    encoder.rename(tmp_path / "moved")
    model, front = features.load_features(Path("run/model"))
    assert front.size == model.config.num_features == 16
    result = run("predict", "run", "photos/flat", "--out", "found.jsonl", "--json")
    assert json.loads(result.stdout)["num_records"] == 50


BAD = {  # flags or text in place of another -> message
    "lora": (["--strategy", "lora"], "These are what table_classification can train"),
    "no range": (("age: [18, 90]", "age: null"), "Expected a list, got data.numbers.age=None. Each column needs a public range"),
    "one number": (("age: [18, 90]", "age: [18]"), r"a public range [low, high], low < high, got data.numbers.age=[18.0]"),
    "no list": (("work: [private, public, self]", "work: null"), "got data.categories.work=None. Each column needs the public list"),
    "twice": (("work: [private, public, self]", "work: [a, a]"), "Expected different values, got data.categories.work=['a', 'a']"),
    "no columns": (("numbers: {age: [18, 90], hours: [0, 80]}, categories: {work: [private, public, self]}", "grey: false"),
                   "Expected columns to learn from: data.numbers"),
    "the label": (["--label_column", "age"], "Expected each column once in data.numbers, data.categories and data.label_column"),
    "a model": (["--model.path", "bert"], "Expected model.path with task text_classification or text_regression or"),
    "no labels": (["--labels", "null"], "Expected data.labels, the list of classes"),
    "another task": (["--task", "text_classification", "--model.path", "x"], "with task table_classification only"),
    "grey": (["--grey"], "Expected data.grey with task image_classification only"),
    "few rows": (["--dp_dataset_size", "10000"], "Expected at least half of privacy.dp_dataset_size=10000 records, for which the noise is, got fewer"),
    "a large batch": (["--batch_size", "900"], "900"),
}  # fmt: skip
BAD_IMAGES = {
    "no size": (
        ["--image_size", "null"],
        "Expected [height, width], multiples of 4 and at least 8, for images without a model",
    ),
    "an odd size": (["--image_size", "8,10"], "got data.image_size=(8, 10)"),
    "a size with a model": (["--model.path", "x"], "Expected no data.image_size and no data.grey with a model"),
    "people": (["--unit_column", "who", "--max_records_per_unit", "2"], "Expected no data.unit_column for images"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*(("table", name) for name in BAD), *(("images", name) for name in BAD_IMAGES)]
)
def test_mistakes_are_refused_with_advice(tmp_path, monkeypatch, kind, name):
    change, message = {**BAD, **BAD_IMAGES}[name]
    monkeypatch.chdir(tmp_path)
    path = write_job(tmp_path, kind)
    if isinstance(change, tuple):
        assert change[0] in path.read_text()
        path.write_text(path.read_text().replace(*change))
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        prepare(read_job(path, change if isinstance(change, list) else ()))


def test_the_blocks_of_the_guide_run(tmp_path, monkeypatch):
    """The jobs as they stand, with fewer steps, and the command after the first one."""
    guide = (ROOT / "docs" / "guides" / "train.md").read_text()
    monkeypatch.chdir(tmp_path)
    write_csv(Path("people.csv"), people(160))
    write_csv(Path("new.csv"), people(10, seed=1))
    write_photos(Path("photos"), 60)
    for name, label in (("flat", "cat"), ("bars", "dog")):
        Path("photos", name).rename(Path("photos", label))
    jobs = [block for block in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL) if "e_classification\n" in block]
    assert len(jobs) == 3
    for block in jobs:
        Path("job.yaml").write_text(block)
        result = train("--steps", 2)
        assert result.exit_code == 0, result.output
    (command,) = re.findall(r"^dpfunc (predict .*)$", guide, re.MULTILINE)
    assert run(*command.split()).stdout == "10 predictions in classes.jsonl.\n"
