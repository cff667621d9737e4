"""Recipes in the Trainer: what they decide, what they refuse, and the warnings of runs that cannot learn."""

from __future__ import annotations

import logging
import math
import re

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BartConfig, BartForSequenceClassification, BertConfig

from dpfunc.clipping import Flat
from dpfunc.errors import InvalidArgument
from dpfunc.hf.pooled import MeanPooledClassifier
from dpfunc.hf.trainer import _recipes as recipes
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.recipes import recipe
from tests._support.trainer_cases import classifier, labelled, stop, training_arguments

N = 400
DATA = labelled(N)
BUDGET = {"dp_epsilon": 8.0, "dp_delta": 1e-3}
FACTS = {"dataset_size": N, "epsilon": 8.0, "delta": 1e-3}
FREE = {  # nothing that a recipe decides
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "learning_rate": 5e-5,
}  # fmt: skip


def head_only(seed=0):
    model = classifier(seed)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("classifier"))
    return model


def adapted(seed=0):
    return get_peft_model(classifier(seed), LoraConfig(task_type="SEQ_CLS", r=2))


MODELS = {"head": head_only, "lora": adapted, "pretrained": classifier}


@pytest.fixture
def warned(caplog):
    """Warnings with these words since the last look."""
    caplog.set_level(logging.WARNING)

    def look(words):
        found = [record.message for record in caplog.records if words in record.message]
        caplog.clear()
        return found

    return look


def trainer(folder, model, *, changes=None, data=DATA, callbacks=None, optimizer_cls_and_kwargs=None, **privacy):
    arguments = training_arguments(folder, **{**FREE, **(changes or {})})
    privacy = PrivacyArguments(**{**BUDGET, **privacy})
    return DPTrainer(
        model, arguments, privacy=privacy, train_dataset=data, callbacks=callbacks,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("strategy", MODELS)
def test_a_recipe_decides_plan_and_optimizer(tmp_path, strategy):
    found = trainer(tmp_path, MODELS[strategy](), dp_recipe=strategy)
    wanted = found.recipe
    assert found.plan == wanted.plan()
    assert (found.args.max_steps, found.args.lr_scheduler_type) == (wanted.num_steps, "linear")
    found.create_optimizer_and_scheduler(wanted.num_steps)
    rates = {id(p): group["lr"] for group in found.optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in found.model.named_parameters() if p.requires_grad}
    assert set(rates) == {id(p) for p in trained.values()}
    for name, p in trained.items():
        apart = strategy == "lora" and "lora_" not in name
        assert rates[id(p)] == pytest.approx(wanted.head_rate if apart else wanted.learning_rate), name


def test_what_was_given_is_kept_or_refused(tmp_path):
    """No value is replaced in silence; those of the recipe may be given; the twin has its steps and batches."""
    model = head_only()
    found = trainer(tmp_path, model, dp_recipe="head", dp_enabled=False)
    assert found.args.max_steps == found.recipe.num_steps
    assert found.args.per_device_train_batch_size * found.args.gradient_accumulation_steps == 256  # 4 x 64 for 200
    assert found.recipe.expected_batch_size == 200
    given = {**found.recipe.training_arguments(), "num_train_epochs": 3.0}
    assert trainer(tmp_path, model, changes=given, dp_recipe="head").recipe == found.recipe
    for name, value in (
        ("learning_rate", 1e-4), ("max_steps", 10), ("num_train_epochs", 5.0), ("per_device_train_batch_size", 16),
        ("gradient_accumulation_steps", 2), ("optim", "sgd"), ("weight_decay", 0.1), ("warmup_steps", 3),
        ("lr_scheduler_type", "cosine"), ("lr_scheduler_kwargs", {"last_epoch": -1}), ("adam_beta1", 0.5),
        ("adam_beta2", 0.9), ("adam_epsilon", 1e-3), ("optim_args", "betas=0.5"), ("optim_target_modules", ["q_lin"]),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=rf"Expected {name} to be left out with dp_recipe"):
            trainer(tmp_path, model, changes={name: value}, dp_recipe="head")
    for given in ({}, {"dp_clip": "automatic"}, {"dp_max_grad_norm": 0.3}, {"dp_dataset_size": 900}):
        made = trainer(tmp_path, model, dp_recipe="head", **given)
        ruled = given.keys() & {"dp_clip", "dp_max_grad_norm"}
        assert made.plan.clip == (PrivacyArguments(**BUDGET, **given).clip() if ruled else made.recipe.clip)
        assert isinstance(made.recipe.clip, Flat)
        assert made.recipe.dataset_size == given.get("dp_dataset_size", N)
    for missing in ("dp_epsilon", "dp_delta"):
        with pytest.raises(InvalidArgument, match="Expected dp_epsilon and dp_delta with dp_recipe"):
            PrivacyArguments(**{**BUDGET, missing: None}, dp_recipe="head", dp_enabled=False)
    with pytest.raises(InvalidArgument, match="Expected optimizer_cls_and_kwargs=None with dp_recipe"):
        trainer(tmp_path, model, dp_recipe="head", optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}))
    with pytest.raises(InvalidArgument, match="Expected one linear layer to be trained with the recipe 'head'"):
        trainer(tmp_path, classifier(), dp_recipe="head")


def test_the_length_of_features_is_measured_without_data(tmp_path):
    model = head_only()
    found = recipes.model_recipe("head", model, **FACTS)
    model.eval()
    ids = torch.randint(50, (200, 14), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        pooled = model.bert(input_ids=ids).pooler_output
    length = math.sqrt(1 + float(pooled.square().sum(1).mean()))
    wanted = recipe("head", num_parameters=34, num_classes=2, feature_norm=length, **FACTS)
    assert found.learning_rate == pytest.approx(wanted.learning_rate, rel=0.05)
    state = torch.get_rng_state()
    assert recipes.model_recipe("head", model, **FACTS) == found
    assert torch.equal(torch.get_rng_state(), state)


# Warnings


@pytest.mark.parametrize("strategy", ["head", "lora"])
def test_a_rate_that_leads_nowhere_is_warned_of_with_one_that_helps(tmp_path, warned, strategy):
    trainer(tmp_path / "a", MODELS[strategy](), changes={"max_steps": 2}).train()
    (said,) = warned("hardly leave its start")
    rate, steps = re.search(r"Set learning_rate=(\S+) and max_steps=(\d+)", said).groups()
    changes = {"max_steps": int(steps), "learning_rate": float(rate)}
    trainer(tmp_path / "b", MODELS[strategy](), callbacks=[stop()], changes=changes).train()
    assert not warned("hardly leave its start")


def test_noise_that_hides_everything_is_warned_of(tmp_path, warned):
    trainer(tmp_path, head_only(), callbacks=[stop()], dp_recipe="head", dp_epsilon=0.05, dp_delta=1e-4).train()
    (said,) = warned("noise_to_signal")
    assert re.search(r"[Hh]ave \d+ records", said)


def test_an_optimizer_of_other_parameters_is_refused_before_anything_is_spent(tmp_path):
    optimizer = torch.optim.Adam(classifier(1).parameters(), lr=1e-2)
    args = training_arguments(tmp_path, **FREE)
    run = DPTrainer(
        classifier(), args, privacy=PrivacyArguments(**BUDGET), train_dataset=DATA, optimizers=(optimizer, None)
    )
    with pytest.raises(InvalidArgument, match="would cost noise and never change"):
        run.train()
    assert run.ledger.num_steps == 0
    assert not (tmp_path / "privacy_journal.jsonl").exists()


class OfTheHead(DPTrainer):
    """A Trainer whose own optimizer has a part of the parameters."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.classifier.parameters(), lr=0.1)
        return self.optimizer


@pytest.mark.parametrize("begin", ["rehearse", "train"])
def test_an_optimizer_that_a_subclass_makes_has_all_parameters(tmp_path, begin):
    args, privacy = training_arguments(tmp_path, **FREE), PrivacyArguments(**BUDGET)
    run = OfTheHead(classifier(), args, privacy=privacy, train_dataset=DATA)
    with pytest.raises(InvalidArgument, match="would cost noise and never change"):
        getattr(run, begin)()
    assert run.ledger.num_steps == 0
    OfTheHead(head_only(), args, privacy=privacy, train_dataset=DATA).rehearse()


@pytest.mark.parametrize(("privacy", "data"), [(BUDGET, DATA), ({"dp_enabled": False}, None)], ids=["private", "twin"])
def test_predictions_of_one_class_are_warned_of_once(tmp_path, warned, privacy, data):
    model = classifier()
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([0.0, 100.0]))
    run = DPTrainer(
        model, training_arguments(tmp_path, **FREE), privacy=PrivacyArguments(**privacy), train_dataset=data,
        eval_dataset=DATA[:40], compute_metrics=lambda prediction: {},
    )  # fmt: skip
    run.evaluate()
    run.evaluate()
    assert len(warned("All 40 predictions are class 1")) == 1
    for logits, labels in (
        ([[0.0, 1.0], [1.0, 0.0]], [0, 1]),  # two classes
        ([[0.0, 1.0], [0.0, 1.0]], [1, 1]),  # as the records are
        ([[0.0], [1.0]], [0, 1]),  # regression
        ([[0.0, 1.0], [0.0, 1.0]], [[0, 1], [0, 1]]),  # several labels
    ):
        assert recipes.one_class(np.array(logits), np.array(labels)) is None


def test_labels_of_one_class_are_warned_of_before_training(tmp_path, warned):
    """In a rehearsal; a run prints nothing that its records decide."""
    for name, data in {"one": [{**record, "labels": 1} for record in DATA], "two": DATA}.items():
        run = DPTrainer(
            classifier(), training_arguments(tmp_path / name, **FREE), privacy=PrivacyArguments(**BUDGET),
            train_dataset=data,
        )  # fmt: skip
        run._prepare(None)
        assert not warned("All labels")
        run.rehearse()
        assert len(warned("All labels that were read of train_dataset are one class")) == (name == "one")
        assert run.ledger.num_steps == 0


def test_a_model_that_needs_more_than_tokens_has_a_recipe(tmp_path):
    """BART wants an end token in each text; the norm of its features is then taken as that behind a layer norm."""
    config = BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=16, num_labels=2,
        eos_token_id=60,
    )  # fmt: skip
    model = BartForSequenceClassification(config)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("classification_head.out_proj"))
    wanted = recipe("head", num_parameters=34, num_classes=2, feature_norm=17**0.5, **FACTS)
    assert recipes.model_recipe("head", model, **FACTS) == wanted
    assert model.training


def test_a_head_of_unit_rows_needs_no_measurement():
    config = BertConfig(vocab_size=50, num_labels=2, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                        num_attention_heads=2)  # fmt: skip
    model = MeanPooledClassifier(config)
    model.backbone.requires_grad_(False)
    wanted = recipe("head", num_parameters=34, num_classes=2, **FACTS)
    for measure in (True, False):
        assert recipes.model_recipe("head", model, **FACTS, measure=measure) == wanted
