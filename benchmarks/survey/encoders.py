"""Language models that read the whole text, and those that read one text and write another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.survey.case import (
    END,
    START,
    VOCAB,
    Case,
    Subject,
    cases_of,
    classes,
    hugging_face,
    text,
    token_labels,
    words,
)  # fmt: skip
from benchmarks.survey.tiny import built, written

MASKED = words("""
albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm esmc eurobert
flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm longformer luke megatron-bert mobilebert modernbert
mpnet mra nomic_bert nystromformer perceiver reformer rembert roberta roberta-prelayernorm roc_bert roformer
squeezebert tapas ultrabert xlm xlm-roberta xlm-roberta-xl xmod yoso xlnet
""")
REFORMER = {
    "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "feed_forward_size": 24, "lsh_attn_chunk_length": 4,
    "local_attn_chunk_length": 4, "attention_head_size": 8, "num_buckets": 2,
}  # fmt: skip
FUNNEL = {"block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24}
CHANGED: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "canine": {"num_hash_buckets": 50, "local_transformer_stride": 4, "downsampling_rate": 4},
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_heads": 2, "n_layers": 2},
    "esmc": {"num_key_value_heads": 2},
    "funnel": FUNNEL,
    "layoutlm": {"max_2d_position_embeddings": 64},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
    "perceiver": {"d_model": 16, "d_latents": 16, "num_latents": 4, "num_self_attends_per_block": 1,
                  "num_self_attention_heads": 2, "num_cross_attention_heads": 2},
    "reformer": REFORMER,
    "roc_bert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 50, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "tapas": {"type_vocab_sizes": [3, 8, 8, 2, 8, 8, 8], "max_position_embeddings": 64},
    "xlnet": {"d_head": 8, "d_inner": 24},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}  # fmt: skip
CLASSIFIERS = words("""
albert bert big_bird camembert canine convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm
flaubert fnet funnel ibert longformer luke megatron-bert mobilebert modernbert mpnet mra nystromformer perceiver
reformer rembert roberta roc_bert roformer squeezebert xlm xlm-roberta xlnet xmod yoso t5 bart mbart
""")
TOKENS = words("bert roberta deberta-v2 distilbert electra modernbert")
MAIN = words("albert bert deberta-v2 distilbert electra modernbert mpnet roberta xlm-roberta")

WRITERS = words("""
bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe
 pegasus pegasus_x plbart prophetnet seamless_m4t seamless_m4t_v2 switch_transformers t5 t5gemma t5gemma2 umt5
""")
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
WRITERS_CHANGED: dict[str, dict[str, Any]] = {
    "bigbird_pegasus": {"attention_type": "original_full"},
    "fsmt": {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "langs": ["en", "de"]},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "longt5": {**T5, "local_radius": 3},
    "longt5 transient-global": {**T5, "local_radius": 3, "encoder_attention_type": "transient-global",
                                "global_block_size": 4},
    "mt5": T5,
    "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
    "switch_transformers": {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "t5": T5,
    "umt5": T5,
}  # fmt: skip
WRITERS_MAIN = words("bart mbart t5 marian pegasus")


def model_of(auto: str, kind: str, **changes: Any) -> Any:
    module = built(auto, kind, **(changes or CHANGED.get(kind, {})))
    if kind == "xmod":
        module.set_default_language("en_XX")
    return module


def masked(kind: str) -> Callable[[], Subject]:
    """Every token is a target."""

    def build() -> Subject:
        batch = text("right")
        auto = "XLNetLMHeadModel" if kind == "xlnet" else "AutoModelForMaskedLM"
        return hugging_face(model_of(auto, kind), {**batch, "labels": token_labels(batch)}, "tokens")

    return build


def classifier(kind: str) -> Callable[[], Subject]:
    def build() -> Subject:
        batch = text("right", length=8)
        if kind in ("t5", "bart", "mbart"):  # they look for the end in the text
            last_B1 = batch["attention_mask"].sum(1, keepdim=True) - 1
            batch["input_ids"] = batch["input_ids"].scatter(1, last_B1, END)
        changes = {**T5, "decoder_start_token_id": START} if kind == "t5" else CHANGED.get(kind, {})
        module = model_of("AutoModelForSequenceClassification", kind, **changes)
        return hugging_face(module, {**batch, "labels": classes()}, "classes")

    return build


def tagger(kind: str) -> Callable[[], Subject]:
    def build() -> Subject:
        batch = text("right")
        labels = torch.where(batch["attention_mask"] == 1, batch["input_ids"] % 3, -100)
        return hugging_face(model_of("AutoModelForTokenClassification", kind), {**batch, "labels": labels}, "tokens")

    return build


def cases() -> list[Case]:
    """Encoders whole as masked language models, with LoRA as classifiers; then encoders with decoders."""
    found = []
    for kind in MASKED:
        more = ["full train", "biases eval", "LoRA eval"] if kind in MAIN else []
        whole = "full train" if kind == "reformer" else "full eval"  # it has no gradients in eval mode
        found += cases_of("encoder", kind, masked(kind), [whole, *more], "right")
    for kind in CLASSIFIERS:
        more = ["full eval"] if kind in (*MAIN, "canine") else []
        found += cases_of("encoder", f"{kind} classifier", classifier(kind), ["LoRA train", *more], "right")
    for kind in TOKENS:
        found += cases_of("encoder", f"{kind} tagger", tagger(kind), ["full eval"], "right")
    for kind in sorted({*WRITERS, *WRITERS_CHANGED}):
        more = ["full train", "biases eval"] if kind in WRITERS_MAIN else []
        writer = written("AutoModelForSeq2SeqLM", kind, lambda: text("right"), **WRITERS_CHANGED.get(kind, {}))
        found += cases_of("encoder-decoder", kind, writer, ["full eval", "LoRA train", *more], "right")
    return found
