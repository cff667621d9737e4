"""The programs of docs/gallery.md, as new users write them: each runs, and what it claims is true of its result.

The seeds are here: the programs draw their keys from the operating system, so what is compared has room for the noise.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from tiny_models import write_model
from torch.nn import functional as F

FOLDER = Path(__file__).parent


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The names of a program after its last line, in an empty folder; it keeps to its budget."""

    def run(name, budget):
        monkeypatch.chdir(tmp_path)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            names = runpy.run_path(str(FOLDER / f"{name}.py"))
        assert 0.98 * budget < names["epsilon"] <= budget
        return names

    return run


def test_programs_have_at_most_forty_lines():
    programs = [path for path in FOLDER.glob("*.py") if path.name not in ("conftest.py", Path(__file__).name)]
    assert all(len(path.read_text().splitlines()) <= 40 for path in programs)
    assert all(f'run("{path.stem}", ' in Path(__file__).read_text() for path in programs)


def test_head(run):
    names = run("head", 3.0)
    assert names["accuracy"] > 0.8  # a constant has 0.2
    assert all(p.grad is None for p in names["encoder"].parameters())


def test_rare_class(run):
    """Probabilities better than the shares of the classes, and positives that are found."""
    names = run("rare_class", 3.0)
    y, logits = names["test_y"], names["logits"]
    share = y.double().mean()
    constant = -(share * share.log() + (1 - share) * (1 - share).log())
    assert 0.02 < share < 0.15
    assert F.cross_entropy(logits, y) < 0.75 * constant
    assert (logits.argmax(1)[y == 1] == 1).double().mean() > 0.25


def test_images(run):
    assert run("images", 8.0)["accuracy"] > 0.7  # a constant has 0.33


def test_users(run):
    names = run("users", 3.0)
    assert names["plan"].sampler.dataset_size == names["USERS"] < len(names["names"])
    assert names["people"].max_texts == 4
    assert names["people"].dropped > 0
    assert names["accuracy"] > 0.8  # a constant has 0.5


def test_language_model(run, tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "lines.txt").write_text("".join(f"my favourite number is {i % 3}\n" for i in range(1000)))
    names = run("language_model", 8.0)
    assert names["after"] < 0.96 * names["before"]  # what a random model with a frozen head can learn is little
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert all("lora_" in name for name in names["params"])
