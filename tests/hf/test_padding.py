"""A model to which the padding of short rows matters is refused before anything is spent."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from trainer_cases import PRIVACY, classifier, language_model, training_arguments
from transformers import FNetConfig, FNetForSequenceClassification, XGLMConfig, XGLMForCausalLM

from dpfunc.errors import UnsupportedModel
from dpfunc.hf._padding import refuse_padding
from dpfunc.hf.trainer.trainer import DPTrainer


def texts(lengths):
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(3, 40, (length,), generator=generator), "labels": i % 2}
        for i, length in enumerate(lengths)
    ]


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
