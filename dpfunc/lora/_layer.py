"""A layer plus its low-rank part (Hu et al. 2022): `h = W x + (alpha / rank) B A x`, A (rank, in), B (out, rank)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, stream


class LoRALayer(nn.Module):
    """A frozen layer plus its low-rank part. Stands in for the layer in a copy of the module's structure."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, scale: float, dropout: float) -> None:
        super().__init__()
        self.base, self.scale, self.dropout = base, scale, dropout
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self.train(base.training)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """The layer's own output plus `scale * B A x`."""
        inputs = x if isinstance(self.base, nn.Embedding) else F.dropout(x, self.dropout, self.training)
        low = _low_rank(self.base, inputs, self.lora_A, self.lora_B)
        output: Tensor = self.base(x, *args)
        return output + self.scale * low.to(output.dtype)

    @property
    def weight(self) -> Tensor:
        """`W + scale * B A`, for models that use the weight without calling the layer (nn.MultiheadAttention)."""
        return merged_weight(self.base, self.lora_A, self.lora_B, self.scale)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute (`bias`, `in_features`, ...) from the layer itself."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def _is_conv1d(layer: nn.Module) -> bool:
    """Hugging Face's Conv1D: a linear layer with weight (in, out). Recognised by form, not to import the library."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def adaptable(layer: nn.Module) -> bool:
    """True for a known kind of layer that holds its weight itself (no parametrization)."""
    known = isinstance(layer, (nn.Linear, nn.Embedding, nn.Conv2d)) or _is_conv1d(layer)
    return known and layer._parameters.get("weight") is not None


def _low_rank(layer: nn.Module, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`B A x` for each kind of layer."""
    if isinstance(layer, nn.Embedding):
        return F.linear(F.embedding(x, a.t(), layer.padding_idx), b)
    x = x.to(a.dtype)
    if isinstance(layer, nn.Conv2d):
        pad = layer.padding if layer.padding_mode == "zeros" else 0
        if layer.padding_mode != "zeros":
            x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        return F.conv2d(F.conv2d(x, a, None, layer.stride, pad, layer.dilation), b)
    return F.linear(F.linear(x, a), b)


def merged_weight(layer: nn.Module, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`W + scale B A` in the layer's form and dtype, added in float32 or better; a quantised weight stays as it is."""
    weight = layer._parameters["weight"]
    if weight is None or not weight.is_floating_point():
        return weight  # type: ignore[return-value]  # adaptable() has seen that it is there
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    a, b = a.to(wide), b.to(wide)
    if isinstance(layer, nn.Conv2d):
        delta = einsum(rearrange(b, "outputs rank 1 1 -> outputs rank"), a, "outputs rank, rank ... -> outputs ...")
    else:
        product = b @ a
        delta = product.T if isinstance(layer, nn.Embedding) or _is_conv1d(layer) else product
    return (weight.to(wide) + scale * delta).to(weight.dtype)


def initial_factors(layer: nn.Module, key: Key, rank: int, init: str) -> tuple[Tensor, Tensor]:
    """A by key, and B = 0, for a layer that is adaptable; in float32 where its weight is quantised."""
    shape, shape_b = _factor_shapes(layer, rank)
    weight, random = layer.get_parameter("weight"), stream(key)
    like = weight if weight.is_floating_point() else torch.empty(0, device=weight.device)
    fan_in = math.prod(shape[1:])
    inputs = 1 if isinstance(layer, nn.Embedding) else fan_in  # those that are not zero
    if init == "kaiming":  # either way `A x` has variance 1/3 for inputs of variance 1
        a = random.uniform(-1, 1, shape) / math.sqrt(inputs)
    else:
        q, _ = np.linalg.qr(random.standard_normal((fan_in, rank)))
        a = np.ascontiguousarray(q.T).reshape(shape) * math.sqrt(fan_in / inputs / 3)
    return torch.from_numpy(a).to(like), like.new_zeros(shape_b)


def _factor_shapes(layer: nn.Module, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    a: tuple[int, ...]
    b: tuple[int, ...]
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1:
            raise InvalidArgument(f"Expected Conv2d with groups=1, got groups={layer.groups}. Leave it out of targets.")
        a, b = (rank, layer.in_channels, *layer.kernel_size), (layer.out_channels, rank, 1, 1)
    elif isinstance(layer, nn.Linear):  # of 4 bits too, whose weight has another shape
        a, b = (rank, layer.in_features), (layer.out_features, rank)
    else:
        width, out = layer.get_parameter("weight").shape  # Embedding, Conv1D
        a, b = (rank, width), (out, rank)
    if rank > (limit := min(b[0], math.prod(a[1:]))):
        raise InvalidArgument(f"Expected rank <= {limit}, the rank of {layer}, got rank={rank}.")
    return a, b
