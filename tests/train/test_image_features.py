"""Images in folders: what is read, split by content, refused; and features of one image, from it alone."""

from __future__ import annotations

import shutil

import pytest
import torch
from feature_jobs import IMAGES, write_encoder, write_photos
from yaml import safe_load

from dpfunc.errors import InvalidArgument
from dpfunc.train._dataset import read_records
from dpfunc.train._feature_model import load_front
from dpfunc.train._image_features import ScatteringFeatures, image_files, load_encoder, read_images
from dpfunc.train._model import load_processing
from dpfunc.train.config import job_from_dict


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos") / "photos", 40)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def job(folder, model=None, **data):
    values = safe_load(IMAGES)
    values["data"] |= {"train": str(folder), **data}
    if model is not None:
        del values["data"]["image_size"]
        values["model"] = {"path": str(model)}
    return job_from_dict(values)


def read(one):
    return read_records(one, load_front(one, {}))


@pytest.mark.parametrize("grey", [False, True])
def test_an_image_is_encoded_alone(photos, grey):
    """In each group of three channels the mean is 0 and the variance at most 1, over the positions of this image."""
    front = ScatteringFeatures(12, 8, grey)
    found = front.encode(image_files(photos)[0])
    assert found.shape == (front.size,) == ((1 if grey else 3) * 81 * 6,)
    groups = found.reshape(-1, 18)
    torch.testing.assert_close(groups.mean(1), torch.zeros(len(groups)), atol=1e-4, rtol=0)
    spread = groups.var(1, correction=0)
    assert float(spread.max()) <= 1 + 1e-4
    assert float(spread[0]) > 0.99
    assert torch.equal(front.encode(image_files(photos)[0]), found)


def test_pooled_features_of_an_encoder(photos, encoder):
    front = load_encoder(str(encoder), {"local_files_only": True})
    one, other = (front.encode(path) for path in image_files(photos)[:2])
    assert one.shape == (front.size,) == (16,)
    assert float(one.mean()) == pytest.approx(0, abs=1e-5)
    assert not torch.equal(one, other)
    assert not front.model.training


@pytest.mark.parametrize("model", [False, True], ids=["scattering", "encoder"])
def test_one_image_more_changes_no_other_one(tmp_path, photos, encoder, model):
    more = shutil.copytree(photos, tmp_path / "more")
    extra = write_photos(tmp_path / "others", 2, seed=9)
    shutil.copy(image_files(extra / "bars")[0], more / "bars" / "0.png")  # the first of its class
    both = [read(job(folder, encoder if model else None)) for folder in (photos, more)]
    before, after = ([(r["features"].tolist(), r["labels"]) for r in (*each.train, *each.evaluation)] for each in both)
    for record in before:
        after.remove(record)
    assert len(after) == 1
    assert len(both[1].train) - len(both[0].train) in (0, 1)


def test_names_decide_nothing_and_copies_are_left_out(tmp_path, photos):
    renamed = shutil.copytree(photos, tmp_path / "renamed")
    for number, path in enumerate(image_files(renamed)):
        path.rename(path.with_name(f"x{number:03}{path.suffix}"))
    copied = shutil.copytree(photos, tmp_path / "copied")
    first = image_files(copied / "flat")[0]
    (copied / "flat" / "deep").mkdir()
    shutil.copy(first, copied / "flat" / "deep" / "a.PNG")
    found = [read(job(folder)) for folder in (photos, renamed, copied)]
    sets = [
        [{tuple(record["features"].tolist()) for record in part} for part in (each.train, each.evaluation)]
        for each in found
    ]
    assert sets[0] == sets[1] == sets[2]
    assert [each.duplicates for each in found] == [0, 0, 1]
    assert read_images(copied, ["flat", "bars"], "label", deduplicate=False).duplicates == 0


def broken(folder):
    path = image_files(folder / "flat")[0]
    path.write_bytes(path.read_bytes()[:60])


def other_class(folder):
    (folder / "dots").mkdir()


def one_class_less(folder):
    shutil.rmtree(folder / "bars")


def nothing(folder):
    for path in image_files(folder):
        path.unlink()


def one_class_alone(folder):
    for path in image_files(folder / "bars"):
        path.unlink()


BAD = {
    "damaged": (broken, r"The image of row 1 of photos cannot be used. Expected an image that can be read"),
    "another class": (other_class, r"each of data.labels \(flat, bars\), and no other, got .* with 1 others"),
    "a class less": (one_class_less, r"without bars, with 0 others. .* has an empty folder"),
    "no image": (nothing, r"Expected images \(.png, .jpg\) in the folders"),
    "one class alone": (one_class_alone, "got one class alone"),
}


@pytest.mark.parametrize("name", BAD)
def test_folders_that_are_not_those_of_the_job_are_refused(tmp_path, photos, name):
    change, message = BAD[name]
    folder = shutil.copytree(photos, tmp_path / "photos")
    change(folder)
    with pytest.raises(InvalidArgument, match=message):
        read(job(folder))


def test_a_folder_that_is_none_and_a_model_that_is_none(tmp_path, photos):
    with pytest.raises(InvalidArgument, match="Expected a folder with a folder for each of data.labels"):
        read(job(tmp_path / "nowhere"))
    with pytest.raises(InvalidArgument, match=r"got model.path='.*nowhere': there is no such folder here"):
        load_processing(job(photos, tmp_path / "nowhere"))


def test_features_that_do_not_fit_into_memory_are_refused(photos):
    values = safe_load(IMAGES)
    values["data"]["train"] = str(photos)
    values["training"]["cache_mib"] = 0
    with pytest.raises(InvalidArgument, match=r"at most training.cache_mib=0 MiB, got 40 records of 972 features"):
        read(job_from_dict(values))
