"""Families of language models with LoRA by PEFT: book-keeping equals the loop over single samples."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from zoo import language as zoo
from zoo.parity import roughen

from dpfunc import engines
from dpfunc.hf import peft as adapters
from dpfunc.hf.tasks import infer_task, make_loss_fn

SIZES = {**zoo.SIZES, "num_hidden_layers": 1}


def mistral():
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=4))


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2))


def tokens():
    from transformers import BertConfig, BertForTokenClassification

    return BertForTokenClassification(BertConfig(**SIZES, num_labels=zoo.CLASSES))


def answers():
    from transformers import BertConfig, BertForQuestionAnswering

    return BertForQuestionAnswering(BertConfig(**SIZES))


def decoder_classifier():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_key_value_heads=1, num_labels=zoo.CLASSES))


@dataclass(frozen=True)
class Family:
    """A model, the layers with adapters, what PEFT trains beside them, and the kind of its labels."""

    model: object
    targets: tuple[str, ...]
    labels: str = "tokens"
    left: bool = False
    saved: tuple[str, ...] = ()


FAMILIES = {
    "GPT-2": Family(zoo.gpt2, ("c_attn", "c_proj")),
    "OPT": Family(zoo.opt, ("q_proj", "v_proj", "fc1")),
    "GPT-NeoX": Family(zoo.gpt_neox, ("query_key_value",)),
    "Llama": Family(zoo.llama, ("q_proj", "v_proj", "down_proj"), saved=("lm_head",)),
    "Llama, padded on the left": Family(zoo.llama, ("q_proj", "v_proj"), left=True),
    "GPT-2, padded on the left": Family(zoo.gpt2, ("c_attn",), left=True),
    "OPT, padded on the left": Family(zoo.opt, ("q_proj",), left=True),
    "Mistral": Family(mistral, ("q_proj", "v_proj")),
    "Qwen2": Family(zoo.qwen2, ("q_proj", "v_proj")),
    "Qwen3": Family(qwen3, ("q_proj", "v_proj")),
    "BERT": Family(zoo.bert, ("query", "value"), "class", saved=("classifier",)),
    "RoBERTa": Family(zoo.roberta, ("query", "value")),
    "BERT, tokens": Family(tokens, ("query",), saved=("classifier",)),
    "BERT, answers": Family(answers, ("query",), "answers", saved=("qa_outputs",)),
    "Llama, classes": Family(decoder_classifier, ("q_proj",), "class", saved=("score",)),
    "T5": Family(zoo.t5, ("q", "v")),
}


def batch_of(family):
    rows = zoo.text_padded_left(torch.float32) if family.left else zoo.text(torch.float32)
    inputs = {"input_ids": rows["ids"], "attention_mask": rows["mask"]}
    if family.labels == "class":
        return {**inputs, "labels": rows["y"]}
    if family.labels == "answers":
        return {**inputs, "start_positions": rows["y"], "end_positions": rows["y"].flip(0)}
    classes = zoo.CLASSES if family.model is tokens else zoo.VOCAB
    return {**inputs, "labels": torch.where(rows["mask"] == 1, rows["ids"] % classes, -100)}


def build(family, dtype=torch.float32, **options):
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = roughen(family.model()).to(dtype).eval()
        config = LoraConfig(
            r=2, lora_alpha=4, target_modules=list(family.targets), modules_to_save=list(family.saved) or None,
            fan_in_fan_out=family.model is zoo.gpt2, **options,
        )  # fmt: skip
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    forward, params = adapters.functionalize(adapted)
    generator = torch.Generator().manual_seed(2)
    params = {name: p + 0.1 * torch.randn(p.shape, generator=generator).to(p) for name, p in params.items()}
    return adapted, make_loss_fn(forward, infer_task(adapted)), params


def assert_equal(found, expected, tolerance):
    """Losses, norms and weighted sums, against the largest norm."""
    torch.testing.assert_close(found.losses_B, expected.losses_B, rtol=tolerance, atol=tolerance)
    norms, theirs = expected.sq_norms(), found.sq_norms()
    largest = max(float(norms_B.max()) for norms_B in norms.values()) ** 0.5
    factors = {name: torch.linspace(0, 1, len(expected.losses_B)) for name in norms}
    sums, their_sums = expected.weighted_sum(factors), found.weighted_sum(factors)
    for name in norms:
        assert float((norms[name].sqrt() - theirs[name].sqrt()).abs().max()) <= tolerance * largest, name
        assert float((sums[name] - their_sums[name]).norm()) <= tolerance * largest, name
        assert norms[name].any(), f"no sample has a gradient for {name}"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_engine_equals_single_samples(name):
    """L7, T8, C2: the default engine for each family, the ghost engine for two of them."""
    family = FAMILIES[name]
    _, loss_fn, params = build(family)
    batch = batch_of(family)
    expected = engines.loop()(loss_fn, params, batch)
    assert_equal(engines.auto()(loss_fn, params, batch), expected, 2e-4)
    if name in ("GPT-2", "T5"):
        assert_equal(engines.ghost()(loss_fn, params, batch), expected, 2e-4)


@pytest.mark.parametrize("name", ["GPT-2", "GPT-2, padded on the left", "OPT, padded on the left",
                                  "Llama, padded on the left", "BERT", "T5"])  # fmt: skip
def test_T3_padding_of_the_batch_does_not_matter(name):
    """A sample's loss and norms are those of the sample cut to its own length: no collator makes position_ids.

    How far a batch is padded depends on its longest sample, so nothing else may depend on it.
    """
    family = FAMILIES[name]
    _, loss_fn, params = build(family)
    batch = batch_of(family)
    together = engines.auto()(loss_fn, params, batch)
    length = int(batch["attention_mask"][1].sum())
    rows = slice(-length, None) if family.left else slice(length)
    short = {key: value[1:2, rows] if value.dim() == 2 else value[1:2] for key, value in batch.items()}
    alone = engines.loop()(loss_fn, params, short)
    torch.testing.assert_close(together.losses_B[1:2], alone.losses_B, rtol=1e-3, atol=1e-4)
    norms, theirs = alone.sq_norms(), together.sq_norms()
    largest = max(float(value) for value in norms.values())
    assert all(abs(float(theirs[key][1] - norms[key][0])) <= 1e-3 * largest for key in norms)


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_L18_bfloat16(name):
    """Parameters in 16 bits; losses and norms in float32, near those of float32."""
    family = FAMILIES[name]
    _, loss_fn, params = build(family, torch.bfloat16)
    batch = batch_of(family)
    found, expected = engines.auto()(loss_fn, params, batch), engines.loop()(loss_fn, params, batch)
    assert found.losses_B.dtype == torch.float32
    assert all(norms_B.dtype == torch.float32 for norms_B in found.sq_norms().values())
    assert_equal(found, expected, 5e-2)


def checkpointed(model):
    """As every version of Transformers calls it."""
    base = model.get_base_model()
    getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)()


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_gradient_checkpointing(name):
    """The same gradients, layer by layer computed twice; functionalize before it is switched on."""
    family = FAMILIES[name]
    model, loss_fn, params = build(family)
    batch = batch_of(family)
    model.get_base_model().config.use_cache = False
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    expected = engines.loop()(loss_fn, params, batch)
    checkpointed(model)
    model.train()
    layers = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    assert layers
    assert_equal(engines.auto()(loss_fn, params, batch), expected, 2e-4)


def test_experts():
    """Routing is a choice for each token, so samples stay apart; the loss that mixes them is not used."""
    family = Family(mixtral, ("q_proj", "v_proj"))
    _, loss_fn, params = build(family)
    batch = batch_of(family)
    engine = engines.auto()
    assert_equal(engine(loss_fn, params, batch), engines.loop()(loss_fn, params, batch), 2e-4)
    assert engine.decision(loss_fn).engine == "one pass"
