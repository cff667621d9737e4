"""Small models of every kind, with a batch and a per-sample loss for each: name -> Case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dpfunc.functional import BIASES, functionalize
from dpfunc.lora import attach
from dpfunc.rng import insecure_key

VOCAB, LENGTH, CLASSES = 50, 6, 3


@dataclass(frozen=True)
class Case:
    """A loss, its parameters and a batch."""

    loss_fn: Callable[..., torch.Tensor]
    params: dict[str, torch.Tensor]
    batch: Any


class TinyCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, groups=2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.conv2(F.relu(self.norm(self.conv1(x)))).mean((2, 3)))


class TinyTransformer(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.position = nn.Parameter(torch.randn(1, LENGTH, 16) * 0.1)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCAB if tied else CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids) + self.position))


def tiny_bert(**changes):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES, attn_implementation="eager", **changes,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=16, attn_implementation="eager",
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def peft_bert():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"])
    model = get_peft_model(tiny_bert(), config).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_()
    return model


def seeded(seed):
    """A generator of the device on which a case is built."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def _ints(high, size, seed):
    return torch.randint(high, size, generator=seeded(seed))


def image_batch(size, dtype=torch.float32):
    x = torch.randn(size, 3, 8, 8, generator=seeded(1), dtype=torch.float64)
    return {"x": x.to(dtype), "y": _ints(CLASSES, (size,), 2)}


def token_batch(size):
    lengths = torch.randint(2, LENGTH + 1, (size, 1), generator=seeded(5))
    mask = (torch.arange(LENGTH)[None] < lengths).long()
    return {"ids": _ints(VOCAB, (size, LENGTH), 3), "mask": mask, "y": _ints(CLASSES, (size,), 4)}


def classify(forward):
    return lambda p, b: F.cross_entropy(forward(p, b["x"]), b["y"], reduction="none")


def classify_tokens(forward):
    return lambda p, b: F.cross_entropy(forward(p, b["ids"]).mean(1), b["y"], reduction="none")


def next_token(forward, logits=lambda out: out):
    """Mean over the sample's own tokens."""

    def loss_fn(p, b):
        scores = logits(forward(p, b["ids"]))[:, :-1]
        return F.cross_entropy(scores.transpose(1, 2), b["ids"][:, 1:], reduction="none").mean(1)

    return loss_fn


def next_token_hf(forward):
    return next_token(forward, lambda out: out.logits)


def hf_classify(forward):
    """With an additive mask (B, 1, 1, T): transformers looks at the values of a 2-D one, which vmap cannot do."""

    def loss_fn(p, b):
        mask = (1.0 - b["mask"].to(torch.float64))[:, None, None, :] * -1e9
        logits = forward(p, input_ids=b["ids"], attention_mask=mask.to(next(iter(p.values())).dtype)).logits
        return F.cross_entropy(logits, b["y"], reduction="none")

    return loss_fn


def build(name, size=5, dtype=torch.float32, device="cpu"):
    """The case of a name. Models are seeded; float64 where the dtype says so."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return {**CASES, **FAMILIES}[name](size, dtype)


def whole(make, loss, trainable=None):
    """A model whose parameters of some names are trained, all of them by default; of images, or of tokens."""

    def case(size, dtype):
        forward, params = functionalize(make().to(dtype), trainable)
        return Case(loss(forward), params, image_batch(size, dtype) if loss is classify else token_batch(size))

    return case


def adapted(make, loss, targets, also_train=()):
    """A model with LoRA of this library, whose B are not zero."""

    def case(size, dtype):
        model = make().to(dtype)
        adapter = attach(model, insecure_key(0), targets=targets, rank=2, alpha=4, also_train=also_train)
        params = {name: torch.randn_like(p) if "lora_B" in name else p for name, p in adapter.params.items()}
        return Case(loss(adapter.forward), params, token_batch(size))

    return case


def _mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, CLASSES))


_transformer = lambda tied=False: TinyTransformer(tied).eval()
CASES = {
    "mlp": whole(_mlp, classify),
    "cnn": whole(TinyCNN, classify),
    "transformer full": whole(_transformer, classify_tokens),
    "transformer bias-only": whole(_transformer, classify_tokens, BIASES),
    "transformer LoRA": adapted(_transformer, classify_tokens, ["embed", "encoder.linear1"], "^head"),
    "tied weights": whole(lambda: _transformer(tied=True), next_token),
    "GPT-2 full, tied": whole(tiny_gpt2, next_token_hf),
}
# Families that the zoo compares with single samples; here for the recorded runs.
FAMILIES = {
    "BERT top layer": whole(tiny_bert, hf_classify, r"encoder\.layer\.1|classifier"),
    "GPT-2 LoRA": adapted(tiny_gpt2, next_token_hf, r"c_attn|mlp\.c_fc"),
    "PEFT LoRA": whole(peft_bert, hf_classify),
}
