"""Language models that read from left to right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.survey.case import Batch, Case, Subject, cases_of, classes, text, token_labels, words
from benchmarks.survey.tiny import of

PLAIN = words("""
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
CHANGED: dict[str, dict[str, Any]] = {
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
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "feed_forward_size": 24,
                 "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "attention_head_size": 8, "num_buckets": 2},
    "xlm": {"causal": True},
    "xlnet": {"d_head": 8, "d_inner": 24},
    "xlstm": {"num_heads": 2, "embedding_dim": 16, "num_blocks": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": MLA,
    "zamba": {"layer_types": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3, "mamba_d_state": 4,
        "n_mamba_heads": 2, "attention_hidden_size": 32, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
MAIN = words("""
llama mistral mixtral qwen2 qwen3 gemma gemma2 gemma3_text phi3 gpt2 gpt_neox opt bloom falcon mamba olmo2 mpt
starcoder2 gpt_oss
""")
CLASSIFIERS = words("llama gpt2 opt qwen2 gemma bloom falcon gpt_neox mistral phi3")


def language_model(kind: str, padding: str) -> Callable[[], Subject]:
    def batch() -> Batch:
        words = text(padding)
        return {**words, "labels": token_labels(words)}

    return of("AutoModelForCausalLM", kind, batch, "causal", **CHANGED.get(kind, {}))


def classifier(kind: str, padding: str) -> Callable[[], Subject]:
    return of("AutoModelForSequenceClassification", kind, lambda: {**text(padding), "labels": classes()}, "classes")


def cases() -> list[Case]:
    """Every family whole and with LoRA; the main ones also in the other mode, padded on the other side, by biases."""
    found = []
    for kind in sorted({*PLAIN, *CHANGED}):
        right, left = language_model(kind, "right"), language_model(kind, "left")
        found += cases_of("decoder", kind, right, ["full train" if kind == "reformer" else "full eval"], "right")
        found += cases_of("decoder", kind, left, ["LoRA train"], "left")
        if kind in MAIN:
            found += cases_of("decoder", kind, right, ["full train", "biases eval"], "right")
            found += cases_of("decoder", kind, left, ["full eval"], "left")
    for kind in CLASSIFIERS:
        found += cases_of("decoder", f"{kind} classifier", classifier(kind, "right"), ["full eval"], "right")
        found += cases_of("decoder", f"{kind} classifier", classifier(kind, "left"), ["LoRA train"], "left")
    return found
