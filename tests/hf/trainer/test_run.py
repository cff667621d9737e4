"""What a run of the Trainer says about its plan and its budget; its twin without privacy; processes that are alone."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from trainer_cases import (
    NOISY,
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
from transformers import Trainer

from dpfunc.errors import InvalidArgument
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
