"""Families of language models with LoRA by PEFT: book-keeping equals the loop over single samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from models import Case
from zoo import language as zoo
from zoo.parity import differences, roughen, truth_of, without_gradient

from benchmarks.survey.tiny import built
from dpfunc import engines
from dpfunc.hf import peft as adapters
from dpfunc.hf.tasks import infer_task, make_loss_fn


@dataclass(frozen=True)
class Family:
    """A class of transformers, the layers with adapters, what PEFT trains beside them, and the kind of its labels."""

    name: str
    kind: str
    targets: tuple[str, ...]
    saved: tuple[str, ...] = ()
    labels: str = "tokens"
    left: bool = False
    changes: dict = field(default_factory=dict)


GPT2 = Family("GPT2LMHeadModel", "gpt2", ("c_attn", "c_proj"))
OPT = Family("OPTForCausalLM", "opt", ("q_proj", "v_proj", "fc1"), changes={"word_embed_proj_dim": 16, "ffn_dim": 24})
LLAMA = Family("LlamaForCausalLM", "llama", ("q_proj", "v_proj", "down_proj"), ("lm_head",))
QV = ("q_proj", "v_proj")
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0,
      "dropout_rate": 0.0}  # fmt: skip
FAMILIES = {
    "GPT-2": GPT2, "OPT": OPT, "Llama": LLAMA,
    "GPT-2, padded on the left": replace(GPT2, left=True), "OPT, padded on the left": replace(OPT, left=True),
    "Llama, padded on the left": replace(LLAMA, left=True),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", "gpt_neox", ("query_key_value",)),
    "Mistral": Family("MistralForCausalLM", "mistral", QV), "Qwen2": Family("Qwen2ForCausalLM", "qwen2", QV),
    "Qwen3": Family("Qwen3ForCausalLM", "qwen3", QV), "Mixtral": Family("MixtralForCausalLM", "mixtral", QV),
    "BERT": Family("BertForSequenceClassification", "bert", ("query", "value"), ("classifier",), "class"),
    "RoBERTa": Family("RobertaForMaskedLM", "roberta", ("query", "value")),
    "BERT, tokens": Family("BertForTokenClassification", "bert", ("query",), ("classifier",)),
    "BERT, answers": Family("BertForQuestionAnswering", "bert", ("query",), ("qa_outputs",), "answers",
                           changes={"num_labels": 2}),
    "Llama, classes": Family("LlamaForSequenceClassification", "llama", ("q_proj",), ("score",), "class"),
    "T5": Family("T5ForConditionalGeneration", "t5", ("q", "v"), changes=T5),
}  # fmt: skip


def batch_of(family):
    rows = zoo.text_padded_left(torch.float32) if family.left else zoo.text(torch.float32)
    inputs = {"input_ids": rows["ids"], "attention_mask": rows["mask"]}
    if family.labels == "class":
        return {**inputs, "labels": rows["y"]}
    if family.labels == "answers":
        return {**inputs, "start_positions": rows["y"], "end_positions": rows["y"].flip(0)}
    classes = zoo.CLASSES if family.name.endswith("TokenClassification") else zoo.VOCAB
    return {**inputs, "labels": torch.where(rows["mask"] == 1, rows["ids"] % classes, -100)}


def case_of(name, dtype=torch.float32, checkpointed=False):
    """A loss, moved parameters of its adapters and a batch; checkpointing is switched on after `functionalize`."""
    from peft import LoraConfig, get_peft_model

    family = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = roughen(built(family.name, family.kind, **family.changes)).to(dtype).eval()
        config = LoraConfig(
            r=2, lora_alpha=4, target_modules=list(family.targets), modules_to_save=list(family.saved) or None,
            fan_in_fan_out=family.kind == "gpt2",
        )  # fmt: skip
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    forward, params = adapters.functionalize(adapted)
    if checkpointed:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.config.use_cache = False
        parts = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
        assert parts
        for part in parts:
            part.training = True  # and dropout, a part of its own, is not
    generator = torch.Generator().manual_seed(2)
    params = {at: p + 0.1 * torch.randn(p.shape, generator=generator).to(p) for at, p in params.items()}
    return Case(make_loss_fn(forward, infer_task(adapted)), params, batch_of(family))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_engine_equals_single_samples(name):
    """L7, T8, C2: the default engine for each family, in one pass; the ghost engine for two of them."""
    case = case_of(name)
    truth, auto = truth_of(case), engines.auto()
    assert not without_gradient(truth)
    for engine in (auto, engines.ghost()) if name in ("GPT-2", "T5") else (auto,):
        assert max(differences(engine, case, truth).values()) < 2e-4
    assert auto.decision(case.loss_fn).engine == "one pass"


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "T5"])
def test_gradient_checkpointing(name):
    """The same gradients, layer by layer computed twice."""
    differ = differences(engines.auto(), case_of(name, checkpointed=True), truth_of(case_of(name)))
    assert max(differ.values()) < 2e-4


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5", *(name for name, family in FAMILIES.items() if family.left)])
def test_T3_padding_of_the_batch_does_not_matter(name):
    """A sample's loss and norms are those of the sample cut to its own length: no collator makes position_ids.

    How far a batch is padded depends on its longest sample, so nothing else may depend on it.
    """
    case = case_of(name)
    together = engines.auto()(case.loss_fn, case.params, case.batch)
    length = int(case.batch["attention_mask"][1].sum())
    rows = slice(-length, None) if FAMILIES[name].left else slice(length)
    short = {key: value[1:2, rows] if value.dim() == 2 else value[1:2] for key, value in case.batch.items()}
    alone = engines.loop()(case.loss_fn, case.params, short)
    torch.testing.assert_close(together.losses_B[1:2], alone.losses_B, rtol=1e-3, atol=1e-4)
    norms, theirs = alone.sq_norms(), together.sq_norms()
    largest = max(float(value) for value in norms.values())
    assert all(abs(float(theirs[key][1] - norms[key][0])) <= 1e-3 * largest for key in norms)


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_L18_bfloat16(name):
    """Parameters in 16 bits; losses and norms in float32, near those of the loop."""
    case = case_of(name, torch.bfloat16)
    found = engines.auto()(case.loss_fn, case.params, case.batch)
    assert found.losses_B.dtype == torch.float32
    assert all(norms_B.dtype == torch.float32 for norms_B in found.sq_norms().values())
    found = differences(engines.auto(), case, truth_of(case))
    assert max(value for kind, value in found.items() if kind != "squared norms") < 5e-2
