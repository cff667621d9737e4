"""Transformers in plain torch, small enough to read; each builder returns a `Problem` with random weights."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.engines.problem import Problem, classification, images, next_token, text

LORA_RANK = 8
HUGGING_FACE = "a class of Hugging Face's Transformers, which has no version for JAX"


class LoRALinear(nn.Module):
    """A frozen linear layer plus a low-rank part made of two plain linear layers, which every library knows."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        # Not zero as at the start of a training: half of the gradients would be zero, and prove nothing.
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """`W x + 2 B A x`."""
        return self.base(x) + 2.0 * self.up(self.down(x))


def add_lora(module: nn.Module, targets: str, rank: int = LORA_RANK, also_train: str = r"$.") -> nn.Module:
    """Freeze all, then put a trainable low-rank part beside each linear layer whose name matches."""
    for name, param in module.named_parameters():
        param.requires_grad_(bool(re.search(also_train, name)))
    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear) and re.search(targets, n)}
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, LoRALinear(layer, rank))
    return module


def rotate(x_BHTd: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), computed where it is used so that no module has a buffer."""
    length, half = x_BHTd.shape[-2], x_BHTd.shape[-1] // 2
    frequency = 10000.0 ** -(torch.arange(half, device=x_BHTd.device) / half)
    angle_Td = torch.arange(length, device=x_BHTd.device)[:, None] * frequency
    cos, sin = angle_Td.cos(), angle_Td.sin()
    first, second = x_BHTd.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Multi-head self-attention with four separate linear layers."""

    def __init__(self, width: int, heads: int, *, causal: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x_BTd: Tensor) -> Tensor:
        """Causal attention turns by position; the other kind is for images, whose positions are added before."""
        q, k, v = (part(x_BTd).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.causal:
            q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(mixed.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`down(silu(gate x) * up x)`."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MLP(nn.Module):
    """Two linear layers with GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """`down(gelu(up x))`."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Norm, attention, norm, MLP, with residuals."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def make_norm(kind: str, width: int) -> nn.Module:
    """RMSNorm or LayerNorm."""
    return nn.RMSNorm(width, eps=1e-6) if kind == "rms" else nn.LayerNorm(width)


def decoder(
    batch_size: int,
    *,
    layers: int,
    width: int,
    hidden: int,
    length: int,
    vocabulary: int,
    norm: str,
    lora: bool,
    rank: int = LORA_RANK,
) -> Problem:
    """A language model in the style of Llama."""
    heads = max(1, width // 64)
    blocks = [
        Block(
            (make_norm(norm, width), make_norm(norm, width)),
            Attention(width, heads, causal=True, bias=False),
            GatedMLP(width, hidden),
        )
        for _ in range(layers)
    ]
    head = nn.Linear(width, vocabulary, bias=False)
    module: nn.Module = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, make_norm(norm, width), head)
    if lora:
        module = add_lora(module, r"\.(q|k|v|o|gate|up|down)$", rank)
    return Problem(module, *text(batch_size, length, vocabulary), next_token, jax_model="decoder")


class ViT(nn.Module):
    """A vision transformer with a class token (Dosovitskiy et al. 2021)."""

    def __init__(self, image: int, patch: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(
            *(
                Block(
                    (nn.LayerNorm(width), nn.LayerNorm(width)),
                    Attention(width, heads, causal=False, bias=True),
                    MLP(width, 4 * width),
                )
                for _ in range(layers)
            )
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits from the class token."""
        patches = self.patches(images_BCHW).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(patches), -1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit(batch_size: int, *, image: int, patch: int, width: int, layers: int, lora: bool) -> Problem:
    """A small vision transformer, 10 classes."""
    module: nn.Module = ViT(image, patch, width, layers, 10)
    if lora:
        module = add_lora(module, r"\.(q|k|v|o|up|down)$")
    return Problem(module, *images(batch_size, image, 10), classification, jax_model="vit")


class Logits(nn.Module):
    """A Hugging Face model as `logits = module(ids)`; position ids have a row a sample, as some libraries need them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The logits alone."""
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        return self.model(input_ids=ids_BT, position_ids=positions, use_cache=False).logits


def gpt2(batch_size: int, *, layers: int, width: int, length: int, vocabulary: int) -> Problem:
    """Hugging Face's GPT-2, all parameters, the head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=max(1, width // 64),
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    module = Logits(GPT2LMHeadModel(config))
    return Problem(module, *text(batch_size, length, vocabulary), next_token, no_jax_model=HUGGING_FACE)


class BertLogits(Logits):
    """BERT sorts positions out itself."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The logits alone."""
        return self.model(input_ids=ids_BT).logits


def bert(batch_size: int, *, layers: int, width: int, length: int, vocabulary: int) -> Problem:
    """Hugging Face's BERT for classification, low-rank parts on the encoder's linear layers, and the classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    module = add_lora(BertLogits(model), r"encoder\.layer\..*(query|key|value|dense)$", also_train=r"classifier\.")
    ids, targets = text(batch_size, length, vocabulary)[0], torch.randint(2, (batch_size,))
    return Problem(module, ids, targets, classification, no_jax_model=HUGGING_FACE)


class MeanEmbedding(nn.Module):
    """An embedding table and the mean over a sample's tokens."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.table.weight, std=1 / math.sqrt(width))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """(B, width)."""
        return self.table(ids_BT).mean(1)


def bag_of_words(batch_size: int, *, vocabulary: int, width: int, length: int) -> Problem:
    """A classifier most of which is its embedding table."""
    module = nn.Sequential(MeanEmbedding(vocabulary, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    ids, _ = text(batch_size, length, vocabulary)
    targets = torch.randint(10, (batch_size,))
    return Problem(module, ids, targets, classification, jax_model="bag of words")


def perceptron(batch_size: int, *, width: int) -> Problem:
    """Three linear layers with ReLU."""
    layers = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    inputs, targets = torch.randn(batch_size, width), torch.randint(10, (batch_size,))
    return Problem(nn.Sequential(*layers), inputs, targets, classification, jax_model="perceptron")
