"""A made-up table and a tiny model that knows its words: what the short mode runs on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

TOPICS = {
    "sport": ("goal", "match", "team", "coach", "league", "striker", "fans", "cup"),
    "money": ("bank", "shares", "profit", "market", "loan", "price", "tax", "budget"),
    "travel": ("hotel", "flight", "beach", "ticket", "luggage", "airport", "train", "island"),
}
COMMON = ("the", "a", "was", "today", "and", "big", "new", "very", "about", "they", "said", "with")
FRAME = ("Topic:", "Text:")
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """Texts of ten words: five common ones, four of the topic, one of another topic."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        label = draw.choice(tuple(TOPICS))
        other = draw.choice([name for name in TOPICS if name != label])
        words = [*draw.choices(COMMON, k=5), *draw.choices(TOPICS[label], k=4), draw.choice(TOPICS[other])]
        draw.shuffle(words)
        made.append({"text": " ".join(words), "label": label})
    return made


def write_model(folder: Path) -> Path:
    """Configuration and tokenizer of a small Llama; its weights start at random."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = (*SPECIAL, *FRAME, *COMMON, *TOPICS, *(word for topic in TOPICS.values() for word in topic))
    known: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=known, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder
