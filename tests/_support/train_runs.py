"""A finished run of `dpfunc train`, and what is looked at in the folders of runs."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from text_job import train, write_job

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
JOURNAL = "privacy_journal.jsonl"
MODES = pytest.mark.parametrize("mode", [[], ["--dry-run"]], ids=["train", "dry run"])


def files(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in Path(folder).rglob("*"))


def weights(folder):
    (path,) = Path(folder, "model").glob("*.safetensors")
    return load_file(path)


def same(one, two):
    one, two = weights(one), weights(two)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def record(folder):
    return json.loads(Path(folder, "privacy_accounting.json").read_text())


def trained(place, *flags):
    """What `dpfunc train` prints in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        result = train(*flags)
    assert result.exit_code == 0, result.output
    return result.stdout


@functools.cache
def _finished():
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place)
    write_job(place)
    return place, trained(place)


def finished_job(place):
    """A folder with a job and its finished run, which this process did once; and what that said."""
    source, said = _finished()
    shutil.copytree(source, place, dirs_exist_ok=True)
    return place, said
