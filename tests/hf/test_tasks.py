"""Tasks: what a model is called with, which loss is taken, and what is refused by name.

A table of tasks and models: the default engine equals single samples, and a loss is the model's own for one row. What a
loss must know of a model: adapters, speech, heads, kinds of tokens.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import Case
from task_models import (
    IGNORED,
    MODELS,
    SoftmaxLoss,
    alone,
    build,
    ignores_later_tokens,
    loss_of,
    sentence_model,
    sentences,
)
from torch import nn
from trainer_cases import PRIVACY, training_arguments
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    LEDConfig,
    LEDForConditionalGeneration,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
)
from zoo import language as zoo
from zoo.parity import engine_that_equals_the_loop, roughen

from benchmarks.survey.multimodal import in_text
from benchmarks.survey.tiny import built
from dpfunc import engines
from dpfunc.clipped import clipped_grad
from dpfunc.clipping import Flat
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize
from dpfunc.hf import losses
from dpfunc.hf._facts import facts_of, facts_of_model
from dpfunc.hf.tasks import infer_task, make_loss_fn
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.lora import attach
from dpfunc.rng import insecure_key


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
def test_labels_stay_and_all_else_goes_to_the_model(task):
    """With labels the model would compute its own mean over the batch's tokens."""
    forward, calls = recorded()
    losses_B = make_loss_fn(forward, task)({}, {**BATCH, "token_type_ids": IDS})
    assert losses_B.shape == (2,)
    make_loss_fn(forward, task)({}, {**BATCH, "position_ids": IDS})  # not needed, and passed on
    extra = [set(call) - {"input_ids", "attention_mask"} for call in calls]
    assert extra == [{"token_type_ids"}, {"position_ids"}]
    make_loss_fn(forward, "seq2seq")({}, {**BATCH, "decoder_input_ids": MASK})
    assert calls[-1]["decoder_input_ids"] is MASK  # given ones are taken


def peft_gpt2():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(zoo.gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [zoo.gpt2, zoo.opt, zoo.llama, peft_gpt2])
def test_padding_of_the_batch_does_not_matter(make, side):
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


def test_vqa_needs_images():
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


SENTENCE = make_loss_fn(lambda params, sentence: sentence["input_ids"], "sentence_similarity")
ANSWERS = make_loss_fn(lambda params, **inputs: None, "question_answering")
CAUSAL, SEQ2SEQ = (make_loss_fn(recorded()[0], task) for task in ("causal_lm", "seq2seq"))
REFUSED = [
    (make_loss_fn, (recorded()[0], "causal_ml"), "'causal_lm'.*task='causal_ml'"),
    (make_loss_fn, (recorded()[0], 3), "Expected task"), (make_loss_fn, (3, "causal_lm"), "Expected forward"),
    (SEQ2SEQ, ({}, BATCH), "decoder_input_ids"), (CAUSAL, ({}, {"input_ids": IDS}), "batch with 'labels'"),
    (CAUSAL, ({}, IDS), "batch with 'labels'"), (CAUSAL, ({}, {"labels": IDS}), "inputs of the model beside 'labels'"),
    (make_loss_fn(lambda params, **inputs: SimpleNamespace(), "causal_lm"), ({}, BATCH), ".logits"),
    (make_loss_fn(recorded(torch.zeros(2, 4, 4))[0], "causal_lm"), ({}, BATCH), "that fit"),
    (SENTENCE, ({}, {"label": torch.zeros(4)}), "_input_ids"), (SENTENCE, ({}, sentences()), "one of label"),
    (SENTENCE, ({}, {"a_input_ids": torch.ones(4, 2), "label": torch.zeros(4)}), "two sentences"),
    (SENTENCE, ({}, {**sentences(), "label": torch.zeros(4), "score": torch.zeros(4)}), "one of label"),
    (SENTENCE, ({}, {**sentences(), "label": torch.zeros(4)}), "sentence_embedding"),
    (ANSWERS, ({}, {"input_ids": IDS, "labels": torch.zeros(2, 3)}), r"labels \(2, 3\).*sequence_classification"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "given", "said"), REFUSED)
def test_refused(call, given, said):
    with pytest.raises(InvalidArgument, match=said):
        call(*given)


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


def test_tables_of_models_whose_parts_have_other_names():
    """Rows go to the encoder; the table of GPT-1 has a name of its own; a user's class need not name its tables."""
    small = {"d_model": 16, **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("attention_heads",)}}
    led = LEDConfig(
        vocab_size=40, **small, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8,
        max_encoder_position_embeddings=64, max_decoder_position_embeddings=16, attention_window=4,
    )  # fmt: skip
    assert facts_of_model(LEDForConditionalGeneration(led)).tables.positions == 64
    gpt = OpenAIGPTConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    assert facts_of_model(OpenAIGPTLMHeadModel(gpt)).tables.positions == 16

    class Mine(PreTrainedModel):
        config_class = BertConfig

        def forward(self, input_ids):
            return input_ids

    assert facts_of_model(Mine(BertConfig())).tables.tokens is None


# Models


def test_a_classifier_without_a_padding_token_is_refused():
    """It takes the last token of a padded row, which is padding; as it is asked, for a Trainer sets the token late."""
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=2, num_labels=2)
    forward, params = functionalize(GPT2ForSequenceClassification(config).eval())
    loss_fn = make_loss_fn(forward, "sequence_classification")
    ids, mask, labels = torch.randint(3, 20, (3, 6)), torch.ones(3, 6, dtype=torch.long), torch.tensor([0, 1, 1])
    whole = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    padded = {
        "input_ids": torch.cat([ids, ids.new_full((3, 2), 2)], 1), "attention_mask": torch.cat([mask, 0 * mask[:, :2]], 1),
        "labels": labels,
    }  # fmt: skip
    for engine in (engines.auto(), engines.loop()):
        with pytest.raises(UnsupportedModel, match=r"config.pad_token_id=None.*model.config.pad_token_id = "):
            clipped_grad(loss_fn, params, padded, Flat(1.0), engine=engine)
    clipped_grad(loss_fn, params, {"input_ids": ids, "labels": labels}, Flat(1.0))  # no row is padded
    config.pad_token_id = 2
    losses = [clipped_grad(loss_fn, params, batch, Flat(1.0))[1].losses_B for batch in (whole, padded)]
    torch.testing.assert_close(*losses)


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
    data = [{key: value[row] for key, value in batch.items()} for row in [*range(4)] * 6]
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


def test_several_labels_as_whole_numbers_are_refused():
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
            sentence_model(),
            training_arguments(tmp_path),
            privacy=PRIVACY,
            loss=loss,
            train_dataset=[{"x": 1} for _ in range(60)],
        ).train()
    with pytest.raises(UnsupportedModel, match="CrossEntropyLoss, which gives one value for a batch"):
        make_loss_fn(lambda params, x: x, nn.CrossEntropyLoss())


# Facts about models


@pytest.mark.parametrize("name", ["several labels, by configuration", "mBART", "Wav2Vec2, CTC", "T5"])
def test_adapters_of_dpfunc_know_the_model(name):
    """The facts on which a loss depends are those of the model inside; adapters start as the model itself."""
    model, batch = build(name)
    adapter = attach(model, insecure_key(0), targets=r"q_proj|v_proj|query|value|\.q$", rank=2, alpha=4)
    assert facts_of(adapter.forward).problem == model.config.problem_type
    forward, params = functionalize(model)
    task = infer_task(model)
    found = make_loss_fn(adapter.forward, task)(adapter.params, batch)
    torch.testing.assert_close(found, make_loss_fn(forward, task)(params, batch))


def test_random_masks_of_speech_are_refused_in_training_mode():
    model, batch = build("Wav2Vec2, CTC")
    model.config.mask_time_prob = 0.05
    forward, params = functionalize(model)
    loss_fn = make_loss_fn(forward, "ctc")
    loss_fn(params, batch)
    model.train()
    with pytest.raises(UnsupportedModel, match="SpecAugment.*apply_spec_augment = False"):
        loss_fn(params, batch)
    model.config.apply_spec_augment = False
    make_loss_fn(forward, "ctc")(params, batch)


@pytest.mark.parametrize(("name", "kind"), [("BertLMHeadModel", "bert"), ("RobertaForCausalLM", "roberta"),
                                            ("ElectraForCausalLM", "electra")])  # fmt: skip
def test_encoders_as_language_models_are_refused(name, kind):
    """Each token sees the next one, so the loss would be that of a copy; a decoder of the same class is fine.

    Flaubert's head is trained on masked tokens, XLM's on masked or on next ones; both are called WithLMHeadModel.
    """
    for head, of in (("FlaubertWithLMHeadModel", "flaubert"), ("XLMWithLMHeadModel", "xlm")):
        with pytest.raises(UnsupportedModel, match=f"{head} what the model is trained for"):
            infer_task(built(head, of))
    with pytest.raises(UnsupportedModel, match="learn to copy.*is_decoder=True"):
        infer_task(built(name, kind))
    decoder = built(name, kind, is_decoder=True).eval()
    assert infer_task(decoder) == "causal_lm"
    assert ignores_later_tokens(*functionalize(decoder), {"input_ids": torch.tensor([[5, 6, 7, 8]])})


def packed():
    """As DataCollatorWithFlattening makes it: one row, positions that restart, no mask."""
    from transformers import DataCollatorWithFlattening

    records = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    return dict(DataCollatorWithFlattening(return_tensors="pt")(records))


@pytest.mark.parametrize(
    "batch",
    [packed(), {**build("causal language model")[1], "seq_idx": torch.zeros(4, 8)},
     {**build("causal language model")[1], "seq_lengths": torch.ones(4, 2)}],
    ids=["flattened", "seq_idx", "seq_lengths"],
)  # fmt: skip
def test_packed_rows_and_models_without_frames_are_refused(batch):
    loss_fn, params, _ = loss_of("causal language model")
    with pytest.raises(InvalidArgument, match=r"packed rows.*padding_free=False"):
        loss_fn(params, batch)
    with pytest.raises(UnsupportedModel, match="how many frames"):
        loss_of("causal language model", "ctc")[0](params, build("causal language model")[1])


def paligemma():
    torch.manual_seed(0)
    model = built("PaliGemmaForConditionalGeneration", "paligemma", projection_dim=16,
                  vision_config={"projection_dim": 16}).eval()  # fmt: skip
    batch = {**in_text(4), "pixel_values": torch.randn(4, 3, 16, 16)}
    return model, {**batch, "token_type_ids": (batch["labels"] != IGNORED).long()}


def test_paligemma_needs_the_types_of_tokens():
    """Without them Transformers attends to later tokens where no row of a batch has padding, and else not."""
    model, batch = paligemma()
    forward, params = functionalize(model)
    case = Case(make_loss_fn(forward, "vqa"), params, batch)
    assert engine_that_equals_the_loop(case) == "one pass"
    del batch["token_type_ids"]
    with pytest.raises(InvalidArgument, match="token_type_ids"):
        case.loss_fn(params, batch)


def test_the_start_of_a_decoder_is_the_models_own():
    """mBART's decoder starts with the language, the last label, and not with a fixed token."""
    starts = {}
    for name in ("T5", "BART", "mBART", "Marian"):
        model, batch = build(name)
        found = facts_of(functionalize(model)[0]).decoder_inputs(batch["labels"])
        assert torch.equal(found, model.prepare_decoder_input_ids_from_labels(batch["labels"]))
        starts[name] = found[:, 0].tolist()
    assert len(set(starts["mBART"])) > 1
