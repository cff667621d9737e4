"""What a run of the Trainer says about its plan and its budget; its twin without privacy; processes that are alone.

Telemetry: released statistics in the logs; and no number of records, and no times, anywhere.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re

import pytest
import torch
from torch import nn
from trainer_cases import (
    NOISY,
    Seen,
    at,
    classifier,
    labelled,
    language_model,
    pad,
    private,
    same,
    texts,
    trained,
    training_arguments,
)
from transformers import HfArgumentParser, Trainer
from transformers.utils import logging as transformers_logging

import dpfunc
from dpfunc.clipping import Statistic, Telemetry
from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.hf.trainer import _files as files
from dpfunc.hf.trainer._run import averaged, with_accuracy
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer

DATA = labelled()
TEXTS = texts()


def test_L12_warning_near_exhaustion_once(tmp_path, caplog):
    privacy = PrivacyArguments(dp_epsilon=8.0, dp_delta=1e-3, dp_max_grad_norm=1.0, dp_warn_at=0.8)
    trainer = private(classifier(), tmp_path, privacy=privacy)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    warned = [record.getMessage() for record in caplog.records if "Privacy budget" in record.getMessage()]
    first = next(step for step in range(1, 11) if trainer.plan.guarantee(step).epsilon > 0.8 * 8.0)
    assert len(warned) == 1
    assert f"after step {first}. {10 - first} steps are left" in warned[0]


def test_T15_twin_is_an_ordinary_trainer(tmp_path):
    """One label a sample: the mean over samples is the Trainer's own loss, with the same batches and dropout."""
    changes = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "max_steps": 4}
    twin = private(classifier(), tmp_path / "twin", privacy=PrivacyArguments(dp_enabled=False), changes=changes)
    output = twin.train()
    plain = Trainer(classifier(), training_arguments(tmp_path / "plain", **changes), train_dataset=DATA)
    plain.train()
    assert output.training_loss == pytest.approx(plain.state.log_history[-1]["train_loss"])
    ours = trained(twin.model)
    assert all(torch.allclose(ours[name], value, atol=1e-6) for name, value in trained(plain.model).items())
    assert not (tmp_path / "twin" / "privacy_journal.jsonl").exists()


def test_T15_twin_takes_the_mean_over_samples_over_accumulated_batches(tmp_path):
    model = language_model(dropout=0.0)
    changes = {"per_device_train_batch_size": 20, "max_steps": 1, "learning_rate": 1.0, "max_grad_norm": 0}
    twin = private(
        model, tmp_path, data=TEXTS, privacy=PrivacyArguments(dp_enabled=False), data_collator=pad,
        changes={**changes, "optim": "sgd"},
    )  # fmt: skip
    twin.train()
    by_hand = language_model(dropout=0.0)
    losses = [by_hand(**pad([record])).loss for record in TEXTS]  # 3 batches of 20: all records
    torch.stack(losses).mean().backward()
    ours = trained(model)
    for name, param in by_hand.named_parameters():
        assert torch.allclose(ours[name], param.detach() - param.grad, atol=1e-5), name


def test_T2_dry_run_trains_nothing(tmp_path, capsys):
    model = classifier()
    trainer = private(model, tmp_path, privacy=dataclasses.replace(NOISY, dp_dry_run=True))
    output = trainer.train()
    assert "10 steps, expected batch 12 of 60 records" in capsys.readouterr().out
    assert output.metrics["privacy/planned_epsilon"] == trainer.plan.guarantee().epsilon
    assert same(trained(model), trained(classifier()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("privacy", [NOISY, PrivacyArguments(dp_enabled=False)], ids=["private", "twin"])
def test_processes_that_do_not_know_each_other_are_refused(tmp_path, monkeypatch, privacy):
    """Each would be a run of its own, with its own noise."""
    arguments = training_arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match=r"Expected 2 processes, as WORLD_SIZE says, got 1.*use_cpu=True"):
        DPTrainer(classifier(), arguments, privacy=privacy, train_dataset=DATA)


# Telemetry

VALUES = {"dp_noise_multiplier": 1.0, "dp_delta": 1e-4, "dp_max_grad_norm": 1.0}
NUM_RECORDS = 97  # a private number, below a public bound


def test_statistics_and_no_side_facts(tmp_path, capsys, caplog):
    """One run, for all of it: released statistics are logged as such, as means over the steps since the line before."""
    seen, told = Seen(), []
    keep = at("on_step_end", lambda args, state, control: told.append(trainer._run.state.telemetry))
    names = ["loss:2", "accuracy", "clipped", "norm"]
    trainer = DPTrainer(
        classifier(), training_arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, disable_tqdm=False),
        privacy=PrivacyArguments(**VALUES, dp_telemetry=names, dp_dataset_size=120),
        train_dataset=labelled(NUM_RECORDS), callbacks=[seen, keep],
    )  # fmt: skip
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    output, printed = trainer.train(), capsys.readouterr()
    transformers_logging.set_verbosity(verbosity)
    assert len(told) == 4
    for line, steps in zip(seen.logs[:2], (told[:2], told[2:]), strict=True):
        for name in ("loss", "accuracy", "clipped"):
            assert line[f"released/{name}"] == pytest.approx(sum(step[name] for step in steps) / 2, rel=1e-5)
        assert {f"released/norm_{place}" for place in range(6)} < line.keys()
    assert trainer.plan.telemetry.share == 0.05
    logged = [each.getMessage() for each in caplog.records if each.name.startswith(("transformers", "dpfunc"))]
    text = printed.out + printed.err + "\n".join(logged)
    for file in (file for file in tmp_path.rglob("*") if file.is_file() and files.FOLDER not in file.parts):
        text += file.read_bytes().decode("latin-1") if file.suffix in (".json", ".jsonl", ".head") else ""
    assert "Num examples = 120" in text
    text = re.sub(r"\b[0-9a-f]{16,}\b", "", text)  # digests of random numbers, in which any number may stand
    assert not re.search(rf"(?<![\d.e-]){NUM_RECORDS}(?!\d)", text)
    text = re.sub(r"(Writing model shards|Loading weights)[^\n\r]*", "", text)  # bars over files and parameters
    assert not re.search(r"it/s|s/it|_runtime|per_second|\d\d:\d\d[,<\]]", text)
    assert "4/4" in printed.err
    assert not [name for name in output.metrics if "runtime" in name or "second" in name]
    assert "num_records=hidden" in repr(trainer._run.state)
    assert trainer._run.state.num_records == NUM_RECORDS


def test_accuracy_of_each_sample():
    forward, params = functionalize(nn.Linear(3, 4))
    telemetry = Telemetry((Statistic("accuracy", high=1.0),), 0.1)
    task = with_accuracy("sequence_classification", telemetry)
    assert with_accuracy("causal_lm", None) == "causal_lm"
    outputs = dataclasses.make_dataclass("Outputs", ["logits"])
    loss_fn = make_loss_fn(lambda p, x: outputs(forward(p, x)), task)
    batch = {"x": torch.randn(9, 3), "labels": torch.arange(9) % 4}
    _, unreleased = dpfunc.clipped_grad(loss_fn, params, batch, dpfunc.clipping.Flat(1.0))
    assert torch.equal(unreleased.aux["accuracy"], (forward(params, batch["x"]).argmax(1) == batch["labels"]).float())
    with pytest.raises(InvalidArgument, match="one class a sample for dp_telemetry='accuracy'"):
        loss_fn(params, {"x": torch.randn(2, 3), "labels": torch.zeros(2, 4)})


def test_arguments():
    flags = "--dp_noise_multiplier 1 --dp_delta 1e-4 --dp_max_grad_norm 2 --dp_telemetry loss:2 accuracy norm load:3"
    (parsed,) = HfArgumentParser(PrivacyArguments).parse_args_into_dataclasses(flags.split())
    telemetry = parsed.plan(1000, 10, 5).telemetry
    assert telemetry.statistics == (
        Statistic("loss", high=2.0), Statistic("accuracy", high=1.0), Statistic("norm", edges=(0.5, 1.0, 2.0, 4.0, 8.0)),
        Statistic("load", high=3.0),
    )  # fmt: skip
    for bad in ("loss:x", "load", "loss:-1", "loss:0"):
        with pytest.raises(InvalidArgument, match=r"NAME, or NAME:HIGHEST|public bound"):
            PrivacyArguments(**VALUES, dp_telemetry=[bad])
    with pytest.raises(InvalidArgument, match="0 < share < 1"):
        PrivacyArguments(**VALUES, dp_telemetry=["loss"], dp_telemetry_share=1.0)
    assert PrivacyArguments(**VALUES).telemetry() is None


def test_means_by_the_names_of_loggers():
    assert averaged([]) == averaged([None, None]) == {}
    found = averaged([{"loss": 1.0, "norm": [0.0, 1.0]}, {"loss": 2.0, "norm": [0.5, 0.5]}])
    assert found == {"released/loss": 1.5, "released/norm_0": 0.25, "released/norm_1": 0.75}
    assert all(math.isfinite(value) for value in found.values())
