"""Files that are replaced at once. Folders that are removed: tests/checkpoint/test_folder.py."""

import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dpfunc import lora
from dpfunc._utils.files import replace_file
from dpfunc.rng import insecure_key

ADAPTER = lora.attach(nn.Sequential(nn.Linear(4, 8)), insecure_key(0), targets=["0"], rank=2, alpha=6)


def text(path, value):
    replace_file(path, str(value))


def adapter(path, value):
    lora.save_adapter(path, ADAPTER, {name: torch.full_like(p, value) for name, p in ADAPTER.params.items()})


WRITERS = {  # write a number, read it
    "text": (text, lambda path: float(path.read_text())),
    "adapter": (adapter, lambda path: load_file(path)["0.lora_B"].unique().item()),
}


def second_one(monkeypatch, during):
    """Have something done before a file takes its place: its writer is then in the midst of it."""

    def replace(new, path, real=os.replace):
        monkeypatch.setattr(os, "replace", real)
        during()
        real(new, path)

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize(("write", "read"), WRITERS.values(), ids=WRITERS)
def test_of_two_writers_at_one_moment_each_has_a_whole_file(tmp_path, monkeypatch, write, read):
    """Both wrote into one file beside it, which had the place of the first one's before the second had ended."""
    path = tmp_path / "file"
    second_one(monkeypatch, lambda: write(path, 2))
    write(path, 1)
    assert read(path) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("write", "read"), WRITERS.values(), ids=WRITERS)
def test_a_writer_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch, write, read):
    path = tmp_path / "file"
    write(path, 1)

    def full():
        raise OSError("no space left on device")

    second_one(monkeypatch, full)
    with pytest.raises(OSError, match="no space left"):
        write(path, 2)
    assert read(path) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
