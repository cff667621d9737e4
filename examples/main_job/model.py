"""The pretrained encoder, cut in two: frozen lower layers, computed once a text, and an upper part that is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer


class ModelError(Exception):
    """A model cannot be used by this job."""


@dataclass(frozen=True)
class Encoder:
    """A BERT-like encoder and its tokenizer."""

    model: nn.Module
    tokenizer: object
    width: int
    num_layers: int


def load_encoder(path: Path) -> Encoder:
    """Load from a folder, never from the network. Eager attention: vmap cannot run the fused one with a mask.

    Raises:
        ModelError: not an encoder of BERT's form.
    """
    model = AutoModel.from_pretrained(path, local_files_only=True, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not hasattr(model, "embeddings") or not hasattr(getattr(model, "encoder", None), "layer"):
        raise ModelError(f"Expected an encoder of BERT's form (embeddings, encoder.layer), got {type(model).__name__}.")
    return Encoder(model, tokenizer, model.config.hidden_size, model.config.num_hidden_layers)


def tokenize(encoder: Encoder, texts: list[str], max_length: int) -> dict[str, Tensor]:
    """Token ids and mask, padded to one length."""
    return dict(
        encoder.tokenizer(texts, truncation=True, max_length=max_length, padding="max_length", return_tensors="pt")
    )


def lower_part(
    encoder: Encoder, texts: list[str], first_layer: int, max_length: int, quiet: bool = False
) -> dict[str, Tensor]:
    """Hidden states before `first_layer` (float16) and masks: a function of each text alone, so it costs no privacy.

    But for rounding, which may depend on how many are computed at once; `dpfunc train` computes each by itself.
    """
    tokens = tokenize(encoder, texts, max_length)
    hidden = torch.empty(len(texts), max_length, encoder.width, dtype=torch.float16)
    with torch.no_grad():
        starts = tqdm(range(0, len(texts), 32), desc="frozen layers", unit="batch", leave=False, disable=quiet)
        for start in starts:
            ids, mask = (tokens[name][start : start + 32] for name in ("input_ids", "attention_mask"))
            x_BTd = encoder.model.embeddings(input_ids=ids)
            hidden[start : start + 32] = run_layers(
                encoder.model.encoder.layer[:first_layer], x_BTd, mask.bool()
            ).half()
    return {"hidden": hidden, "mask": tokens["attention_mask"].bool()}


def run_layers(layers: Iterable[nn.Module], x_BTd: Tensor, mask: Tensor) -> Tensor:
    """Encoder layers under an additive mask (B, 1, 1, T)."""
    bias_B11T = torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None, None, :]
    for layer in layers:
        output = layer(x_BTd, bias_B11T)
        x_BTd = output[0] if isinstance(output, tuple) else output
    return x_BTd


class Upper(nn.Module):
    """The top layers, mean pooling and a linear classifier that starts at zero."""

    def __init__(self, encoder: Encoder, first_layer: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(encoder.model.encoder.layer[first_layer:])
        self.head = nn.Linear(encoder.width, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Normalised mean (B, d) over the tokens of hidden states (B, T, d) under a mask (B, T)."""
        x_BTd = run_layers(self.layers, hidden.float(), mask)
        weights_BT1 = mask[..., None].float()
        pooled_Bd = (x_BTd * weights_BT1).sum(1) / weights_BT1.sum(1).clamp(min=1)
        return F.layer_norm(pooled_Bd, pooled_Bd.shape[-1:])

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Logits (B, classes)."""
        return self.head(self.pool(hidden, mask))


def per_sample_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample."""
    return F.cross_entropy(logits, labels, reduction="none")
