"""A stand-in for linear layers in 4 bits, which need a package that is not installed everywhere."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class PackedLinear(nn.Linear):
    """A stand-in for a layer in 4 bits: two weights a byte, unpacked in every forward pass."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.scale = float(layer.weight.detach().abs().max()) / 7
        levels = (layer.weight.detach() / self.scale).round().clamp(-7, 7).to(torch.int64) + 7
        self.weight = nn.Parameter((levels[:, ::2] * 16 + levels[:, 1::2]).to(torch.uint8), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x):
        packed = self.weight.to(torch.int64)
        weight = torch.stack([packed // 16, packed % 16], -1).flatten(1).to(x.dtype) - 7
        return F.linear(x, weight * self.scale, self.bias)


def pack(model, names):
    """The model, with its linear layers of these names packed."""
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, PackedLinear(model.get_submodule(name)))
    return model
