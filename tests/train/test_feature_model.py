"""Runs over tables and images from end to end: the command, resume, people, a search, the twin; and the saved model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from feature_jobs import JOBS, people, write_csv, write_encoder, write_job, write_photos
from safetensors.torch import load_file
from text_job import at_events, interrupt_at, run, train
from train_runs import ROOT, record
from trainer_cases import again

from dpfunc.errors import InvalidArgument
from dpfunc.recipes import Head, unit_rows
from dpfunc.rng import insecure_key
from dpfunc.train._config_file import read_job
from dpfunc.train._features import load_features
from dpfunc.train.run import prepare


@pytest.fixture(scope="module", params=JOBS)
def folder(request, tmp_path_factory):
    """A folder with a job and its finished run; and what that said."""
    place = tmp_path_factory.mktemp(request.param)
    write_job(place, request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        again(insecure_key(5))  # of the run over the other records
        result = train("--insecure-seed", 5)
    assert result.exit_code == 0, result.output
    return place, result.stdout


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder[0])
    return folder[0]


def weights(name):
    return load_file(f"{name}/model/model.safetensors")


def same(one, other):
    one, other = weights(one), weights(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_leaves_what_runs_leave(folder, here):
    for text in ("Spent: epsilon=7.9", "6 steps, add_remove", "Saved: run/model, for `dpfunc predict run", "eval_loss: ",
                 "eval_balanced_accuracy: ", "eval_loss of the shares of their classes for all: 0.6"):  # fmt: skip
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
        {"numbers": {"age": [18, 90], "hours": [0, 80]}, "categories": {"work": ["private", "public", "self"]},
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
    front, model = load_features(Path("run/model"))
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
    "few rows": (["--dp_dataset_size", "10000"], "Expected at least half of privacy.dp_dataset_size=10000 records"),
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
    """Both jobs as they stand, with fewer steps, and the command after the first one."""
    guide = (ROOT / "docs" / "guides" / "train.md").read_text()
    monkeypatch.chdir(tmp_path)
    write_csv(Path("people.csv"), people(160))
    write_csv(Path("new.csv"), people(10, seed=1))
    write_photos(Path("photos"), 60)
    for name, label in (("flat", "cat"), ("bars", "dog")):
        Path("photos", name).rename(Path("photos", label))
    jobs = [block for block in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL) if "e_classification\n" in block]
    assert len(jobs) == 2
    for block in jobs:
        Path("job.yaml").write_text(block)
        result = train("--steps", 2)
        assert result.exit_code == 0, result.output
    (command,) = re.findall(r"^dpfunc (predict .*)$", guide, re.MULTILINE)
    assert run(*command.split()).stdout == "10 predictions in classes.jsonl.\n"
