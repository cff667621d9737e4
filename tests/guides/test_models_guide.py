"""The guide of models: its tables are those of the tests, each refusal has its test, and its code runs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pages
import torch
from image_text_models import FAMILIES
from task_models import MODELS, SoftmaxLoss, build, sentence_model, sentences

from dpfunc.hf.tasks import TASKS

TESTS = Path(__file__).parents[1]
GUIDE = (TESTS.parent / "docs" / "guides" / "models.md").read_text("utf-8")
HF = TESTS / "hf"
REFUSALS = {
    "packed rows": (HF / "test_tasks.py", "test_packed_rows_and_models_without_frames_are_refused"),
    "`SFTConfig(packing=True)`": (HF / "trainer" / "test_settings.py", "test_arguments_that_break_privacy_are_refused"),
    "losses with in-batch": (HF / "test_tasks.py", "test_losses_that_compare_records_are_refused"),
    "any other module": (HF / "test_tasks.py", "test_losses_that_compare_records_are_refused"),
    "images of all records": (
        HF / "vision_language" / "test_images.py", "test_images_in_one_tensor_for_all_samples_are_refused",
    ),
    "images of several sizes": (
        HF / "vision_language" / "test_images.py", "test_an_image_of_another_shape_is_refused",
    ),
    "PaliGemma": (HF / "test_tasks.py", "test_paligemma_needs_the_types_of_tokens"),
    "SpecAugment": (HF / "test_tasks.py", "test_random_masks_of_speech_are_refused_in_training_mode"),
    "CTC of a model": (HF / "test_tasks.py", "test_packed_rows_and_models_without_frames_are_refused"),
    "a task that": (HF / "test_tasks.py", "test_the_task_of_a_model"),
    "encoders as language": (HF / "test_tasks.py", "test_encoders_as_language_models_are_refused"),
    "answers that are classes": (HF / "test_tasks.py", "test_refused"),
    "reentrant": (HF / "test_models.py", "test_checkpointing_of_a_base_in_few_bits"),
}  # fmt: skip


def table(heading):
    """The rows of the table below a heading, as lists of cells."""
    part = GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_models_are_those_of_the_tests():
    rows = {name: (kind, task, engine) for name, kind, task, engine in table("Text, sound, images")}
    assert rows == {name: (entry.name, entry.task, entry.engine) for name, entry in MODELS.items()}


def test_the_tasks_are_those_of_the_code():
    assert {name for row in table("Tasks") for name in re.findall(r"`(\w+)`", row[0])} == set(TASKS)


def test_the_families_with_images_are_those_of_the_tests():
    assert {row[0] for row in table("Images in text")} == {*FAMILIES}


def test_the_numbers_are_those_of_the_committed_result():
    """Models whose loss is not their own are those that the page names."""
    result = json.loads((TESTS.parent / "benchmarks" / "results" / "own_losses.json").read_text("utf-8"))
    counts, rows = result["counts"], result["rows"]
    text = " ".join(GUIDE.split())
    assert f"the {len(rows)} small models" in text
    assert f"{counts['same']} have the loss of their own" in text
    assert f"{counts['refused']} are refused; and {counts['differs']} differ" in text
    assert set(counts) == {"same", "refused", "differs"}
    differ = [row["model"] for row in rows if row["result"] == "differs"]
    assert sum(name.endswith("ForCausalLM") for name in differ) == 10
    assert [name for name in differ if not name.endswith("ForCausalLM")] == ["ProphetNetForConditionalGeneration"]
    assert max(row["difference"] for row in rows if row["result"] == "same") < 1e-6


def test_each_refusal_has_its_test():
    refused = [row[0] for row in table("What is refused")]
    assert len(refused) == len(REFUSALS)
    for start, (file, name) in REFUSALS.items():
        assert sum(what.startswith(start) for what in refused) == 1, start
        functions = {node.name for node in ast.walk(ast.parse(file.read_text("utf-8"))) if hasattr(node, "name")}
        assert name in functions, f"{file} has no {name}"


def test_the_code_runs(capsys):
    model, texts = build("classes of a text")
    names = {
        "encoder": sentence_model(), "softmax_loss": SoftmaxLoss(sentence_model()), "pairs": sentences(),
        "scores": torch.rand(4), "classes": torch.tensor([0, 1, 2, 1]), "authors": ["ann", "bob", "ann", "cid"],
        "model": model, "texts": texts,
    }  # fmt: skip
    pages.run(*pages.blocks("guides/models.md"), **names)
    assert capsys.readouterr().out.split("\n")[:3] == ["torch.Size([4])", "torch.Size([4])", "torch.Size([3])"]
