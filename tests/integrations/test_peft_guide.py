"""The guide of PEFT runs from its first line to its last, with a tiny model in place of the one it downloads."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "peft.md"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WORDS = ["my", "favourite", "number", "is"]


def write_model(folder):
    """A random Llama and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *WORDS, *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes, **ids)).save_pretrained(folder)


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    """L7, K6: the own loop, saving, several adapters, prefix tuning, checkpointing."""
    text = GUIDE.read_text()
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)).replace(NAME, str(tmp_path / "model"))
    names = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable. is deprecated")
        exec(compile(code, str(GUIDE), "exec"), names)
    assert names["state"].step == 30
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert float(names["plan"].epsilon) == 8.0
    assert "causal_lm" in capsys.readouterr().out
