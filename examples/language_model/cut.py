"""A causal language model, cut in two: frozen lower layers, run once a text, and an upper part that is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

IGNORED = -100


@dataclass(frozen=True)
class LanguageModel:
    """A model of Transformers and what turns texts into tokens and back."""

    name: str
    model: nn.Module
    encode: Callable[[str, int], list[int]]
    decode: Callable[[list[int]], str]


def load_model(folder: Path) -> LanguageModel:
    """Load from a folder, never from the network."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(text: str, length: int) -> list[int]:
        return list(tokenizer(text, truncation=True, max_length=length)["input_ids"])

    return LanguageModel(folder.name, model, encode, tokenizer.decode)


def tiny_model() -> LanguageModel:
    """A random model of the same family over bytes: to see that everything works, not to learn anything."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    return LanguageModel(
        "tiny", model, lambda text, length: list(text.encode()[:length]),
        lambda ids: bytes(ids).decode(errors="replace"),
    )  # fmt: skip


def tokenize(language: LanguageModel, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
    """Ids (N, T), padded at the end, and labels, -100 at the padding.

    Attention is causal and padding comes last, so that no real token sees it: no attention mask is needed.
    """
    rows = [language.encode(text, length) for text in texts]
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full((len(rows), length), IGNORED)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = labels[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return ids, labels


def _shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the structure with the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def cut(model: nn.Module, num_upper: int) -> tuple[nn.Module, nn.Module]:
    """The lower layers with the embedding, and the upper layers with the head: each a causal model of its own.

    Args:
        model: of the Llama family (`model.model.layers`). num_upper: layers of the upper part, >= 1.
    """
    lower, upper = _shared_copy(model), _shared_copy(model)
    lower.model.layers, lower.model.norm = lower.model.layers[:-num_upper], nn.Identity()
    upper.model.layers = upper.model.layers[-num_upper:]
    for part in (lower, upper):
        part.config.num_hidden_layers = len(part.model.layers)
        part.config.use_cache = False  # layers keep their numbers, and a cache of this many layers would not have them
    return lower.eval(), upper.eval()


def run_lower(lower: nn.Module, ids: Tensor, quiet: bool = False) -> Tensor:
    """Hidden states (N, T, d) before the upper part: a function of each text alone, so it costs no privacy.

    But for rounding, which may depend on how many are computed at once; `dpfunc train` computes each by itself.
    """
    with torch.no_grad():
        return torch.cat(
            [
                lower.model(input_ids=chunk, use_cache=False).last_hidden_state
                for chunk in tqdm(ids.split(16), desc="frozen layers", unit="batch", leave=False, disable=quiet)
            ]
        )


def joined(model: nn.Module, upper: nn.Module) -> nn.Module:
    """The whole model with another upper part."""
    whole = _shared_copy(model)
    count = len(upper.model.layers)
    whole.model.layers = nn.ModuleList([*whole.model.layers[:-count], *upper.model.layers])
    return whole.eval()


def continuation(language: LanguageModel, model: nn.Module, prompt: str, num_tokens: int) -> str:
    """A greedy continuation: what is most likely to the model."""
    ids = torch.tensor([language.encode(prompt, 64)])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return language.decode(output[0].tolist())
