"""A table of tasks and models: the default engine equals single samples, and a loss is the model's own for one row."""

from __future__ import annotations

import pytest
import torch
from models import Case
from task_models import MODELS, SoftmaxLoss, alone, build, loss_of, sentence_model, sentences
from torch import nn
from trainer_cases import PRIVACY, training_arguments
from zoo.parity import engine_that_equals_the_loop

from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import infer_task, make_loss_fn
from dpfunc.hf.trainer.trainer import DPTrainer


@pytest.mark.parametrize("name", MODELS)
def test_the_default_engine_equals_single_samples(name):
    assert infer_task(build(name)[0]) == MODELS[name].task
    assert engine_that_equals_the_loop(Case(*loss_of(name))) == MODELS[name].engine


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.own])
def test_a_loss_is_the_models_own_for_a_row_without_padding(name):
    """Transformers' loss of a batch of one: the same head, the same labels, nothing of other rows or of padding."""
    model, batch = build(name)
    forward, params = functionalize(model)
    with torch.no_grad():
        found = make_loss_fn(forward, infer_task(model))(params, batch)
        for row, loss in enumerate(found):
            torch.testing.assert_close(loss, model(**alone(name, batch, row)).loss, rtol=1e-4, atol=1e-5)


TRAINED = ("regression", "several labels", "multiple choice", "masked language model", "T5", "Whisper", "Wav2Vec2, CTC")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "regression" else pytest.mark.slow) for name in TRAINED]
)
def test_private_training(name, tmp_path):
    """Two steps of the Trainer change the parameters; the task is that of the class."""
    model, batch = build(name)
    before = [value.clone() for value in model.parameters()]
    data = [{key: value[row] for key, value in batch.items()} for row in range(4)] * 6
    trainer = DPTrainer(
        model, training_arguments(tmp_path, max_steps=2), privacy=PRIVACY, train_dataset=data,
        data_collator=lambda records: {key: torch.stack([each[key] for each in records]) for key in records[0]},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not torch.equal(*both) for both in zip(before, model.parameters(), strict=True))


def test_similarity_of_sentences():
    """Equal to the formula of CosineSimilarityLoss for each pair alone, whatever the padding."""
    model, scores = sentence_model(), torch.tensor([0.1, 0.9, 0.5, 0.3])
    forward, params = functionalize(model)
    case = Case(make_loss_fn(forward, "sentence_similarity"), params, {**sentences(), "label": scores})
    assert engine_that_equals_the_loop(case) == "one pass"
    losses = case.loss_fn(params, case.batch)
    for row in range(4):
        parts = []
        for column in ("premise", "hypothesis"):
            length = int(sentences()[f"{column}_attention_mask"][row].sum())
            inputs = {
                key: sentences()[f"{column}_{key}"][row : row + 1, :length] for key in ("input_ids", "attention_mask")
            }
            parts.append(model(inputs)["sentence_embedding"])
        expected = nn.functional.mse_loss(torch.cosine_similarity(*parts), scores[row : row + 1])
        torch.testing.assert_close(losses[row], expected, rtol=1e-4, atol=1e-5)


def test_classes_of_sentences():
    forward, params = functionalize(SoftmaxLoss(sentence_model()))
    case = Case(make_loss_fn(forward, "sentence_classes"), params, {**sentences(), "label": torch.tensor([0, 2, 1, 1])})
    assert engine_that_equals_the_loop(case) == "one pass"
    assert "classifier.weight" in params
    losses = case.loss_fn(params, case.batch)
    for row in range(4):
        features = [
            {key: sentences()[f"{column}_{key}"][row : row + 1] for key in ("input_ids", "attention_mask")}
            for column in ("premise", "hypothesis")
        ]
        torch.testing.assert_close(losses[row], forward.module(features, case.batch["label"][row : row + 1]))


SENTENCE = make_loss_fn(lambda params, sentence: sentence["input_ids"], "sentence_similarity")
ANSWERS = make_loss_fn(lambda params, **inputs: None, "question_answering")
REFUSED = [
    (SENTENCE, {"label": torch.zeros(4)}, "_input_ids"), (SENTENCE, sentences(), "one of label"),
    (SENTENCE, {"a_input_ids": torch.ones(4, 2), "label": torch.zeros(4)}, "two sentences"),
    (SENTENCE, {**sentences(), "label": torch.zeros(4), "score": torch.zeros(4)}, "one of label"),
    (SENTENCE, {**sentences(), "label": torch.zeros(4)}, "sentence_embedding"),
    (ANSWERS, {"input_ids": torch.ones(4, 8), "labels": torch.zeros(4, 3)}, r"labels \(4, 3\).*sequence_classification"),
]  # fmt: skip


def test_batches_that_do_not_fit_are_refused():
    for loss_fn, batch, message in REFUSED:
        with pytest.raises(InvalidArgument, match=message):
            loss_fn({}, batch)
    loss_fn, params, batch = loss_of("several labels")
    with pytest.raises(InvalidArgument, match=r"labels.float\(\)"):
        loss_fn(params, {**batch, "labels": batch["labels"].long()})


def test_losses_that_compare_records_are_refused(tmp_path):
    """And other modules, which give one value for a batch."""
    for name in ("MultipleNegativesRankingLoss", "BatchHardTripletLoss", "CoSENTLoss", "GISTEmbedLoss"):
        loss = type(name, (nn.Module,), {})()
        with pytest.raises(UnsupportedModel, match=f"{name} compares the records.*in-batch negatives"):
            make_loss_fn(lambda params, x: x, loss)
    with pytest.raises(UnsupportedModel, match="in-batch negatives"):
        DPTrainer(
            sentence_model(), training_arguments(tmp_path), privacy=PRIVACY, loss=loss, train_dataset=[{"x": 1}] * 60
        ).train()
    with pytest.raises(UnsupportedModel, match="CrossEntropyLoss, which gives one value for a batch"):
        make_loss_fn(lambda params, x: x, nn.CrossEntropyLoss())
