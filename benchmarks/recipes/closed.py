"""Clipped training of a linear layer, or of a network with one hidden layer, in closed form: for grids, nothing else.

No generator here is fit for privacy. `tests/benchmarks/test_recipes.py` compares the clipped sum with
`dpfunc.clipped_grad`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recipes.data import Part

GAMMA = 0.01  # of `clipping.Automatic`


def layers(module: nn.Module) -> list[nn.Linear]:
    """The linear layers, first to last."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def summed(module: nn.Module, x: Tensor, y: Tensor, *, clip: bool = True) -> list[Tensor]:
    """Sum over rows of gradients of the cross-entropy, each scaled to norm 1: weight and bias of each layer.

    The gradient of a linear layer for one row is `delta x^T`, so its squared norm is `|delta|^2 (|x|^2 + 1)`.
    """
    inputs: list[Tensor] = []
    values = x
    for number, layer in enumerate(layers(module)):
        values = values.relu() if number else values
        inputs.append(values)
        values = F.linear(values, layer.weight.detach(), layer.bias.detach())
    delta = values.softmax(1) - F.one_hot(y, values.shape[1])
    deltas = [delta]
    for layer, entered in zip(layers(module)[:0:-1], inputs[:0:-1], strict=True):
        deltas.insert(0, (deltas[0] @ layer.weight.detach()) * (entered > 0))
    squares = [d.square().sum(1) * (v.square().sum(1) + 1) for d, v in zip(deltas, inputs, strict=True)]
    factors = 1 / (torch.stack(squares).sum(0).sqrt() + GAMMA) if clip else torch.ones(len(y))
    found: list[Tensor] = []
    for d, v in zip(deltas, inputs, strict=True):
        found += [(d * factors[:, None]).T @ v, (d * factors[:, None]).sum(0)]
    return found


def train(
    module: nn.Module, part: Part, q: float, steps: int, lr: float, noise_multiplier: float | None, seed: int = 0
) -> nn.Module:
    """Train in place with Adam and a rate that falls linearly. Without noise multiplier: neither clipping nor noise."""
    params = [p for layer in layers(module) for p in (layer.weight, layer.bias)]
    optimizer = torch.optim.Adam(params, lr=lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.nonzero(torch.rand(len(part.y), generator=source) < q)[:, 0]
        sums = summed(module, part.x[rows], part.y[rows], clip=noise_multiplier is not None)
        for p, total in zip(params, sums, strict=True):
            noise = (noise_multiplier or 0.0) * torch.randn(p.shape, generator=source)
            p.grad = (total + noise) / (q * len(part.y))
        optimizer.step()
        scheduler.step()
    return module
