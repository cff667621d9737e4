"""Views of an image in a job: a public list, computed once, averaged before the clip; one of them to evaluate on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from feature_jobs import IMAGES, write_encoder, write_job, write_photos
from text_job import at_events, interrupt_at, record, run, same, train, trained, weights
from trainer_cases import again
from transformers import get_linear_schedule_with_warmup
from yaml import safe_load

import dpfunc
from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.rng import insecure_key
from dpfunc.sampling import mean_over_views
from dpfunc.state import allow_repeat
from dpfunc.train import _features as features
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import read_records
from dpfunc.train._views import VIEWS, views_of
from dpfunc.train.config import job_from_dict
from dpfunc.train.run import prepare
from dpfunc.train.tables import visible_files

K = 3


def job(source, views, model=None):
    values = safe_load(IMAGES)
    values["data"]["train"] = str(source)
    values["privacy"]["dp_views"] = views
    if model is not None:
        del values["data"]["image_size"]
        values["model"] = {"path": str(model)}
    return job_from_dict(values)


def test_the_views_are_those_of_the_list():
    """The image itself first, then its mirror image, then both moved by a 16th of each side; twice the same."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    found = views_of(image, len(VIEWS))
    assert found[0] is image
    right = np.concatenate([pixels[:, :1]] * 3 + [pixels[:, :-3]], axis=1)
    left = np.concatenate([pixels[:, 3:]] + [pixels[:, -1:]] * 3, axis=1)
    down = np.concatenate([pixels[:1]] * 2 + [pixels[:-2]], axis=0)
    up = np.concatenate([pixels[2:]] + [pixels[-1:]] * 2, axis=0)
    expected = [view for moved in (pixels, right, left, down, up) for view in (moved, moved[:, ::-1])]
    for view, known in zip(found, expected, strict=True):
        assert np.array_equal(np.asarray(view), known)
    assert [view.tobytes() for view in views_of(image, 4)] == [view.tobytes() for view in found[:4]]


@pytest.mark.parametrize("kind", ["scattering", "encoder"])
def test_features_are_those_of_each_view(tmp_path, kind):
    """The first is that of the image alone, bit for bit; records to evaluate on have no other."""
    photos = write_photos(tmp_path / "photos", 24)
    model = None if kind == "scattering" else write_encoder(tmp_path / "encoder")
    front = features.load_front(job(photos, K, model), {})
    one, several = (read_records(job(photos, views, model), front) for views in (1, K))
    files = visible_files(photos)
    known = [torch.stack([front.encode(view) for view in views_of(file, K)]) for file in files]
    assert len({tuple(view.tolist()) for views in known for view in views}) == K * len(files)
    for before, after in zip(one.train, several.train, strict=True):
        assert after["features"].shape == (K, front.size)
        assert torch.equal(after["features"][0], before["features"])
        assert any(torch.equal(after["features"], views) for views in known)
        assert after["labels"] == before["labels"]
    for before, after in zip(one.evaluation, several.evaluation, strict=True):
        assert torch.equal(after["features"], before["features"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a job of several views and its finished run; and what that said."""
    place = tmp_path_factory.mktemp("views")
    path = write_job(place, "images")
    path.write_text(path.read_text().replace("privacy: {", f"privacy: {{dp_views: {K}, "))
    return place, trained(place, "--insecure-seed", 5)


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder[0])
    return folder[0]


def test_a_run_is_a_plain_loop_over_these_features(here):
    """The mean of the losses of the views before the clip, bit for bit; and another model than that of one view."""
    prepared = prepare(read_job("job.yaml", ["--output_dir", "other"]))
    model, records, plan = prepared.model, prepared.records.train, prepared.plan
    labels = torch.tensor([each["labels"] for each in records])
    data = {"features": torch.stack([each["features"] for each in records]), "labels": labels[:, None].repeat(1, K)}
    forward, _ = functionalize(model)
    params = dict(model.named_parameters())
    loss_fn = mean_over_views(make_loss_fn(forward, "sequence_classification"))
    dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=40)  # records, as the job has it
    state = allow_repeat(dp_step.init(params, insecure_key(5)))
    optimizer = torch.optim.AdamW(params.values(), lr=0.3, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, 6)
    for indices in plan.batches(state):
        grads, state, _ = dp_step({n: p.detach() for n, p in params.items()}, dpfunc.take(data, indices), state)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        schedule.step()
    known = weights("run")
    assert known.keys() == params.keys()
    for name, param in params.items():
        assert torch.equal(known[name], param.detach()), name
    again(insecure_key(5))
    result = train("--insecure-seed", 5, "--dp_views", 1, "--output_dir", "single")
    assert result.exit_code == 0, result.output
    assert "views" not in result.stdout
    assert not same("run", "single")
    assert record("run")["epsilon"] == record("single")["epsilon"]
    assert record("run")["noise_multiplier"] == record("single")["noise_multiplier"]


def test_the_accuracy_of_views_can_be_released(here):
    """As telemetry: it is the mean over the views of a record too."""
    Path("told.yaml").write_text(
        Path("job.yaml").read_text().replace("privacy: {", "privacy: {dp_telemetry: [accuracy], ")
    )
    result = run("train", "told.yaml", "--output_dir", "told", "--insecure-seed", 6)
    assert result.exit_code == 0, result.output
    (state,) = Path("told").glob("checkpoint-6/trainer_state.json")
    told = [
        line["released/accuracy"]
        for line in json.loads(state.read_text())["log_history"]
        if "released/accuracy" in line
    ]
    assert len(told) == 1


def test_the_run_says_how_many_views_it_has(folder, here):
    assert f"views: {K} of each image to train on, whose gradients are averaged before the clip" in folder[1]
    assert json.loads(Path("run/job.json").read_text())["filled"]["privacy"]["dp_views"] == K
    assert run("ledger", "check", "run").output.count("WRONG") == 2  # the key, since anybody can guess it


def test_an_interrupted_run_goes_on_bit_for_bit(here, monkeypatch):
    """And not with another number of views."""
    flags = ["--insecure-seed", 5, "--output_dir", "stopped"]
    again(insecure_key(5))
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(3))
        assert train(*flags).exit_code == 1
    other = train(*flags, "--resume", "--dp_views", K + 1)
    assert other.exit_code == 1
    assert f"privacy.dp_views was {K}, now {K + 1}" in other.stderr
    result = train(*flags, "--resume")
    assert result.exit_code == 0, result.output
    assert same("run", "stopped")


def test_the_dry_run_counts_the_features_of_all_views(here):
    """Features of all views are kept, and the activations of a record are those of all of its views."""
    said = {}
    for views in (1, 5):
        said[views] = train("--dry-run", "--output_dir", "other", "--dp_views", views).stdout
        assert ("views: 5 of each image" in said[views]) == (views == 5)

    def mib(views, name):
        return float(re.search(rf"{name} ([0-9.e-]+)", said[views])[1])

    trained_on, held_out = map(int, re.search(r"records: (\d+) to train on, (\d+) to evaluate on", said[1]).groups())
    for views in (1, 5):
        assert mib(views, "features") == pytest.approx((trained_on * views + held_out) * 972 * 4 / 2**20, rel=0.01)
    assert 4.8 < mib(5, "activations") / mib(1, "activations") < 5.2


def test_memory_is_refused_with_the_views(tmp_path):
    """Those of 24 images: with 10 views each of about four fifths of them, and one of the others."""
    photos = write_photos(tmp_path / "photos", 24)
    values = job(photos, 10)
    values = replace(values, training=replace(values.training, cache_mib=0))
    with pytest.raises(InvalidArgument, match=r"cache_mib=0 MiB, got (\d+) views of records of 972 features") as caught:
        read_records(values, features.load_front(values, {}))
    (count,) = re.findall(r"got (\d+) views", str(caught.value))
    held_out = len(read_records(job(photos, 1), features.load_front(values, {})).evaluation)
    assert int(count) == 10 * (24 - held_out) + held_out


def test_predictions_are_those_of_the_image_itself(here):
    """As an evaluation has them; the other views are for training."""
    result = run("predict", "run", "photos/flat", "--out", "found.jsonl")
    assert result.exit_code == 0, result.output
    model, front = features.load_features(Path("run/model"))
    found = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    for each in found[:5]:
        shares = model(front.encode(Path(each["image"]))[None]).logits[0].softmax(0).tolist()
        assert [each["probabilities"][name] for name in ("flat", "bars")] == pytest.approx(shares, rel=1e-5)


def test_the_twin_takes_the_mean_over_views_too(here):
    """Of batches of all records, so that its loss does not depend on their order."""
    flags = ["--no-dp", "--output_dir", "plain", "--steps", 1, "--optimizer", "sgd"]
    prepared = prepare(read_job("job.yaml", ["--output_dir", "other"]))
    everything = len(prepared.records.train)
    result = train(*flags, "--batch_size", everything)
    assert result.exit_code == 0, result.output
    model = prepared.model
    x = torch.stack([each["features"] for each in prepared.records.train])
    labels = torch.tensor([each["labels"] for each in prepared.records.train]).repeat_interleave(K)
    (grad,) = torch.autograd.grad(model(x.flatten(0, 1), labels).loss, [model.classifier.weight])
    torch.testing.assert_close(weights("plain-no-dp")["classifier.weight"], -0.3 * grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_searches_take_views(here):
    flags = ["--private", "--mean-runs", 3, "--score-noise", 2, "--grid", "steps=2", "--factors", "1"]
    result = run("tune", "job.yaml", *flags, "--output_dir", "searched", "--insecure-seed", 15)
    assert result.exit_code == 0, result.output
    assert Path("searched/model/model.safetensors").exists(), result.output


REFUSED = {
    "of a table": ("table", 2, "Expected privacy.dp_views=1 with task='table_classification', got privacy.dp_views=2. Images alone"),
    "too many": ("images", 11, "Expected 1 <= dp_views <= 10, as many as there are of an image, got privacy.dp_views=11"),
    "none": ("images", 0, "dp_views >= 1"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "views", "message"), REFUSED.values(), ids=REFUSED)
def test_other_views_are_refused_by_name(tmp_path, monkeypatch, kind, views, message):
    monkeypatch.chdir(tmp_path)
    path = write_job(tmp_path, kind)
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        read_job(path, ["--dp_views", str(views)])
