"""Networks in plain torch, small enough to read; each builder returns a `Problem` with random weights."""

from __future__ import annotations

import math
import re
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.engines.problem import Problem, classification, images, next_token, text

LORA_RANK = 8
CLASSES = 10
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
    """Multi-head self-attention with four separate linear layers.

    Causal attention has no biases and turns by position; the other is for images, whose positions are added before.
    """

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = max(1, width // 64), causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=not causal) for _ in range(4))

    def forward(self, x_BTd: Tensor) -> Tensor:
        q, k, v = (part(x_BTd).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.causal:
            q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with GELU; or three without biases, SwiGLU (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int, *, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None
        self.up, self.down = nn.Linear(width, hidden, bias=not gated), nn.Linear(hidden, width, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Norm, attention, norm, MLP, with residuals; of a decoder, or of a model for images."""

    def __init__(self, width: int, hidden: int, norm: partial[nn.Module], *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention, self.mlp = Attention(width, causal=causal), MLP(width, hidden, gated=causal)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def decoder(
    batch_size: int, *, layers: int, width: int, hidden: int, length: int, vocabulary: int, norm: str, lora: bool,
    rank: int = LORA_RANK,
) -> Problem:  # fmt: skip
    """A language model in the style of Llama."""
    make_norm = {"rms": partial(nn.RMSNorm, eps=1e-6), "layer": partial(nn.LayerNorm)}[norm]
    blocks = [Block(width, hidden, make_norm, causal=True) for _ in range(layers)]
    head = nn.Linear(width, vocabulary, bias=False)
    module: nn.Module = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, make_norm(width), head)
    if lora:
        module = add_lora(module, r"\.(q|k|v|o|gate|up|down)$", rank)
    return Problem(module, *text(batch_size, length, vocabulary), next_token, jax_model="decoder")


class ViT(nn.Module):
    """A vision transformer with a class token (Dosovitskiy et al. 2021)."""

    def __init__(self, image: int, patch: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        norm = partial(nn.LayerNorm)
        self.blocks = nn.Sequential(*(Block(width, 4 * width, norm, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        patches = self.patches(images_BCHW).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(patches), -1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit(batch_size: int, *, image: int, patch: int, width: int, layers: int, lora: bool) -> Problem:
    module: nn.Module = ViT(image, patch, width, layers)
    if lora:
        module = add_lora(module, r"\.(q|k|v|o|up|down)$")
    return Problem(module, *images(batch_size, image, CLASSES), classification, jax_model="vit")


class Logits(nn.Module):
    """A Hugging Face model as `logits = module(ids)`; position ids have a row a sample where a model is given them."""

    def __init__(self, model: nn.Module, *, positions: bool) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, ids_BT: Tensor) -> Tensor:
        if not self.positions:
            return self.model(input_ids=ids_BT).logits
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        return self.model(input_ids=ids_BT, position_ids=positions, use_cache=False).logits


def gpt2(batch_size: int, *, layers: int, width: int, length: int, vocabulary: int) -> Problem:
    """Hugging Face's GPT-2, all parameters, the head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=max(1, width // 64),
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    module = Logits(GPT2LMHeadModel(config), positions=True)
    return Problem(module, *text(batch_size, length, vocabulary), next_token, no_jax_model=HUGGING_FACE)


def bert(batch_size: int, *, layers: int, width: int, length: int, vocabulary: int) -> Problem:
    """Hugging Face's BERT for classification, low-rank parts on the encoder's linear layers, and the classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width, max_position_embeddings=length, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    module = Logits(BertForSequenceClassification(config), positions=False)
    module = add_lora(module, r"encoder\.layer\..*(query|key|value|dense)$", also_train=r"classifier\.")
    ids, targets = text(batch_size, length, vocabulary)[0], torch.randint(2, (batch_size,))
    return Problem(module, ids, targets, classification, no_jax_model=HUGGING_FACE)


class MeanEmbedding(nn.Module):
    """An embedding table and the mean over a sample's tokens."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.table.weight, std=1 / math.sqrt(width))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.table(ids_BT).mean(1)


def bag_of_words(batch_size: int, *, vocabulary: int, width: int, length: int) -> Problem:
    """A classifier most of which is its embedding table."""
    layers = (MeanEmbedding(vocabulary, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))
    ids, _ = text(batch_size, length, vocabulary)
    targets = torch.randint(CLASSES, (batch_size,))
    return Problem(nn.Sequential(*layers), ids, targets, classification, jax_model="bag of words")


def perceptron(batch_size: int, *, width: int) -> Problem:
    layers = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))
    inputs, targets = torch.randn(batch_size, width), torch.randint(CLASSES, (batch_size,))
    return Problem(nn.Sequential(*layers), inputs, targets, classification, jax_model="perceptron")


LIKE_W3 = "a larger network of the layers of w3, which is the one that takes part"
# Numbers are channels of 3x3 convolutions, "M" halves the image (Simonyan and Zisserman 2015, Table 1).
VGG = {
    11: (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    19: (64, 64, "M", 128, 128, "M", *[256] * 4, "M", *[512] * 4, "M", *[512] * 4, "M"),
}


def conv(width_in: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias, and GroupNorm."""
    norm = nn.GroupNorm(min(16, width // 4), width)
    return [nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False), norm]


def classifier(layers: list[nn.Module], width: int, batch_size: int, image: int, **jax: str) -> Problem:
    """Layers, the mean over the image, and a linear layer."""
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    return Problem(body, *images(batch_size, image, CLASSES), classification, **jax)


def plain_convnet(batch_size: int, *, widths: tuple[int, ...], image: int) -> Problem:
    """Two convolutions a width, the second with stride 2."""
    layers: list[nn.Module] = []
    for before, width in zip((3, *widths), widths, strict=False):
        layers += [*conv(before, width, 3), nn.ReLU(), *conv(width, width, 3, stride=2), nn.ReLU()]
    return classifier(layers, widths[-1], batch_size, image, jax_model="convnet")


def vgg(batch_size: int, *, depth: int, image: int, divide: int) -> Problem:
    """VGG with GroupNorm; `divide` makes it narrower."""
    layers: list[nn.Module] = []
    before = 3
    for entry in VGG[depth]:
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [*conv(before, entry // divide, 3), nn.ReLU()]
            before = entry // divide
    return classifier(layers, before, batch_size, image, no_jax_model=LIKE_W3)


def mnist_net(batch_size: int, *, widths: tuple[int, int, int]) -> Problem:
    """The network for MNIST of Tramer and Boneh 2021, Table 9, with ReLU: two convolutions, pooled, and two layers."""
    first, second, hidden = widths
    body = nn.Sequential(
        *(nn.Conv2d(1, first, 8, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(first, second, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(16 * second, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)),
    )
    return Problem(body, *images(batch_size, 28, CLASSES, channels=1), classification, jax_model="mnist")


class Residual(nn.Module):
    """`relu(x + body(x))`, with a 1x1 convolution beside the body where the shape changes.

    `basic`: two 3x3 convolutions (He et al. 2016). `grouped`: 1x1, 3x3 in 8 groups, 1x1 (Xie et al. 2017).
    """

    def __init__(self, kind: str, before: int, width: int, stride: int) -> None:
        super().__init__()
        if kind == "basic":
            body = [*conv(before, width, 3, stride), nn.ReLU(), *conv(width, width, 3)]
        else:
            inner = width // 2
            middle = [nn.ReLU(), *conv(inner, inner, 3, stride, groups=8), nn.ReLU()]
            body = [*conv(before, inner, 1), *middle, *conv(inner, width, 1)]
        shortcut = conv(before, width, 1, stride) if stride > 1 or before != width else []
        self.body, self.shortcut, self.last = nn.Sequential(*body), nn.Sequential(*shortcut), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) + self.shortcut(x))


def residual_net(batch_size: int, *, kind: str, widths: tuple[int, ...], blocks: int, image: int) -> Problem:
    """A first convolution, then `blocks` residual blocks a width; every width but the first halves the image."""
    layers: list[nn.Module] = [*conv(3, widths[0], 3), nn.ReLU()]
    before = widths[0]
    for stage, width in enumerate(widths):
        for number in range(blocks):
            layers.append(Residual(kind, before, width, 2 if stage > 0 and number == 0 else 1))
            before = width
    return classifier(layers, before, batch_size, image, no_jax_model=LIKE_W3)
