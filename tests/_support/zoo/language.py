"""Hugging Face families: text, images, and both. A new family is a new line in FAMILIES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import transformers as hf
from models import Case
from torch import nn
from torch.nn import functional as F

from dpfunc.functional import BIASES, functionalize
from dpfunc.lora import attach
from dpfunc.rng import insecure_key
from zoo.parity import nonzero_b, roughen

VOCAB, LENGTH, CLASSES, BATCH = 50, 8, 3, 4
PAD, START, END, IMAGE, FIRST_WORD = 0, 1, 2, 3, 4
NORMS = r"norm"


@dataclass(frozen=True)
class Family:
    """A model, its batch and its loss, and what of it is trained.

    Args:
        model: builds the module. batch: dtype -> batch. loss: forward -> per-sample loss.
        lora: regular expression for the layers with adapters. small: one for the few parameters of the third choice:
            biases, or norms where there are no biases.
        peft: names of the layers for an adapter by PEFT; empty for none.
        unused: regular expression for the parameters that no loss depends on.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.dtype], dict[str, torch.Tensor]]
    loss: Callable[..., Callable[..., torch.Tensor]]
    lora: str
    small: str = BIASES
    peft: tuple[str, ...] = ()
    unused: str = "$^"


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


def _text(length, lengths, seed=0):
    """Ids and mask of samples of several lengths, padded on the right."""
    lengths_B1 = torch.tensor(lengths)[:, None]
    mask_BT = (torch.arange(length)[None] < lengths_B1).long()
    ids_BT = torch.randint(FIRST_WORD, VOCAB, (len(lengths), length), generator=_seeded(seed))
    return torch.where(mask_BT == 1, ids_BT, PAD), mask_BT


def text(dtype):
    ids_BT, mask_BT = _text(LENGTH, (8, 3, 6, 2))
    return {"ids": ids_BT, "mask": mask_BT, "y": torch.randint(CLASSES, (BATCH,), generator=_seeded(1))}


def text_padded_left(dtype):
    return {name: value.flip(1) if value.dim() == 2 else value for name, value in text(dtype).items()}


def translation(dtype):
    ids_BT, mask_BT = _text(5, (3, 5, 2, 4), seed=2)
    ids_BT[:, 0] = START
    return {**text(dtype), "target_ids": ids_BT, "target_mask": mask_BT}


def images(dtype, size=8):
    pixels = torch.randn(BATCH, 3, size, size, generator=_seeded(3), dtype=torch.float64).to(dtype)
    return {"pixels": pixels, "y": torch.randint(CLASSES, (BATCH,), generator=_seeded(4))}


def images_with_captions(dtype):
    """Each caption ends in END, then padding."""
    batch = {**text(dtype), **images(dtype)}
    last_B1 = batch["mask"].sum(1, keepdim=True) - 1
    return {**batch, "ids": batch["ids"].scatter(1, last_B1, END)}


def images_in_text(dtype):
    """START, the four patches of the image, then words, padded on the right."""
    ids_BT, mask_BT = _text(10, (10, 7, 8, 6), seed=5)
    ids_BT[:, 0], ids_BT[:, 1:5] = START, IMAGE
    return {"ids": ids_BT, "mask": mask_BT, "pixels": images(dtype)["pixels"]}


def token_mean(logits_BTV, ids_BT, mask_BT):
    """Cross entropy, mean over the sample's own tokens."""
    loss_BT = F.cross_entropy(logits_BTV.transpose(1, 2), ids_BT, reduction="none") * mask_BT
    return loss_BT.sum(1) / mask_BT.sum(1)


def classify_text(forward):
    def loss_fn(p, b):
        logits = forward(p, input_ids=b["ids"], attention_mask=b["mask"]).logits
        return F.cross_entropy(logits, b["y"], reduction="none")

    return loss_fn


def classify_image(forward):
    return lambda p, b: F.cross_entropy(forward(p, pixel_values=b["pixels"]).logits, b["y"], reduction="none")


def every_token(forward):
    """As masked language models are trained, but with every token as target."""

    def loss_fn(p, b):
        return token_mean(forward(p, input_ids=b["ids"], attention_mask=b["mask"]).logits, b["ids"], b["mask"])

    return loss_fn


def next_token(forward):
    def loss_fn(p, b):
        images = {"pixel_values": b["pixels"]} if "pixels" in b else {}
        out = forward(p, input_ids=b["ids"], attention_mask=b["mask"], use_cache=False, **images)
        return token_mean(out.logits[:, :-1], b["ids"][:, 1:], b["mask"][:, 1:] * b["mask"][:, :-1])

    return loss_fn


def translate(forward):
    def loss_fn(p, b):
        out = forward(
            p, input_ids=b["ids"], attention_mask=b["mask"], use_cache=False,
            decoder_input_ids=b["target_ids"], decoder_attention_mask=b["target_mask"],
        )  # fmt: skip
        return token_mean(out.logits[:, :-1], b["target_ids"][:, 1:], b["target_mask"][:, 1:])

    return loss_fn


def own_pair(forward):
    """The angle between a sample's own text and own image. The contrastive loss would mix samples."""

    def loss_fn(p, b):
        out = forward(p, input_ids=b["ids"], attention_mask=b["mask"], pixel_values=b["pixels"])
        return 1 - F.cosine_similarity(out.text_embeds, out.image_embeds)

    return loss_fn


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 16, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END,
}  # fmt: skip
SEEN = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def gpt2():
    ids = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=16, **ids))


def opt():
    sizes = {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 12}
    del sizes["intermediate_size"]
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes))


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "num_attention_heads": 4}, num_key_value_heads=2))


def t5():
    ids = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, relative_attention_num_buckets=6,
        relative_attention_max_distance=8, feed_forward_proj="gated-gelu", **ids,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def beit():
    config = hf.BeitConfig(
        **SEEN, num_labels=CLASSES, use_relative_position_bias=True, use_absolute_position_embeddings=True
    )
    return hf.BeitForImageClassification(config)


def llava():
    text_config = hf.LlamaConfig(**SIZES, num_key_value_heads=1)
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**SEEN), text_config=text_config, image_token_index=IMAGE,
        vision_feature_layer=-1, vision_feature_select_strategy="default",
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


# fmt: off
FAMILIES = {
    "BERT": Family(lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=CLASSES)), text, classify_text, r"query|value|word_embeddings|dense"),
    "RoBERTa": Family(lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES)), text, every_token, r"query|key|value|dense"),
    "GPT-2": Family(gpt2, text, next_token, r"c_attn|c_proj|c_fc"),
    "GPT-NeoX": Family(lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)), text, next_token, r"query_key_value|dense"),
    "OPT": Family(opt, text, next_token, r"[qkv]_proj|out_proj|fc[12]"),
    "Llama": Family(llama, text, next_token, r"_proj$", NORMS, peft=("q_proj", "v_proj", "down_proj")),
    "Qwen2": Family(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True)), text_padded_left, next_token, r"_proj$|embed_tokens"),
    "T5": Family(t5, translation, translate, r"\.(q|k|v|o|wi_0|wi_1|wo)$", NORMS, peft=("q", "v", "wo")),
    "ViT": Family(lambda: hf.ViTForImageClassification(hf.ViTConfig(**SEEN, num_labels=CLASSES)), images, classify_image, r"[qv]_proj|fc[12]|embeddings"),
    "BEiT": Family(beit, images, classify_image, r"[qkvo]_proj|fc[12]"),
    "DeiT": Family(lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**SEEN, num_labels=CLASSES)), images, classify_image, r"[qkvo]_proj|fc[12]|embeddings"),
    "CLIP": Family(lambda: hf.CLIPModel(hf.CLIPConfig(text_config={**SIZES}, vision_config={**SEEN}, projection_dim=8)), images_with_captions, own_pair, r"[qkv]_proj|patch_embedding|_projection|fc[12]",
        unused="^logit_scale$",  # a cosine has no temperature
    ),
    "LLaVA": Family(
        llava, images_in_text, next_token, r"_proj$|linear_[12]", peft=("q_proj", "v_proj", "linear_1"),
        unused=r"post_layernorm",  # LLaVA takes the image's patches from before it
    ),
}
# fmt: on
bert, roberta, gpt_neox, qwen2, vit, clip = (
    FAMILIES[name].model for name in ("BERT", "RoBERTa", "GPT-NeoX", "Qwen2", "ViT", "CLIP")
)
CASES = [
    (name, choice)
    for name, family in FAMILIES.items()
    for choice in ("full", "LoRA", "norms" if family.small == NORMS else "biases", *(["PEFT"] if family.peft else []))
]


def _peft(module, names):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(module, LoraConfig(r=2, lora_alpha=4, target_modules=list(names)))
    forward, params = functionalize(adapted.eval())
    return forward, nonzero_b(params)


@cache
def build(name, choice, dtype):
    """The case of a family and a choice; seeded."""
    family = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = roughen(family.model()).eval().to(dtype)
        if choice == "full":
            forward, params = functionalize(module)
        elif choice == "LoRA":
            adapter = attach(module, insecure_key(0), targets=family.lora, rank=2, alpha=4)
            forward, params = adapter.forward, nonzero_b(adapter.params)
        elif choice == "PEFT":
            forward, params = _peft(module, family.peft)
        else:
            forward, params = functionalize(module, family.small)
    return Case(family.loss(forward), params, family.batch(dtype))
