"""Tasks: what the model is called with, which loss is taken, and what is refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from zoo import language as zoo
from zoo.parity import roughen

from dpfunc import clipped_grad, engines
from dpfunc.clipping import Flat
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize
from dpfunc.hf import losses
from dpfunc.hf._facts import facts_of
from dpfunc.hf.tasks import infer_task, make_loss_fn


def recorded(logits=None, **more):
    """A forward function that notes what it is called with."""
    calls = []

    def forward(params, **inputs):
        calls.append(inputs)
        return SimpleNamespace(logits=torch.zeros(2, 3, 4) if logits is None else logits, **more)

    return forward, calls


IDS = torch.tensor([[1, 2, 3], [3, 2, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LABELS = torch.tensor([[1, 2, 3], [3, 2, -100]])
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}


@pytest.mark.parametrize("task", ["causal_lm", "token_classification", "masked_lm"])
def test_T3_labels_stay_and_all_else_goes_to_the_model(task):
    """Museum 7: with labels the model would compute its own mean over the batch's tokens."""
    forward, calls = recorded()
    losses_B = make_loss_fn(forward, task)({}, {**BATCH, "token_type_ids": IDS})
    assert losses_B.shape == (2,)
    make_loss_fn(forward, task)({}, {**BATCH, "position_ids": IDS})  # T3: not needed, and passed on
    extra = [set(call) - {"input_ids", "attention_mask"} for call in calls]
    assert extra == [{"token_type_ids"}, {"position_ids"}]
    make_loss_fn(forward, "seq2seq")({}, {**BATCH, "decoder_input_ids": MASK})
    assert calls[-1]["decoder_input_ids"] is MASK  # given ones are taken


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [zoo.gpt2, zoo.opt, zoo.llama])
def test_T3_padding_of_the_batch_does_not_matter(make, side):
    """A sample's loss and norms are those of the sample cut to its own length: no collator makes position_ids."""
    torch.manual_seed(0)
    forward, params = functionalize(roughen(make()).eval())
    loss_fn, rows = make_loss_fn(forward, "causal_lm"), zoo.tokens(side)
    length = int(rows["attention_mask"][1].sum())
    cut = slice(-length, None) if side == "left" else slice(length)
    found, alone = (
        engines.loop()(loss_fn, params, each)
        for each in (rows, {name: value[1:2, cut] for name, value in rows.items()})
    )
    torch.testing.assert_close(found.losses_B[1:2], alone.losses_B, rtol=1e-4, atol=1e-5)
    largest = max(float(norm_B) for norm_B in alone.sq_norms().values())
    for name, norm_B in alone.sq_norms().items():
        torch.testing.assert_close(found.sq_norms()[name][1:2], norm_B, rtol=0.0, atol=1e-3 * largest)


def test_no_cache_where_the_model_could_keep_one():
    facts = {make: facts_of(functionalize(make())[0]).options for make in (zoo.gpt2, zoo.llama, zoo.bert, zoo.t5)}
    assert [dict(options) for options in facts.values()] == [{"use_cache": False}] * 2 + [{}] + [{"use_cache": False}]


def test_L7_vqa_needs_images():
    forward, calls = recorded()
    loss_fn = make_loss_fn(forward, "vqa")
    loss_fn({}, {**BATCH, "pixel_values": torch.zeros(2, 3, 8, 8)})
    assert "pixel_values" in calls[0]
    with pytest.raises(InvalidArgument, match="pixel_values"):
        loss_fn({}, BATCH)


def test_answers_do_not_depend_on_padding():
    """A longer row in the batch neither adds positions to choose from nor makes an answer one that was cut off."""
    start_BT, end_BT = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0))
    found = []
    for length in (5, 9):
        batch = {
            "attention_mask": (torch.arange(length) < torch.tensor([[5], [4], [3]])).long(),
            "start_positions": torch.tensor([1, 3, 7]), "end_positions": torch.tensor([4, 6, -1]),
        }  # fmt: skip
        output = SimpleNamespace(start_logits=start_BT[:, :length], end_logits=end_BT[:, :length])
        found.append(make_loss_fn(lambda params, output=output, **inputs: output, "question_answering")({}, batch))
    torch.testing.assert_close(*found)
    assert found[0][2] == 0  # both are outside of its three tokens
    alone = losses.question_answering(start_BT[1:2, :4], end_BT[1:2, :4], torch.tensor([3]), torch.tensor([6]))
    torch.testing.assert_close(found[1][1:2], alone)
    forward, calls = recorded(start_logits=start_BT, end_logits=end_BT)
    first, last, ids = torch.tensor([0, 1, 2]), torch.tensor([2, 2, 3]), torch.ones(3, 9)
    expected = losses.question_answering(start_BT, end_BT, first, last)
    loss_fn = make_loss_fn(forward, "question_answering")
    assert torch.equal(loss_fn({}, {"input_ids": ids, "start_positions": first, "end_positions": last}), expected)
    assert torch.equal(loss_fn({}, {"input_ids": ids, "labels": torch.stack((first, last), 1)}), expected)
    assert all(set(call) == {"input_ids"} for call in calls)


def test_the_task_of_a_model():
    """Of a class of the user's own it is that of the class below it; some classes do not tell."""
    for make, task in (
        (zoo.gpt2, "causal_lm"),
        (zoo.qwen2, "causal_lm"),
        (zoo.vit, "image_classification"),
        (zoo.llava, "vqa"),
    ):
        model = make()
        assert infer_task(model) == infer_task(type("MyModel", (type(model),), {})(model.config)) == task
    for model in (nn.Linear(1, 1), zoo.clip()):
        with pytest.raises(UnsupportedModel, match="Name the task"):
            infer_task(model)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: make_loss_fn(recorded()[0], "causal_ml"), "'causal_lm'.*task='causal_ml'"),
        (lambda: make_loss_fn(recorded()[0], 3), "expected task|Expected task"),
        (lambda: make_loss_fn(3, "causal_lm"), "Expected forward"),
        (lambda: make_loss_fn(recorded()[0], "seq2seq")({}, BATCH), "decoder_input_ids"),
        (lambda: make_loss_fn(recorded()[0], "causal_lm")({}, {"input_ids": IDS}), "batch with 'labels'"),
        (lambda: make_loss_fn(recorded()[0], "causal_lm")({}, IDS), "batch with 'labels'"),
        (lambda: make_loss_fn(recorded()[0], "causal_lm")({}, {"labels": IDS}), "inputs of the model beside 'labels'"),
        (lambda: make_loss_fn(lambda params, **inputs: SimpleNamespace(), "causal_lm")({}, BATCH), ".logits"),
        (lambda: make_loss_fn(recorded(torch.zeros(2, 4, 4))[0], "causal_lm")({}, BATCH), "that fit"),
    ],
)
def test_refused(call, said):
    with pytest.raises(InvalidArgument, match=said):
        call()


def test_museum_7_the_loss_of_the_model_itself_is_that_of_each_row():
    """Transformers' loss is a mean over the batch's tokens: an engine calls it with one row, as the loop does."""
    torch.manual_seed(0)  # the weights are drawn: the same ones in whatever order tests run
    model = zoo.gpt2().eval()
    forward, params = functionalize(model)

    def own_loss(params, batch):
        output = forward(params, **batch)
        return output.loss.expand(len(batch["labels"]))

    batch = {name: torch.cat((value, value)) for name, value in BATCH.items()}
    found, expected = engines.auto()(own_loss, params, batch), engines.loop()(own_loss, params, batch)
    torch.testing.assert_close(found.losses_B, expected.losses_B)
    for name, norms_B in expected.sq_norms().items():
        torch.testing.assert_close(found.sq_norms()[name], norms_B, rtol=1e-3, atol=1e-6)
    engine, loss_fn = engines.auto(), make_loss_fn(forward, "causal_lm")
    together = engine(loss_fn, params, batch).sq_norms()["transformer.wte.weight"]
    alone = engine(loss_fn, params, {name: value[:1] for name, value in batch.items()}).sq_norms()
    torch.testing.assert_close(together[:1], alone["transformer.wte.weight"], rtol=1e-3, atol=1e-5)


OF_TABLES = [
    (zoo.gpt2, "causal_lm", "too large", "auto"), (zoo.gpt2, "causal_lm", "too long", "loop"),
    (zoo.bert, "sequence_classification", "negative", "loop"), (zoo.bert, "sequence_classification", "too long", "auto"),
    (zoo.llama, "causal_lm", "too large", "loop"), (zoo.llama, "causal_lm", "negative", "auto"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "task", "fault", "engine"), OF_TABLES)
def test_token_ids_and_rows_that_do_not_fit_the_tables_are_named(make, task, fault, engine):
    model, computed = make(), make is zoo.llama  # its positions are in no table
    forward, params = functionalize(model)
    tables, longest = facts_of(forward).tables, model.config.max_position_embeddings
    assert (tables.tokens, tables.positions) == (model.config.vocab_size, None if computed else longest)
    ids = torch.ones(3, longest + 1 if fault == "too long" else 4, dtype=torch.long)
    if fault != "too long":
        ids[1, 2] = tables.tokens if fault == "too large" else -1
    labels = ids.new_ones(3) if task == "sequence_classification" else torch.ones_like(ids)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    limits = f"0 <= id < {tables.tokens}" + ("" if computed else f" and rows of at most {longest} tok")
    with pytest.raises(InvalidArgument, match=limits) as caught:
        clipped_grad(make_loss_fn(forward, task), params, batch, Flat(1.0), engine=getattr(engines, engine)())
    assert ("truncation=True" in str(caught.value)) == (not computed)
    with pytest.raises(RuntimeError, match="tensor a"):  # other errors of a model are its own
        make_loss_fn(lambda params, **inputs: torch.ones(2) + torch.ones(3), "causal_lm")({}, BATCH)
