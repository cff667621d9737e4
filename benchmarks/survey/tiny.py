"""Tiny configurations of Transformers: every known size is replaced, parts (text, vision, ...) included."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from benchmarks.survey.case import CLASSES, END, PAD, START, VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "type_vocab_size": 2,
    "num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12, "moe_shared_expert_intermediate_size": 12,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "sliding_window": 4, "decoder_start_token_id": START,
    "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "num_labels": CLASSES, "embedding_size": 16,
    "image_size": 16, "patch_size": 8, "projection_dim": 8, "num_mel_bins": 8,
}  # fmt: skip


def tiny(kind: str | type, /, **changes: Any) -> Any:  # noqa: ANN401
    """The configuration of a kind of model with small sizes; `changes` win; of a part, a mapping or a configuration."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind] if isinstance(kind, str) else kind
    if dataclasses.is_dataclass(config):
        known = {field.name for field in dataclasses.fields(config) if not _has_several(field)}
    else:
        known = set(inspect.signature(config.__init__).parameters)
    known |= set(getattr(config, "attribute_map", {}))
    values = {name: value for name, value in SIZES.items() if name in known}
    for part in getattr(config, "sub_configs", {}):
        given = changes.get(part, {})
        if isinstance(given, dict):
            default = getattr(config(), part, None)
            if default is not None:
                values[part] = tiny(type(default), **given)
                changes = {name: value for name, value in changes.items() if name != part}
    return config(**{**values, **changes})


def _has_several(field: dataclasses.Field[Any]) -> bool:
    """A size for each stage, where one number would not do."""
    default = field.default_factory() if callable(field.default_factory) else field.default
    return isinstance(default, (list, tuple))


def built(auto: str, kind: str, /, **changes: Any) -> Any:  # noqa: ANN401
    """A model with random weights: `auto` is the name of a class of transformers, Auto... or not."""
    import transformers

    maker = getattr(transformers, auto)
    config = tiny(kind, **changes)
    return maker.from_config(config) if auto.startswith("Auto") else maker(config)
