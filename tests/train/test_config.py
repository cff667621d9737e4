"""Jobs: every key by name and type, flags over the file, and nothing that is swallowed."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import importlib.util
from typing import get_args

import pytest
import torch
import transformers
from peft import TaskType
from transformers import HfArgumentParser, SchedulerType, get_scheduler

from dpfunc.accounting.record import SCORES
from dpfunc.errors import InvalidArgument
from dpfunc.hf import PrivacyArguments
from dpfunc.hf.tasks import TASKS as LOSSES
from dpfunc.train.config import (
    CLASSIFIES,
    FEATURES,
    LANGUAGE,
    NEW_HEAD,
    PAIRS,
    SECTIONS,
    TASKS,
    Scheduler,
    Task,
    job_from_dict,
    job_to_dict,
)

VALUES = {
    "task": "causal_lm",
    "output_dir": "runs/one",
    "model": {"path": "tiny"},
    "data": {"train": "mails.jsonl"},
    "privacy": {"dp_epsilon": 8, "dp_delta": 1e-5, "dp_max_grad_norm": 1.0},
    "training": {"learning_rate": 1e-3, "batch_size": 256, "epochs": 3},
}


SCHEDULERS = get_args(Scheduler)


def changed(section, key, value):
    values = copy.deepcopy(VALUES)
    if section:
        values.setdefault(section, {})[key] = value
    else:
        values[key] = value
    return values


MISSPELT = {  # section, name -> what is suggested
    ("privacy", "dp_epsilom"): "dp_epsilon",
    ("privacy", "max_grad_norm"): "dp_max_grad_norm",
    ("data", "max_lenght"): "max_length",
    ("model", "pth"): "path",
    ("", "privcy"): "privacy",
}


@pytest.mark.parametrize("place", MISSPELT, ids=".".join)
def test_misspelt_names_are_refused(place):
    """Museum: a misspelt privacy argument is swallowed, and the default is used."""
    with pytest.raises(InvalidArgument, match=rf"got '{place[1]}'\. Did you mean '\w*{MISSPELT[place]}'\?"):
        job_from_dict(changed(*place, 1.0))


BAD = {  # section, key, value, message
    "text for a number": ("privacy", "dp_epsilon", "eight", r"Expected a finite number, got privacy.dp_epsilon='eight'"),
    "true for a number": ("privacy", "dp_epsilon", True, r"got privacy.dp_epsilon=True"),
    "nan": ("privacy", "dp_delta", ".nan", r"got privacy.dp_delta='.nan'"),
    "infinity": ("privacy", "dp_epsilon", float("inf"), r"got privacy.dp_epsilon=inf"),
    "text for true": ("training", "bf16", "yes please", r"Expected true or false, got training.bf16='yes please'"),
    "a part for an integer": ("training", "batch_size", 25.5, r"Expected an integer, got training.batch_size=25.5"),
    "true for an integer": ("lora", "rank", True, r"Expected an integer, got lora.rank=True"),
    "a number for text": ("output_dir", None, 3, r"Expected text, got output_dir=3"),
    "no text": ("data", "train", "", r"Expected text, got data.train=''"),
    "a bare no": ("data", "labels", [True, False], r"Expected text, got data.labels.0=True. Put it in quotes: YAML reads yes"),
    "a text for a list": ("data", "labels", "ham", r"Expected a list, got data.labels='ham'"),
    "no texts in a list": ("data", "spent", [], r"Expected a list of texts, got data.spent of type list"),
    "a list for text": ("data", "train", ["secret"], r"Expected text, got data.train of type list"),
    "a section for a number": ("training", "batch_size", {"a": "secret"}, r"got training.batch_size of type dict"),
    "a long text for a number": ("training", "batch_size", "secret" * 99, r"got training.batch_size of type str"),
    "a number as text": ("training", "learning_rate", "1e-3", r"got training.learning_rate='1e-3'. A number has no quotes"),
    "one of few": ("model", "init", "new", r"Expected model.init to be one of 'pretrained' or 'random', got model.init='new'"),
    "a date": ("data", "train", datetime.date(2026, 1, 1), r"date is not JSON serializable. Put dates in quotes"),
    "very deep": ("data", "train", functools.reduce(lambda inner, _: [inner], range(500), "secret"), r"Expected"),
    "one label": ("data", "labels", ["ham"], r"at least two labels"),
    "a label twice": ("data", "labels", ["ham", "ham"], r"different labels"),
    "no delta": ("privacy", "dp_delta", None, r"Expected dp_delta to be given"),
    "two names of one thing": ("privacy", "target_epsilon", 9, r"dp_epsilon and target_epsilon, which contradict"),
    "unknown task": ("task", None, "translation", r"Expected task to be one of"),
    "another task's strategy": ("strategy", None, "head", r"Expected strategy to be one of 'lora', 'qlora', 'full', 'bitfit'"),
    "negative rate": ("training", "learning_rate", -1.0, r"0 < training.learning_rate < inf"),
    "no batch": ("training", "batch_size", 0, r"training.batch_size >= 1"),
    "steps and epochs": ("training", "steps", 10, r"one of training.steps and training.epochs, got both"),
    "dropout": ("lora", "dropout", 1.0, r"0 <= lora.dropout < 1"),
    "half a pair": ("data", "prompt_column", "q", r"prompt_column and data.response_column together"),
    "open brace": ("data", "prompt_template", "a {label", r"Expected columns in braces"),
    "code in braces": ("data", "prompt_template", "{a.__class__}", r"Expected plain column names in braces"),
}  # fmt: skip


@pytest.mark.parametrize(("section", "key", "value", "message"), BAD.values(), ids=BAD)
def test_bad_values_are_refused(section, key, value, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        job_from_dict(changed("", section, value) if key is None else changed(section, key, value))
    assert "secret" not in str(caught.value)


CONTRADICTIONS = {  # section -> values; top -> value; message
    "one physical batch size": {"privacy": {"dp_physical_batch_size": 4}, "training": {"physical_batch_size": 8}},
    "no section lora with strategy='full'": {"lora": {"rank": 4}, "strategy": "full"},
    "data.text_column with data.response_column": {
        "data": {"prompt_column": "p", "response_column": "r", "text_column": "t"},
    },
    "a prompt or a chat with data.loss_on": {"data": {"loss_on": "all"}},
    "data.eval_fraction or data.eval together with training.eval_steps": {"training": {"eval_steps": 3}},
    "no training.warmup_steps with a constant rate": {"training": {"warmup_steps": 3, "scheduler": "constant"}},
    "dp_telemetry together with dp_telemetry_share": {"privacy": {"dp_telemetry_share": 0.3}},
    "data.numbers together with this": {
        "task": "table_classification", "strategy": "head", "model": {"path": None},
        "data": {"labels": ["a", "b"], "categories": {"c": ["x"]}, "missing": "feature"},
    },
    "model.hidden with strategy full only": {
        "task": "image_classification", "strategy": "head", "model": {"hidden": 9}, "data": {"labels": ["a", "b"]},
    },
    "model.path together with model.local_files_only: false": {
        "task": "image_classification", "strategy": "head", "model": {"path": None, "local_files_only": False},
        "data": {"labels": ["a", "b"], "image_size": [8, 8]},
    },
    "data.prompt_template with task causal_lm or seq2seq or preference only": {
        "data": {"prompt_template": "{label}"}, "task": "text_classification",
    },
}  # fmt: skip


WORDS = {*TASKS} - {*FEATURES}
MODELS = {*TASKS} - {"table_classification"}  # tasks that can have a model
SPOKEN = WORDS - {"vqa"}
IMAGE, TABLE, VQA, PAIR = {"image_classification"}, {"table_classification"}, {"vqa"}, {"preference"}
ENCODER = {"model": {"path": "m"}, "data": {"image_size": None}}  # instead of scattered images
# Each key of a job: the tasks in which it has an effect, a value other than its default, and what it needs beside it.
# Those of the section privacy are about the step, whatever its task is; dp_views is refused but for images.
EFFECTS = {
    "model": {
        "path": (MODELS, "other", {"image_classification": ENCODER}), "init": (WORDS, "random"), "tokenizer": (WORDS, "t"),
        "new_tokens": (SPOKEN, ["a"]), "gguf_file": (WORDS, "g"), "pooling": (TASKS, "model"), "hidden": (FEATURES, 9),
        "local_files_only": (MODELS, False, {"image_classification": ENCODER}),
    },
    "data": {
        "train": (TASKS, "other"), "eval": (TASKS, "e"), "eval_fraction": (TASKS, 0.2), "spent": (TASKS, ["s"]),
        "budget": (TASKS, "b", {task: {"data": {"budget_run": "r"}} for task in TASKS}),
        "budget_run": (TASKS, "r", {task: {"data": {"budget": "b"}} for task in TASKS}),
        "budget_spender": (TASKS, "s", {task: {"data": {"budget": "b", "budget_run": "r"}} for task in TASKS}),
        "deduplicate": (TASKS, False), "max_length": (WORDS, 9),
        "unit_column": ({*TASKS} - IMAGE, "u", {task: {"data": {"max_records_per_unit": 2}} for task in TASKS}),
        "max_records_per_unit": ({*TASKS} - IMAGE, 2, {task: {"data": {"unit_column": "u"}} for task in TASKS}),
        "text_column": (SPOKEN - PAIR, "t"), "text_pair_column": (PAIRS, "t"), "label_column": ({*NEW_HEAD} - IMAGE, "c"),
        "labels": (CLASSIFIES, ["x", "y"]),
        "prompt_column": (LANGUAGE, "p", {
            "causal_lm": {"data": {"response_column": "r"}},
            "seq2seq": {"data": {"response_column": "r", "prompt_template": None}},
        }),
        "response_column": ({*LANGUAGE} - PAIR, "r", {
            task: {"data": {"prompt_column": "p", "prompt_template": None}} for task in LANGUAGE
        }),
        "prompt_template": (LANGUAGE, "{b} "),
        "loss_on": ({"causal_lm"}, "all", {"causal_lm": {"data": {"prompt_template": "{b} "}}}),
        "chat": ({"causal_lm", *VQA, *PAIR}, ["a", "b"]),
        "tools_column": ({"causal_lm", *PAIR}, "f", {task: {"data": {"chat": ["a", "b"]}} for task in TASKS}),
        "chosen_column": (PAIR, "c"), "rejected_column": (PAIR, "c"), "image_column": (VQA, "c"), "max_images": (VQA, 2),
        "image_size": (VQA | IMAGE, [12, 12]), "question_column": (VQA, "c"), "answer_column": (VQA, "c"),
        "numbers": (TABLE, {"n": [0, 2]}), "categories": (TABLE, {"c": ["x"]}), "missing": (TABLE, "feature"),
        "grey": (IMAGE, True),
    },
    "training": {
        "learning_rate": (TASKS, 0.1), "head_rate": ({*NEW_HEAD} - {*FEATURES}, 0.1), "batch_size": (TASKS, 9),
        "steps": (TASKS, 9), "epochs": (TASKS, 9), "physical_batch_size": (TASKS, 9), "optimizer": (TASKS, "sgd"),
        "weight_decay": (TASKS, 0.1), "scheduler": (TASKS, "cosine"), "warmup_steps": (TASKS, 9), "seed": (TASKS, 9),
        "eval_steps": (TASKS, 9, {task: {"data": {"eval_fraction": 0.2}} for task in TASKS}), "save_steps": (TASKS, 9),
        "keep_checkpoints": (TASKS, 9), "logging_steps": (TASKS, 9), "report_to": (TASKS, ["x"]), "bf16": (TASKS, True),
        "gradient_checkpointing": (WORDS, True), "cache_mib": (TASKS, 9),
    },
    "lora": {
        "rank": (WORDS, 9), "alpha": (WORDS, 9), "targets": (WORDS, ["q"]), "dropout": (SPOKEN, 0.1), "top_layers": (SPOKEN, 1),
        "rslora": (SPOKEN, True), "method": (SPOKEN, "ffa"), "modules_to_save": (SPOKEN, ["h"]),
    },
    "preference": {"loss": (PAIR, "ipo"), "beta": (PAIR, 0.2), "label_smoothing": (PAIR, 0.1)},
}  # fmt: skip


def refusal(task, *changes):
    """What is said of a small job of the task with these changes of its sections; nothing if it is taken."""
    values = {
        "task": task, "output_dir": "run", "strategy": "full" if task in FEATURES else "lora",
        "model": {"path": "m"} if task in WORDS else {}, "data": {"train": "t"}, "privacy": dict(VALUES["privacy"]),
    }  # fmt: skip
    more = {
        **{name: {"labels": ["a", "b"]} for name in CLASSIFIES}, "seq2seq": {"prompt_template": "{a}"},
        "table_classification": {"labels": ["a", "b"], "numbers": {"n": [0, 1]}},
        "image_classification": {"labels": ["a", "b"], "image_size": [8, 8]},
    }  # fmt: skip
    for change in ({"data": more.get(task, {})}, *changes):
        for section, keys in change.items():
            values[section] = {**values.get(section, {}), **keys}
    try:
        job_from_dict(values)
    except InvalidArgument as error:
        return str(error)
    return ""


@pytest.mark.parametrize("task", TASKS)
def test_a_key_is_taken_where_it_has_an_effect_and_nowhere_else(task):
    """What the user writes, and nothing reads, looks as if it had been done."""
    assert {name: {*keys} for name, keys in EFFECTS.items()} == {
        name: {key.name for key in dataclasses.fields(section)}
        for name, section in SECTIONS.items()
        if name != "privacy"
    }
    assert refusal(task) == ""
    wrong = []
    for section, keys in EFFECTS.items():
        for key, (tasks, value, *beside) in keys.items():
            needs = beside[0].get(task, {}) if beside else {}
            said = refusal(task, needs, {section: {key: value}})
            _, _, named = said.removesuffix(f" only, got task='{task}'.").partition(f"{section}.{key} with task ")
            if (said == "") != (task in tasks) or (named and {*named.split(" or ")} != {*tasks}):
                wrong.append(f"{section}.{key}: {said}")
    assert not wrong


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_between_sections_are_refused(message):
    new = {
        key: {**VALUES.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in CONTRADICTIONS[message].items()
    }
    with pytest.raises(InvalidArgument, match=message):
        job_from_dict({**VALUES, **new})


def test_types_are_those_of_the_source_whatever_parser_saw_the_arguments_before():
    """HfArgumentParser writes types without None into the fields of a dataclass, which pydantic reads."""
    HfArgumentParser([PrivacyArguments])
    again = importlib.util.module_from_spec(importlib.util.find_spec("dpfunc.train.config"))
    again.__spec__.loader.exec_module(again)  # as in a process that imports it then
    values = job_to_dict(job_from_dict(VALUES))
    assert values["privacy"]["dp_noise_multiplier"] is None
    assert again.job_to_dict(again.job_from_dict(values)) == values


def test_each_task_has_its_facts():
    assert tuple(TASKS) == get_args(Task)
    for facts in TASKS.values():
        assert facts.loss in ("", *LOSSES)
        assert facts.score in ("", *SCORES)
        assert not facts.model or hasattr(transformers, facts.model)
        assert facts.peft in ("", *TaskType)


@pytest.mark.parametrize("name", ["task", "output_dir", "model", "data", "privacy"])
def test_missing_sections_are_named(name):
    values = {key: value for key, value in VALUES.items() if key != name}
    with pytest.raises(InvalidArgument, match=rf"Expected {name}(\.path)? in the job"):
        job_from_dict(values)
    with pytest.raises(InvalidArgument, match=r"Expected data.train in the job. Table to train on"):
        job_from_dict({**VALUES, "data": {"max_length": 3}})


@pytest.mark.parametrize(
    ("epochs", "n", "batch", "steps"),
    [(3, 1000, 32, 94), (1, 64, 16, 4), (0.5, 100, 10, 5), (7, 100, 7, 100), (1.00000001, 30, 1, 31)],
)
def test_a_part_of_a_step_is_a_step_of_the_job(epochs, n, batch, steps):
    values = changed("training", "epochs", epochs)
    values["training"]["batch_size"] = batch
    assert job_from_dict(values).training.num_steps(n) == steps


@pytest.mark.parametrize("name", [str(each.value) for each in SchedulerType])
def test_no_schedule_follows_an_evaluation(name):
    """The rates of a job are a function of the step: held-out records, which epsilon does not cover, change none."""
    values = changed("training", "scheduler", name)
    if name not in SCHEDULERS:
        with pytest.raises(InvalidArgument, match="A rate that follows an evaluation would carry records"):
            job_from_dict(values)
        return
    assert job_from_dict(values).training.scheduler == name
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=4)
    for _ in range(4):
        optimizer.step()
        schedule.step()  # without the value of a metric
    assert 0 <= schedule.get_last_lr()[0] <= 1
