"""One layer at a time: input and output of the shape that such a layer meets, all parameters trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines.problem import Problem, squared_error


class SelfAttention(nn.Module):
    """An attention layer that is called with one tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTd: Tensor) -> Tensor:
        """The output without the weights."""
        return self.layer(x_BTd, x_BTd, x_BTd, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTd: Tensor) -> Tensor:
        """All outputs."""
        return self.layer(x_BTd)[0]


def dp_attention(module: nn.Module) -> nn.Module:
    """The same attention in the form that Opacus needs."""
    from opacus.layers import DPMultiheadAttention

    own = module.get_submodule("layer")
    other = DPMultiheadAttention(own.embed_dim, own.num_heads, batch_first=True)
    other.load_state_dict({name: value.clone() for name, value in own.state_dict().items()})
    return SelfAttention(other)


def dp_lstm(module: nn.Module) -> nn.Module:
    """The same LSTM in the form that Opacus needs."""
    from opacus.layers import DPLSTM

    own = module.get_submodule("layer")
    other = DPLSTM(own.input_size, own.hidden_size, batch_first=True)
    other.load_state_dict(own.state_dict())
    return Recurrent(other)


Shape = tuple[int, ...]
# name -> (layer, shape of one sample's input, stand-in); "quick" divides channels and lengths by 8
LAYERS: Mapping[str, tuple[Callable[[int], nn.Module], Callable[[int], Shape], Any]] = {
    "linear": (lambda k: nn.Linear(512 // k, 512 // k), lambda k: (512 // k,), None),
    "linear-sequence": (lambda k: nn.Linear(512 // k, 512 // k), lambda k: (128 // k, 512 // k), None),
    "conv1d": (lambda k: nn.Conv1d(128 // k, 128 // k, 3, padding=1), lambda k: (128 // k, 128 // k), None),
    "conv2d": (lambda k: nn.Conv2d(64 // k, 64 // k, 3, padding=1), lambda k: (64 // k, 32 // k, 32 // k), None),
    "conv3d": (lambda k: nn.Conv3d(32 // k, 32 // k, 3, padding=1), lambda k: (32 // k, 8, 16 // k, 16 // k), None),
    "conv2d-groups": (
        lambda k: nn.Conv2d(128 // k, 128 // k, 3, padding=1, groups=8),
        lambda k: (128 // k, 16, 16),
        None,
    ),
    "embedding": (lambda k: nn.Embedding(10000 // k, 256 // k), lambda k: (128 // k,), None),
    "layer-norm": (lambda k: nn.LayerNorm(512 // k), lambda k: (128 // k, 512 // k), None),
    "group-norm": (lambda k: nn.GroupNorm(4, 64 // k), lambda k: (64 // k, 32 // k, 32 // k), None),
    "instance-norm": (
        lambda k: nn.InstanceNorm2d(64 // k, affine=True),
        lambda k: (64 // k, 32 // k, 32 // k),
        None,
    ),
    "rms-norm": (lambda k: nn.RMSNorm(512 // k, eps=1e-6), lambda k: (128 // k, 512 // k), None),
    "attention": (
        lambda k: SelfAttention(nn.MultiheadAttention(256 // k, 4, batch_first=True)),
        lambda k: (128 // k, 256 // k),
        dp_attention,
    ),
    "lstm": (
        lambda k: Recurrent(nn.LSTM(128 // k, 128 // k, batch_first=True)),
        lambda k: (32 // k, 128 // k),
        dp_lstm,
    ),
}


def layer_problem(batch_size: int, *, layer: str, divide: int) -> Problem:
    """One layer with a squared error on its output."""
    make, shape_of, stand_in = LAYERS[layer]
    module, shape = make(divide), shape_of(divide)
    if layer == "embedding":
        inputs = torch.randint(10000 // divide, (batch_size, *shape))
    else:
        inputs = torch.randn(batch_size, *shape)
    if layer.endswith("norm"):  # at the start scale is 1 and shift 0, which hides mistakes
        for param in module.parameters():
            nn.init.normal_(param, mean=0.5, std=0.2)
    with torch.no_grad():
        targets = 3.0 * torch.randn_like(module(inputs))
    why = "a single layer; whole models are compared"
    return Problem(module, inputs, targets, squared_error, stand_in, no_jax_model=why)
