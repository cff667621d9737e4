"""The guide to the Trainer: both of its scripts run, and the second is the first with its diffs applied."""

from __future__ import annotations

import csv
import json
import math
from functools import partial

import pages
import pytest
import torch
from launcher import works
from tiny_models import word_tokenizer

# The Trainer's own loaders ask for pinned memory on a machine without an accelerator.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")

blocks = partial(pages.blocks, "guides/trainer.md")


def patched(script):
    for diff in blocks("diff"):
        before = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " -")
        after = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " +")
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a tiny model under the guide's name, and two tables."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    words = ["[PAD]", "[UNK]", "cheap", "offer", "win", "lunch", "with", "you", "tomorrow", "now"]
    model = tmp_path / "distilbert" / "distilbert-base-uncased"
    word_tokenizer(words, "[UNK]", pad_token="[PAD]").save_pretrained(model)
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=len(words), dim=8, n_layers=1, n_heads=2, hidden_dim=16)
    DistilBertForSequenceClassification(config).save_pretrained(model)
    for name, size in (("train.csv", 300), ("public.csv", 20)):
        with open(tmp_path / name, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows([("cheap offer now", 1) if i % 2 else ("lunch with you", 0) for i in range(size)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def execute(script):
    return pages.run(script.replace("num_train_epochs=10", "num_train_epochs=1"))


def test_the_ordinary_script_of_the_guide_runs(place):
    trainer = execute(blocks()[0])["trainer"]
    assert trainer.state.global_step == 2
    assert (place / "model" / "model.safetensors").exists()


def test_the_ordinary_script_becomes_private_by_the_diff(place):
    names = execute(patched(blocks()[0]))
    trainer = names["trainer"]
    assert type(trainer).__name__ == "DPTrainer"
    assert trainer.plan.sampler.expected_batch_size(0) == 256
    record = json.loads((place / "run" / "privacy_accounting.json").read_text())
    assert 7.9 < record["epsilon"] <= 8.0
    assert record["global_step"] == 2
    assert (place / "model" / "model.safetensors").exists()
    assert all(math.isfinite(logs["eval_loss"]) for logs in trainer.state.log_history if "eval_loss" in logs)
    pages.run(next(block for block in blocks() if "callbacks=True" in block), trainer=trainer)


def test_the_script_over_people_runs(place):
    script, people = blocks()[0], next(block for block in blocks() if "CollatePersons" in block)
    setup = script.split("\nargs = ")[0]
    names = pages.run(setup + people, authors=[f"p{i % 97}" for i in range(300)])
    trainer = names["trainer"]
    assert trainer.plan.sampler.dataset_size == 97
    trainer.train()
    record = json.loads((place / "run-people" / "privacy_accounting.json").read_text())
    assert (record["unit"], record["dataset_size"]) == ("one person: all texts of one author", 97)
    assert record["expected_batch_size"] == pytest.approx(24)


@pytest.mark.slow
def test_the_private_script_runs_on_two_processes(place):
    """Also with a head that each process drew differently: all begin with that of the first one."""
    [command] = [block.split() for block in blocks("sh") if "torchrun" in block]
    assert command == ["torchrun", "--nproc-per-node", "2", "train.py"]
    script = patched(blocks()[0]).replace("num_train_epochs=10", "num_train_epochs=1, use_cpu=True")
    (place / "train.py").write_text(script)
    output, _ = works("train.py", cwd=place)
    assert output.count("eval_loss") == 1
    assert "train_runtime" not in output
    record = json.loads((place / "run" / "privacy_accounting.json").read_text())
    assert (record["global_step"], record["expected_batch_size"]) == (2, 256)
    assert 7.9 < record["epsilon"] <= 8.0
    assert (place / "model" / "model.safetensors").exists()
