"""What a loss must know of a model: adapters, speech, heads, kinds of tokens; what it cannot know is refused."""

from __future__ import annotations

import pytest
import torch
from models import Case
from task_models import IGNORED, build, loss_of
from zoo.parity import engine_that_equals_the_loop

from benchmarks.survey.multimodal import in_text
from benchmarks.survey.tiny import built
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize
from dpfunc.hf._facts import facts_of
from dpfunc.hf.models import is_causal
from dpfunc.hf.tasks import infer_task, make_loss_fn
from dpfunc.lora import attach
from dpfunc.rng import insecure_key


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
    assert is_causal(*functionalize(decoder), {"input_ids": torch.tensor([[5, 6, 7, 8]])})


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
