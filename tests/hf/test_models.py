"""A look at models before training, causal attention, and a base in 4 bits."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch
from task_models import build, ignores_later_tokens
from torch import nn
from zoo import language as zoo
from zoo.parity import roughen

from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize
from dpfunc.hf.models import causal_mask, check_model, four_bit, with_causal_attention

IDS = torch.tensor([[4, 9, 7, 5], [6, 8, 11, 12]])
MASK = torch.ones_like(IDS)


def test_a_model_that_can_be_trained():
    model = zoo.gpt2()
    found = check_model(model)
    assert (found.task, found.problems, found.advice, found.batchnorms) == ("causal_lm", (), (), 0)
    assert found.trained == found.total == sum(p.numel() for p in model.parameters())
    assert str(found).startswith(f"{found.trained} of {found.total} parameters")


def test_batchnorms_are_counted():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    found = check_model(model)
    assert found.batchnorms == 2
    assert "replace_batchnorm" in found.problems[0]
    assert "2 BatchNorm layers" in found.advice[0]
    assert not check_model(model.eval()).problems
    assert found.task is None


def test_problems_are_named():
    from transformers import GPT2Config, GPT2ForSequenceClassification, MixtralConfig, MixtralForCausalLM

    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    found = check_model(GPT2ForSequenceClassification(config).requires_grad_(False))
    said = "\n".join(found.problems)
    assert "pad_token_id" in said
    assert "No parameter requires gradients" in said
    assert "must be changed: " in str(found)
    experts = MixtralForCausalLM(MixtralConfig(**zoo.SIZES, num_key_value_heads=1, num_local_experts=2))
    assert "load-balancing" in check_model(experts).advice[0]
    speech, _ = build("Wav2Vec2, CTC")
    found = check_model(speech)
    assert (found.task, found.problems, found.advice) == ("ctc", (), ())
    speech.config.mask_time_prob, speech.config.feat_extract_norm = 0.05, "group"
    found = check_model(speech)
    assert "apply_spec_augment = False" in found.problems[0]
    assert "pad all recordings to one public length" in found.advice[0]


def test_causal_mask_sees_what_came_before_and_is_no_padding():
    mask = causal_mask(torch.tensor([[1, 1, 0], [0, 1, 1]]), torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert mask.shape == (2, 1, 3, 3)
    assert torch.isfinite(mask).all()
    assert (mask[:, 0] == 0).tolist() == [
        [[True, False, False], [True, True, False], [True, True, True]],
        [[True, False, False], [False, True, False], [False, True, True]],
    ]


@pytest.mark.parametrize("make", [zoo.roberta, zoo.gpt2, zoo.llama])
def test_a_decoder_does_not_see_what_it_predicts(make):
    """An encoder sees what it is to predict; as a causal function it does not. A decoder stays what it is."""
    torch.manual_seed(0)
    model = roughen(make()).eval()
    forward, params = functionalize(model)
    batch = {"input_ids": IDS, "attention_mask": MASK}
    assert ignores_later_tokens(forward, params, batch) is (make is not zoo.roberta)
    causal = with_causal_attention(forward)
    assert ignores_later_tokens(causal, params, batch)
    if make is not zoo.roberta:
        torch.testing.assert_close(causal(params, **batch).logits, forward(params, **batch).logits)
        return
    for call, said in (
        (lambda: causal(params, input_ids=IDS), "attention_mask"), (lambda: causal_mask(torch.ones(3), IDS), "(B, T)"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=said):
            call()


def test_four_bits_without_their_package_are_refused(monkeypatch):
    """The refusal says what to install, on what it runs, and what to do without."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match="pip install.*CPUs.*bfloat16"):
        four_bit(torch.float32)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.50" if name == "bitsandbytes" else version(name))
    config = four_bit(torch.bfloat16)
    assert config.load_in_4bit
    assert config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_compute_dtype == torch.bfloat16


def test_quantised_weights_without_an_adapter_are_a_problem():
    """An adapter over them is none, as is a quantised model that is not trained."""
    from peft import LoraConfig, get_peft_model

    model = zoo.llama()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(24, 8, dtype=torch.uint8), requires_grad=False)
    assert "2 linear layers have quantised weights" in "".join(check_model(model).problems)
    assert "get_peft_model" in "".join(check_model(model).problems)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert not check_model(adapted).problems


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # PEFT calls it
@pytest.mark.parametrize(("options", "reentrant"), [({}, True), ({"use_reentrant": True}, True),
                                                    ({"use_reentrant": False}, False)])  # fmt: skip
def test_checkpointing_of_a_base_in_few_bits(options, reentrant):
    """PEFT's preparation switches on the reentrant kind unless an option says otherwise."""
    from peft import prepare_model_for_kbit_training

    model = zoo.llama()
    model.is_loaded_in_4bit = True
    prepared = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=options)
    prepared.lm_head.weight.requires_grad_()
    problems = "".join(check_model(prepared).problems)
    assert ("reentrant" in problems) == reentrant
