"""Labels that a model cannot learn, and models to which the padding of short rows matters, are refused before anything
is spent."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from trainer_cases import PRIVACY, classifier, labelled, language_model, pad, training_arguments
from transformers import FNetConfig, FNetForSequenceClassification, XGLMConfig, XGLMForCausalLM

from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.hf.tasks import TASKS, task_of
from dpfunc.hf.trainer._data import refuse_labels, refuse_padding, refuse_records
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.sampling import mean_over_views
from dpfunc.sampling.records import spread
from dpfunc.sampling.users import CollatePersons, mean_over_texts

CLASSES, NUMBERS, SHARES = "classes 0 <= label < 3, or -100", "finite numbers in 'label'", "3 numbers from 0 to 1"
ONE, TOKENS = "sequence_classification", "token_classification"


class Model(nn.Module):
    def __init__(self, outputs=3, problem=None, classes=None):
        super().__init__()
        self.config = SimpleNamespace(num_labels=classes or outputs, problem_type=problem)
        self.head = nn.Linear(2, outputs)


class ChoicesForMultipleChoice(Model):
    """Its outputs are the choices of a question."""


class ForMaskedLM(Model):
    """A model of words."""


class ForTokenClassification(Model):
    """A model of classes of words."""


class Lazy(Dataset):
    def __init__(self, labels):
        self.records = records(labels)

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]


class Columns(Lazy):
    """A data set of Hugging Face, as far as reading one column goes."""

    format: ClassVar = {"type": None}

    def select_columns(self, names):
        return [{name: record[name] for name in names} for record in self.records]


def records(labels, name="label"):
    return [{name: label} for label in labels]


def collate(rows):
    """Labels of tokens are padded; others are made a tensor."""
    labels = [row.get("label", row.get("labels")) for row in rows]
    if isinstance(labels[0], list):
        longest = max(map(len, labels))
        labels = [label + [-100] * (longest - len(label)) for label in labels]
    return {"labels": torch.tensor(labels)}


def mostly(good, bad, place=37):
    """The bad one is not among the few records that are collated."""
    return [bad if index == place else good for index in range(60)]


REFUSED = {
    "too large": (mostly(1, 3), Model(), ONE, CLASSES),
    "negative": (mostly(1, -1), Model(), ONE, CLASSES),
    "the first record": (mostly(1, 7, 0), Model(), ONE, CLASSES),
    "a tensor": (mostly(torch.tensor(1), torch.tensor(7)), Model(), ONE, CLASSES),
    "none": (mostly(1, None), Model(), ONE, CLASSES),
    "of a token": (mostly([0, -100], [0, 1, 3]), Model(), TOKENS, CLASSES),
    "half a class": (mostly(1, 0.5), Model(), ONE, CLASSES),
    "NaN": (mostly(0.5, math.nan), Model(1), ONE, NUMBERS),
    "infinite in float32": (mostly(0.5, 1e39), Model(1), ONE, NUMBERS),
    "of several outputs": (mostly([0.5, 9.0, 2.0], [0.5, 9.0, math.inf]), Model(3, "regression"), ONE, NUMBERS),
    "no probability": (mostly([0.0, 0.5, 1.0], [0.0, 0.5, 1.5]), Model(), ONE, SHARES),
    "a class as a float": (mostly(1.0, 2.0), Model(), ONE, SHARES),
    "a text": (["good", "bad"], Model(), ONE, "numbers in 'label' of each record of train_dataset, got a text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_labels_that_cannot_be_learnt_are_refused(name):
    labels, model, task, message = REFUSED[name]
    with pytest.raises(InvalidArgument, match=message) as error:
        refuse_labels(records(labels), collate, model, task)
    assert not any(str(secret) in str(error.value) for secret in ("7", "good", "1.5", "1e"))


PEOPLE, COLLATE_PEOPLE = mean_over_texts(TASKS[ONE]), CollatePersons(collate, 2)


def people(labels):
    """Of one text, and of two, of which the second one has the label."""
    return [records([1, label] if index % 2 else [label]) for index, label in enumerate(labels)]


@pytest.mark.parametrize("place", [36, 37])
def test_labels_of_people_are_read_one_by_one(place):
    """Each text of each person; those to evaluate on are single texts."""
    refuse_labels(people(mostly(1, 2, place)), COLLATE_PEOPLE, Model(), PEOPLE)
    refuse_labels(records(mostly(1, 2)), COLLATE_PEOPLE, Model(), PEOPLE)
    with pytest.raises(InvalidArgument, match=CLASSES):
        refuse_labels(people(mostly(1, 7, place)), COLLATE_PEOPLE, Model(), PEOPLE)
    with pytest.raises(InvalidArgument, match=CLASSES):
        refuse_labels(records(mostly(1, 7)), COLLATE_PEOPLE, Model(), PEOPLE)


def test_a_loss_has_the_name_of_its_task():
    """By which its labels are known: those of one function with two names by the model."""
    for loss in (TASKS[ONE], mean_over_views(TASKS[ONE])):
        with pytest.raises(InvalidArgument, match=CLASSES):
            refuse_labels(records(mostly(1, 7)), collate, Model(), loss)
    loss = mean_over_texts(TASKS["masked_lm"])
    assert [task_of(loss, kind(3)) for kind in (ForMaskedLM, ForTokenClassification)] == ["masked_lm", TOKENS]
    assert task_of(lambda forward, params, batch: batch["labels"], Model()) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([4, 40, 2], "0 <= id < 40 .*'input_ids' of each record of train_dataset"),
        ([39, 39, 39], "-100 for none, in 'labels' of each record of train_dataset"),
        ([], "a token or more in each record of train_dataset"),
    ],
)
def test_tokens_of_people_are_read_one_by_one(tmp_path, text, message):
    def one(texts):
        batch = pad(texts)
        batch["labels"][(batch["input_ids"] == 39).all(1)] = -1
        return batch

    data = [[{"input_ids": [3, 4, 5]}, {"input_ids": text if index == 37 else [6, 7]}] for index in range(60)]
    trainer = DPTrainer(
        language_model(), training_arguments(tmp_path), train_dataset=data, privacy=PRIVACY,
        data_collator=CollatePersons(one, 2), loss=mean_over_texts(TASKS["causal_lm"]),
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match=message):
        trainer.train()
    assert not (tmp_path / "privacy_journal.jsonl").exists()


PASS = {
    "classes": ([0, 2, -100], Model(), ONE), "tokens": ([[0], [2, -100, 1]], Model(), TOKENS),
    "numbers": ([0.0, -1e30], Model(1), ONE), "other task": ([7, 9], Model(3), "causal_lm"),
    "loss of one's own": ([7, 9], Model(3), lambda forward, params, batch: batch["labels"]),
    "choices": ([7, 9], ChoicesForMultipleChoice(3), ONE), "other layers": ([7, 9], Model(10, classes=3), ONE),
}  # fmt: skip


def test_labels_that_can_be_learnt_pass():
    for labels, model, task in PASS.values():
        refuse_labels(records(labels), collate, model, task)


def test_a_collator_that_numbers_the_labels_is_believed():
    """What the loss gets is checked, not a column of which it is made."""

    def numbered(rows):
        return {"labels": torch.tensor([ord(row["label"]) - ord("a") for row in rows])}

    refuse_labels(records("abc"), numbered, Model(), ONE)
    with pytest.raises(InvalidArgument, match="in 'labels' of each record"):
        refuse_labels(records("abz"), numbered, Model(), ONE)


def test_one_column_is_cheap_to_read_and_of_other_data_sets_some_records_are():
    between = next(index for index in range(3000) if index not in spread(3000, 1024))
    labels = [7 if index == between else 1 for index in range(3000)]
    refuse_labels(Lazy(labels), collate, Model(), ONE)
    with pytest.raises(InvalidArgument, match=CLASSES):
        refuse_labels(Columns(labels), collate, Model(), ONE)
    with pytest.raises(InvalidArgument, match=CLASSES):
        refuse_labels(Lazy(mostly(1, 7)), collate, Model(), ONE)


def test_the_trainer_refuses_before_it_spends(tmp_path):
    data = labelled()
    data[41]["labels"] = torch.tensor(2)
    trainer = DPTrainer(classifier(), training_arguments(tmp_path), train_dataset=data, privacy=PRIVACY)
    with pytest.raises(InvalidArgument, match="classes 0 <= label < 2.* Nothing was spent"):
        trainer.train()
    assert not (tmp_path / "privacy_journal.jsonl").exists()


# Padding


def texts(lengths):
    draw, of = torch.randint, torch.Generator().manual_seed(0)
    return [{"input_ids": draw(3, 40, (n,), generator=of), "labels": i % 2} for i, n in enumerate(lengths)]


def padded(records, side="right", words=False, length=0):
    """Rows of the longest record's length, or of a fixed one; the words themselves as labels, or one label each."""
    ids = [record["input_ids"] for record in records]
    rows = [*ids, torch.zeros(length, dtype=torch.long)]  # the last one only counts for the length

    def together(values, value):
        return pad_sequence([*values, *rows[len(ids) :]], True, value, side)[: len(ids)]

    labels = together(ids, -100) if words else torch.tensor([record["labels"] for record in records])
    mask = together([torch.ones_like(row) for row in ids], 0)
    return {"input_ids": together(ids, 1), "attention_mask": mask, "labels": labels}


def fnet():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
    config = FNetConfig(**sizes, max_position_embeddings=16, initializer_range=0.5, hidden_dropout_prob=0.1)
    return FNetForSequenceClassification(config)


def xglm():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 16, "num_layers": 1, "attention_heads": 2, "ffn_dim": 24}
    return XGLMForCausalLM(XGLMConfig(**sizes, max_position_embeddings=16, init_std=0.5))


MODELS = {
    "BERT": (classifier, {}, True), "FNet": (fnet, {}, False), "FNet, one length": (fnet, {"length": 10}, True),
    "GPT-2": (language_model, {"words": True}, True),
    "GPT-2, left": (language_model, {"words": True, "side": "left"}, True),
    "XGLM": (xglm, {"words": True}, True), "XGLM, left": (xglm, {"words": True, "side": "left"}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path, name):
    make, options, accepted = MODELS[name]
    model = make()
    trainer = DPTrainer(
        model, training_arguments(tmp_path, max_steps=1, remove_unused_columns=False), privacy=PRIVACY,
        train_dataset=texts((3, 4, 9, 5) * 15), data_collator=lambda records: padded(records, **options),
    )  # fmt: skip
    if accepted:
        trainer.train()
        assert trainer.ledger.num_steps == 1
        assert model.training
    else:
        with pytest.raises(UnsupportedModel, match="gradient of a short row to stay"):
            trainer.train()
        assert not (tmp_path / "privacy_journal.jsonl").exists()  # nothing was spent


class Mean(nn.Module):
    """With or without a mask. The loss is tiny where the gradient is not, so losses alone would tell too little."""

    def __init__(self, masked):
        super().__init__()
        self.masked, self.table = masked, nn.Embedding(50, 1)

    def forward(self, input_ids, attention_mask):
        share = attention_mask if self.masked else torch.ones_like(attention_mask)
        return (self.table(input_ids)[..., 0] * share).sum(1) / share.sum(1)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_compared(masked, dtype):
    model = Mean(masked).to(dtype)
    params = dict(model.named_parameters())

    def loss_fn(params, batch):
        inputs = (batch["input_ids"], batch["attention_mask"])
        return torch.func.functional_call(model, params, inputs).float() * 1e-4 * batch.get("weight", 1.0)

    def check(lengths=(3, 9), **column):
        def collate(records):
            return {**padded(records), **{name: make(records) for name, make in column.items()}}

        refuse_padding(loss_fn, params, model, texts(lengths), collate, dict)

    if masked:
        check()
        return
    with pytest.raises(UnsupportedModel, match="of Mean"):
        check()
    with pytest.raises(UnsupportedModel, match="of Mean"):  # the record of 3 has no gradient
        check((3, 4, 9, 9), weight=lambda records: torch.tensor([float(record["labels"]) for record in records]))
    check((9, 9))  # nothing is padded
    check(noise=lambda records: torch.rand(len(records)))  # nothing can be compared
    before = torch.get_rng_state()
    check(noise=lambda records: torch.rand(len(records) - 1).sum().expand(len(records)))
    assert torch.equal(torch.get_rng_state(), before)  # also where it draws for several records only


def test_of_records_with_pixels_few_are_collated():
    """A run began when a thousand pictures were processed; those that are read are of all parts of the data set."""
    seen = []

    def collate(records):
        seen.extend(records)
        ids = torch.tensor([[record["number"] in faulty and 40] for record in records])
        return {"input_ids": ids.long(), "pixel_values": torch.zeros(len(records), 2)}

    records, faulty = [{"number": number} for number in range(2000)], set()
    refuse_records(records, collate, language_model(), "causal_lm", "train_dataset")
    assert len(seen) <= 64 + 256
    for place in (10, 200):
        faulty = {spread(2000, 256)[place]}
        with pytest.raises(InvalidArgument, match="Expected token ids 0 <= id < 40"):
            refuse_records(records, collate, language_model(), "causal_lm", "train_dataset")
