"""Clipped training of linear heads, many at once, or of a network with one hidden layer, in closed form.

For comparisons, nothing else: no generator here is fit for privacy. `tests/benchmarks/test_recipes.py` compares the
clipped sums with `dpfunc.clipped.clipped_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recipes.data import Part


@dataclass(frozen=True)
class Setting:
    """Of one run: rate of the first step, bound of `Flat`, noise / bound."""

    rate: float
    bound: float
    noise_multiplier: float
    optimizer: Literal["adam", "sgd"] = "adam"


def factors(norms: Tensor, bounds: Tensor | float) -> Tensor:
    """Clip factors of `Flat`."""
    return (bounds / norms.clamp_min(1e-12)).clamp(max=1.0)


def head_deltas(weights: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (B, R, classes) of the cross-entropy for the logits `x @ weight.T` of R weights, and norms (B, R).

    The gradient of one row for a weight is `delta x^T`, whose norm is `|delta| |x|`.
    """
    runs, classes, k = weights.shape
    logits = (x @ weights.view(-1, k).T).view(-1, runs, classes)
    delta = logits.softmax(2) - F.one_hot(y, classes)[:, None]
    return delta, delta.norm(dim=2) * x.norm(dim=1, keepdim=True)


def weighted_sums(delta: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """Sums (R, classes, k) of `delta x^T` with weights (B, R)."""
    _, runs, classes = delta.shape
    return ((delta * weights[..., None]).view(-1, runs * classes).T @ x).view(runs, classes, -1)


def head_sums(weights: Tensor, x: Tensor, y: Tensor, bounds: Tensor) -> Tensor:
    """Sums (R, classes, k) of clipped gradients of the cross-entropy of `x @ weight.T`, for R weights."""
    delta, norms = head_deltas(weights, x, y)
    return weighted_sums(delta, factors(norms, bounds), x)


def head(part: Part, classes: int, q: float, steps: int, settings: Sequence[Setting], seed: int) -> Tensor:
    """Weights (R, classes, k) of heads that start at zero, one for each setting, all with the same draws.

    With Adam and a rate that falls linearly to 0; or SGD with a constant one, and no momentum.
    """
    source, n = torch.Generator().manual_seed(seed), len(part.y)
    rates, bounds, noise = (
        torch.tensor([getattr(each, name) for each in settings]) for name in ("rate", "bound", "noise_multiplier")
    )
    weights = torch.zeros(len(settings), classes, part.x.shape[1])
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    adam = settings[0].optimizer == "adam"
    for step in range(1, steps + 1):
        rows = torch.nonzero(torch.rand(n, generator=source) < q)[:, 0]
        sums = head_sums(weights, part.x[rows], part.y[rows], bounds)
        normals = torch.randn(weights.shape, generator=source)
        grads = (sums + (bounds * noise)[:, None, None] * normals) / (q * n)
        if adam:
            first = torch.lerp(grads, first, 0.9)
            second = torch.lerp(grads.square(), second, 0.999)
            way = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
            weights = weights - (rates * (1 - (step - 1) / steps))[:, None, None] * way
        else:
            weights = weights - rates[:, None, None] * grads
    return weights


def fitted(part: Part, classes: int, decay: float) -> Tensor:
    """Weights of the head without privacy, to convergence: least mean cross-entropy + decay |W|^2 / 2."""
    weight = torch.zeros(classes, part.x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(part.x @ weight.T, part.y) + decay * weight.square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach()


def layers(module: nn.Module) -> list[nn.Linear]:
    """The linear layers, first to last."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def network_sum(module: nn.Module, x: Tensor, y: Tensor, bound: float) -> list[Tensor]:
    """Sum of clipped gradients of the cross-entropy: weight and bias of each layer.

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
    scale = factors(torch.stack(squares).sum(0).sqrt(), bound)[:, None]
    found: list[Tensor] = []
    for d, v in zip(deltas, inputs, strict=True):
        found += [(d * scale).T @ v, (d * scale).sum(0)]
    return found


def network(module: nn.Module, part: Part, q: float, steps: int, setting: Setting, seed: int) -> None:
    """Train in place with Adam and a rate that falls linearly."""
    params = [p for layer in layers(module) for p in (layer.weight, layer.bias)]
    optimizer = torch.optim.Adam(params, lr=setting.rate)
    source, n = torch.Generator().manual_seed(seed), len(part.y)
    for step in range(steps):
        rows = torch.nonzero(torch.rand(n, generator=source) < q)[:, 0]
        sums = network_sum(module, part.x[rows], part.y[rows], setting.bound)
        for p, total in zip(params, sums, strict=True):
            p.grad = (total + setting.noise_multiplier * setting.bound * torch.randn(p.shape, generator=source)) / (
                q * n
            )
        optimizer.param_groups[0]["lr"] = setting.rate * (1 - step / steps)
        optimizer.step()
