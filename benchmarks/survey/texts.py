"""Language models: that read from left to right, that read the whole text, and that read one text and write another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.survey.case import (
    END,
    START,
    VOCAB,
    Batch,
    Case,
    Subject,
    cases_of,
    classes,
    hugging_face,
    text,
    token_labels,
    words,
)
from benchmarks.survey.tiny import built, of, written

REFORMER = {
    "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "feed_forward_size": 24, "lsh_attn_chunk_length": 4,
    "local_attn_chunk_length": 4, "attention_head_size": 8, "num_buckets": 2,
}  # fmt: skip
XLNET = {"d_head": 8, "d_inner": 24}
XMOD = {"languages": ["en_XX"], "default_language": "en_XX"}
DECODERS = words("""
afmoe apertus arcee aria_text bart beam bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot
blenderbot-small bloom camembert cohere cohere2 cohere2_moe cpmant ctrl cwm data2vec-text deepseek_v4 doge electra
ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_mamba flex_olmo flint gemma gemma2 gemma3_text
gemma4_unified_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite granite_swa
granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2
jamba jetmoe kolibri1 laguna lfm2 lfm3 llama llama4_text mamba marian mbart megatron-bert mellum mimo_v2_flash
minimax minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder moshi mpt mvp nanochat nemotron olmo
olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phimoe plbart prophetnet qwen2 qwen2_moe
qwen3 qwen3_moe qwen3_5_text qwen3_5_moe_text qwen3_next recurrent_gemma rembert roberta roberta-prelayernorm
roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma xglm xlm-roberta xlm-roberta-xl
bailing_hybrid
""")
MLA = {
    "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}  # fmt: skip
DEEPSEEK = {**MLA, "head_dim": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4, "mamba_n_groups": 1}
DECODERS_CHANGED: dict[str, dict[str, Any]] = {
    "axk1": DEEPSEEK,
    "bamba": {**SSM, "attn_layer_indices": [1]},
    "codegen": {"n_head": 4, "hidden_size": 32, "rotary_dim": 4},
    "dbrx": {"d_model": 16, "n_heads": 2, "n_layers": 2, "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0,
        "clip_qkv": 8}, "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 24, "moe_num_experts": 3, "moe_top_k": 2}},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "diffllama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "falcon_h1": {**SSM, "mamba_d_ssm": 32},
    "glm4_moe_lite": {**DEEPSEEK, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4, "n_positions": 64},
    "granitemoehybrid": {**SSM, "layer_types": ["mamba", "attention"]},
    "kimi_linear": {**MLA, "linear_num_heads": 2, "linear_head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4, "expand": 2},
    "minicpm3": MLA,
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8,
                   "ssm_state_size": 4, "n_groups": 1, "chunk_size": 4},
    "reformer": {"is_decoder": True, **REFORMER},
    "xlm": {"causal": True},
    "xlnet": XLNET,
    "xlstm": {"num_heads": 2, "embedding_dim": 16, "num_blocks": 1},
    "xmod": XMOD,
    "youtu": MLA,
    "zamba": {"layer_types": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3, "mamba_d_state": 4,
        "n_mamba_heads": 2, "attention_hidden_size": 32, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
DECODER_MAIN = words("""
llama mistral mixtral qwen2 qwen3 gemma gemma2 gemma3_text phi3 gpt2 gpt_neox opt bloom falcon mamba olmo2 mpt
starcoder2 gpt_oss
""")
DECODER_CLASSIFIERS = words("llama gpt2 opt qwen2 gemma bloom falcon gpt_neox mistral phi3")


def tokens(padding: str = "right") -> Batch:
    """Every token is a target."""
    rows = text(padding)
    return {**rows, "labels": token_labels(rows)}


def language_model(kind: str, padding: str) -> Callable[[], Subject]:
    changes = DECODERS_CHANGED.get(kind, {})
    return of("AutoModelForCausalLM", kind, lambda: tokens(padding), "causal", **changes)


def decoder_classifier(kind: str, padding: str) -> Callable[[], Subject]:
    return of("AutoModelForSequenceClassification", kind, lambda: {**text(padding), "labels": classes()}, "classes")


def decoders() -> list[Case]:
    """Every family whole and with LoRA; the main ones also in the other mode, padded on the other side, by biases."""
    found = []
    for kind in sorted({*DECODERS, *DECODERS_CHANGED}):
        right, left = language_model(kind, "right"), language_model(kind, "left")
        found += cases_of("decoder", kind, right, ["full train" if kind == "reformer" else "full eval"], "right")
        found += cases_of("decoder", kind, left, ["LoRA train"], "left")
        if kind in DECODER_MAIN:
            found += cases_of("decoder", kind, right, ["full train", "biases eval"], "right")
            found += cases_of("decoder", kind, left, ["full eval"], "left")
    for kind in DECODER_CLASSIFIERS:
        found += cases_of("decoder", f"{kind} classifier", decoder_classifier(kind, "right"), ["full eval"], "right")
        found += cases_of("decoder", f"{kind} classifier", decoder_classifier(kind, "left"), ["LoRA train"], "left")
    return found


MASKED = words("""
albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm esmc eurobert
flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm longformer luke megatron-bert mobilebert modernbert
mpnet mra nomic_bert nystromformer perceiver reformer rembert roberta roberta-prelayernorm roc_bert roformer
squeezebert tapas ultrabert xlm xlm-roberta xlm-roberta-xl xmod yoso xlnet
""")
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
    "xlnet": XLNET,
    "xmod": XMOD,
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
    auto = "XLNetLMHeadModel" if kind == "xlnet" else "AutoModelForMaskedLM"
    return lambda: hugging_face(model_of(auto, kind), tokens(), "tokens")


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
    """Decoders; encoders whole as masked language models, with LoRA as classifiers; then encoders with decoders."""
    found = decoders()
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
