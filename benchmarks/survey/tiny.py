"""Tiny configurations of Transformers: every known size is replaced, parts (text, vision, ...) included."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.survey.case import (
    CLASSES,
    END,
    IMAGE,
    PAD,
    START,
    VOCAB,
    Batch,
    Subject,
    hugging_face,
    text,
    token_labels,
)  # fmt: skip

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "type_vocab_size": 2,
    "num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12, "moe_shared_expert_intermediate_size": 12,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "sliding_window": 4, "decoder_start_token_id": START,
    "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "num_labels": CLASSES, "embedding_size": 16,
    "image_size": 16, "patch_size": 8, "projection_dim": 8, "num_mel_bins": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "image_token_id": IMAGE, "image_token_index": IMAGE, "audio_token_id": IMAGE, "audio_token_index": IMAGE,
    "video_token_id": 46, "video_token_index": 46, "vision_start_token_id": 47, "vision_end_token_id": 48,
}  # fmt: skip


def tiny(kind: str | type, /, **changes: Any) -> Any:
    """The configuration of a kind of model with small sizes; `changes` win; of a part, a mapping or a configuration."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind] if isinstance(kind, str) else kind
    values = {
        name: value for name, value in SIZES.items() if name in _numbers(config) and not _given(config, name, changes)
    }
    for part in getattr(config, "sub_configs", {}):
        given = changes.get(part, {})
        if isinstance(given, dict):
            default = getattr(config(), part, None)
            if default is not None:
                values[part] = tiny(type(default), **given)
                changes = {name: value for name, value in changes.items() if name != part}
    return config(**{**values, **changes})


def _numbers(config: Any) -> set[str]:
    """Names of sizes that are one number: the fields, and what is another name of one."""
    if dataclasses.is_dataclass(config):
        several = {field.name for field in dataclasses.fields(config) if _has_several(field)}
        names = {field.name for field in dataclasses.fields(config)} - several
    else:
        several, names = set(), set(inspect.signature(config.__init__).parameters)
    aliases = getattr(config, "attribute_map", {})
    return (names | {alias for alias, name in aliases.items() if name not in several} | {"num_labels"}) - {
        alias for alias, name in aliases.items() if name in several
    }


def _given(config: Any, name: str, changes: dict[str, Any]) -> bool:
    """A change says it under another name."""
    return getattr(config, "attribute_map", {}).get(name) in changes


def _has_several(field: dataclasses.Field[Any]) -> bool:
    """A size for each stage, where one number would not do."""
    default = field.default_factory() if callable(field.default_factory) else field.default
    return isinstance(default, (list, tuple))


def built(auto: str, kind: str, /, **changes: Any) -> Any:
    """A model with random weights: `auto` is the name of a class of transformers, Auto... or not."""
    import transformers

    maker = getattr(transformers, auto)
    config = tiny(kind, **changes)
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        if getattr(part, "use_cache", False):
            part.use_cache = False
    return maker.from_config(config) if auto.startswith("AutoModel") else maker(config)


def of(auto: str, kind: str, batch: Callable[[], Batch], loss: str, /, **changes: Any) -> Callable[[], Subject]:
    """A tiny model of a kind (its first word), with a batch and the name of a loss."""
    return lambda: hugging_face(built(auto, kind.split()[0], **changes), batch(), loss)


def target_text() -> Batch:
    """A text that is written: labels, and the same one token on."""
    target = text("right", (3, 5, 2, 4), 5, seed=2)
    labels = token_labels(target)
    ids_BT = torch.cat((torch.full_like(labels[:, :1], START), target["input_ids"][:, :-1]), dim=1)
    return {"decoder_input_ids": ids_BT, "decoder_attention_mask": target["attention_mask"], "labels": labels}


def written(auto: str, kind: str, inputs: Callable[[], Batch], /, **changes: Any) -> Callable[[], Subject]:
    """A model that writes a text from some inputs."""
    return of(auto, kind, lambda: {**inputs(), **target_text()}, "seq2seq", **changes)
