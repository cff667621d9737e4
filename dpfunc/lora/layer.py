"""A layer plus its low-rank part, and the arithmetic of both.

Hu et al. 2022, LoRA: `h = W x + (alpha / rank) B A x` with A (rank, in) and B (out, rank).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)

from dpfunc.checks import fail, one_of, positive, real, whole
from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, stream


@dataclass(frozen=True)
class LoRAConfig:
    """What an adapter is; stored with it.

    Args:
        targets: names of the adapted layers. rank: r >= 1. alpha: > 0.
        rslora: scale alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023).
        dropout: probability on the input of A, 0 <= dropout < 1; active in training mode only.
        train: `AB`, or `B` with A frozen (FFA-LoRA, Sun et al. 2024), which halves the noise.
        init: of A: `kaiming` uniform, or `orthonormal` rows. B starts at zero.
        also_train: names of ordinary parameters that are trained too.

    >>> LoRAConfig(targets=("q",), rank=8, alpha=16.0).scale
    2.0
    """

    targets: tuple[str, ...]
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    train: Literal["AB", "B"] = "AB"
    init: Literal["kaiming", "orthonormal"] = "kaiming"
    also_train: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole("rank", self.rank, minimum=1)
        positive("alpha", self.alpha)
        if not 0 <= real("dropout", self.dropout, "0 <= dropout < 1") < 1:
            raise fail("0 <= dropout < 1", "dropout", self.dropout)
        one_of("train", self.train, ("AB", "B"))
        one_of("init", self.init, ("kaiming", "orthonormal"))

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoRALayer(nn.Module):
    """A frozen layer plus its low-rank part. Stands in for the layer in a copy of the module's structure."""

    def __init__(self, base: nn.Module, config: LoRAConfig, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base = base
        self.scale, self.dropout = config.scale, config.dropout
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self.train(base.training)

    def forward(self, x: Tensor, *args: Any) -> Tensor:  # noqa: ANN401  (those of the layer)
        """The layer's own output plus `scale * B A x`."""
        inputs = x if isinstance(self.base, nn.Embedding) else F.dropout(x, self.dropout, self.training)
        low = low_rank(self.base, inputs, self.lora_A, self.lora_B)
        output: Tensor = self.base(x, *args)
        return output + self.scale * low.to(output.dtype)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Models that look at `layer.weight` see that of the frozen layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def is_conv1d(layer: nn.Module) -> bool:
    """Hugging Face's Conv1D: a linear layer with weight (in, out). Recognised by form, not to import the library."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and getattr(layer, "weight", None) is not None


def adaptable(layer: nn.Module) -> bool:
    """Whether a layer can be adapted."""
    return isinstance(layer, (nn.Linear, nn.Embedding, nn.Conv2d)) or is_conv1d(layer)


def low_rank(layer: nn.Module, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`B A x` for each kind of layer."""
    if isinstance(layer, nn.Embedding):
        return F.linear(F.embedding(x, a.T, layer.padding_idx), b)
    if isinstance(layer, nn.Conv2d):
        pad = layer.padding if layer.padding_mode == "zeros" else 0
        if layer.padding_mode != "zeros":
            x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        return F.conv2d(F.conv2d(x, a, None, layer.stride, pad, layer.dilation), b)
    return F.linear(F.linear(x.to(a.dtype), a), b)


def delta_weight(layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """`B A` in the shape of the layer's weight, in float32 or better."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    a, b = a.to(wide), b.to(wide)
    if isinstance(layer, nn.Conv2d):
        return torch.einsum("or,rikl->oikl", b[:, :, 0, 0], a)
    product = b @ a
    return product.T if isinstance(layer, nn.Embedding) or is_conv1d(layer) else product


def shapes(layer: nn.Module, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B.

    Raises:
        InvalidArgument: a rank above that of the weight, or a grouped convolution.
    """
    a: tuple[int, ...]
    b: tuple[int, ...]
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1:
            raise InvalidArgument(f"Expected Conv2d with groups=1, got groups={layer.groups}. Leave it out of targets.")
        a, b = (rank, layer.in_channels, *layer.kernel_size), (layer.out_channels, rank, 1, 1)
    elif isinstance(layer, nn.Embedding):
        a, b = (rank, layer.num_embeddings), (layer.embedding_dim, rank)
    else:
        weight: Tensor = layer.weight  # type: ignore[assignment]  # Linear or Conv1D
        out, width = weight.T.shape if is_conv1d(layer) else weight.shape
        a, b = (rank, width), (out, rank)
    limit = min(b[0], math.prod(a[1:]))
    if rank > limit:
        raise InvalidArgument(f"Expected rank <= {limit}, the rank of {layer}, got rank={rank}.")
    return a, b


def initial_a(key: Key, shape: tuple[int, ...], kind: str) -> Tensor:
    """A by key: uniform in +-1/sqrt(fan_in), or orthonormal rows scaled to the same variance."""
    fan_in = math.prod(shape[1:])
    random = stream(key)
    if kind == "kaiming":
        return torch.from_numpy(random.uniform(-1, 1, shape) / math.sqrt(fan_in))
    q, _ = np.linalg.qr(random.standard_normal((fan_in, shape[0])))
    return torch.from_numpy(np.ascontiguousarray(q.T).reshape(shape) / math.sqrt(3))
