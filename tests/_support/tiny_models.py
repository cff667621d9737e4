"""A tiny model on disk, as its authors publish one."""

from __future__ import annotations

import torch

WORDS = ["my", "favourite", "number", "is"]
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def word_tokenizer(words, unknown="<unk>", **named):
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, unk_token=unknown, **named)


def write_model(folder):
    """A random Llama and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = ["<pad>", "<s>", "</s>", "<unk>", *WORDS, *map(str, range(10))]
    word_tokenizer(words, pad_token="<pad>", bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes, **ids)).save_pretrained(folder)
