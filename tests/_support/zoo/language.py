"""Hugging Face families, made as those of the survey: text, images, and both. A new family is a new line in FAMILIES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from models import Case

from benchmarks.survey import case as survey
from benchmarks.survey.case import END, PAD, START, VOCAB, classes, hugging_face, images
from benchmarks.survey.multimodal import ended, in_text
from benchmarks.survey.texts import tokens
from benchmarks.survey.tiny import built, target_text
from dpfunc.functional import BIASES, functionalize
from dpfunc.lora import attach
from dpfunc.rng import insecure_key
from zoo.parity import nonzero_b, roughen

NORMS, CLASSES = r"norm", survey.CLASSES
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 16, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model, its batch and its loss, and what of it is trained.

    Args:
        model: builds the module. batch: makes the batch. loss: its name in the survey.
        lora: regular expression for the layers with adapters. small: one for the few parameters of the third choice:
            biases, or norms where there are no biases.
        peft: names of the layers for an adapter by PEFT; empty for none.
        unused: regular expression for the parameters that no loss depends on.
    """

    model: Callable[[], torch.nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    loss: str
    lora: str
    small: str = BIASES
    peft: tuple[str, ...] = ()
    unused: str = "$^"


def text(dtype):
    """Ids, mask and classes of samples of several lengths."""
    rows = survey.text()
    return {"ids": rows["input_ids"], "mask": rows["attention_mask"], "y": classes()}


labelled_text = lambda: {**survey.text(), "labels": classes()}
labelled_images = lambda: {"pixel_values": images(), "labels": classes()}
bert = partial(built, "BertForSequenceClassification", "bert")
roberta = partial(built, "RobertaForMaskedLM", "roberta")
gpt2 = partial(built, "GPT2LMHeadModel", "gpt2")
gpt_neox = partial(built, "GPTNeoXForCausalLM", "gpt_neox")
opt = partial(built, "OPTForCausalLM", "opt", ffn_dim=24, word_embed_proj_dim=12)
llama = partial(built, "LlamaForCausalLM", "llama", num_attention_heads=4, num_key_value_heads=2, head_dim=4)
qwen2 = partial(built, "Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True)
t5 = partial(
    built, "T5ForConditionalGeneration", "t5", d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
    relative_attention_num_buckets=6, relative_attention_max_distance=8, feed_forward_proj="gated-gelu",
    decoder_start_token_id=PAD,
)  # fmt: skip
vit = partial(built, "ViTForImageClassification", "vit")
beit = partial(
    built, "BeitForImageClassification", "beit", use_relative_position_bias=True, use_absolute_position_embeddings=True
)
clip = partial(built, "CLIPModel", "clip")
llava = partial(
    built, "LlavaForConditionalGeneration", "llava", vision_feature_layer=-1, vision_feature_select_strategy="default"
)
FAMILIES = {
    "BERT": Family(bert, labelled_text, "classes", r"query|value|word_embeddings|dense"),
    "RoBERTa": Family(roberta, tokens, "tokens", r"query|key|value|dense"),
    "GPT-2": Family(gpt2, tokens, "causal", r"c_attn|c_proj|c_fc"),
    "GPT-NeoX": Family(gpt_neox, tokens, "causal", r"query_key_value|dense"),
    "OPT": Family(opt, tokens, "causal", r"[qkv]_proj|out_proj|fc[12]"),
    "Llama": Family(llama, tokens, "causal", r"_proj$", NORMS, peft=("q_proj", "v_proj", "down_proj")),
    "Qwen2": Family(qwen2, lambda: tokens("left"), "causal", r"_proj$|embed_tokens"),
    "T5": Family(t5, lambda: {**survey.text(), **target_text()}, "seq2seq", r"\.(q|k|v|o|wi_0|wi_1|wo)$", NORMS,
                 peft=("q", "v", "wo")),
    "ViT": Family(vit, labelled_images, "classes", r"[qv]_proj|fc[12]|embeddings"),
    "BEiT": Family(beit, labelled_images, "classes", r"[qkvo]_proj|fc[12]"),
    "DeiT": Family(partial(built, "DeiTForImageClassification", "deit"), labelled_images, "classes",
                   r"[qkvo]_proj|fc[12]|embeddings"),
    # a cosine has no temperature
    "CLIP": Family(clip, lambda: {**ended(survey.text()), "pixel_values": images()}, "pair",
                   r"[qkv]_proj|patch_embedding|_projection|fc[12]", unused="^logit_scale$"),
    # LLaVA takes the image's patches from before the last norm
    "LLaVA": Family(llava, lambda: {**in_text(4), "pixel_values": images()}, "causal", r"_proj$|linear_[12]",
                    peft=("q_proj", "v_proj", "linear_1"), unused=r"post_layernorm"),
}  # fmt: skip
CASES = [
    (name, choice)
    for name, family in FAMILIES.items()
    for choice in ("full", "LoRA", "norms" if family.small == NORMS else "biases", *(["PEFT"] if family.peft else []))
]


@cache
def build(name, choice, dtype):
    """The case of a family and a choice; seeded."""
    family = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = roughen(family.model()).eval().to(dtype)
        subject = hugging_face(module, family.batch(), family.loss)
        if choice == "LoRA":
            adapter = attach(module, insecure_key(0), targets=family.lora, rank=2, alpha=4)
            forward, params = adapter.forward, nonzero_b(adapter.params)
        elif choice == "PEFT":
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=2, lora_alpha=4, target_modules=list(family.peft))
            forward, params = functionalize(get_peft_model(module, config).eval())
            params = nonzero_b(params)
        else:
            forward, params = functionalize(module, None if choice == "full" else family.small)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in subject.batch.items()}
    return Case(subject.loss(forward), params, batch)
