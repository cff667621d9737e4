"""Clipped training of linear heads in closed form, with what the mechanisms change. For comparisons, nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.mechanisms.noises import Budget, NoiseOf, batches, correlated
from benchmarks.recipes.closed import factors, head_deltas, weighted_sums
from benchmarks.recipes.data import Part

BETAS, ROOM = (0.9, 0.999), 1e-8
QUANTILE, SPEED = 0.5, 0.2  # of adaptive clipping: Andrew et al. 2021
COUNT_SHARE = 20  # its noise on the count: a batch / 20


@dataclass(frozen=True)
class Way:
    """How released gradients become weights: optimizer, schedule of its rate, and what is kept of the weights.

    Args:
        optimizer: `adam` or `sgd`. falling: the rate falls linearly to 0. corrected: the variance of the noise is taken
            off the second moment (AdamW-BC). adaptive: the bound follows the median of the norms. averaged: the mean of
            the weights of the second half. views: above 1, a gradient is the mean over so many shifts of an image by up
            to one pixel, drawn in each step, before its norm is clipped.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    falling: bool = True
    corrected: bool = False
    adaptive: bool = False
    averaged: bool = False
    views: int = 1


def shifted(x: Tensor) -> Tensor:
    """The nine shifts (n, 9, h h) of square images (n, h h) by up to one pixel."""
    images = x.unflatten(1, (math.isqrt(x.shape[1]), -1))
    ways = [(down, right) for down in (0, -1, 1) for right in (0, -1, 1)]
    return torch.stack([images.roll(way, (1, 2)).flatten(1) for way in ways], 1)


def sums_of_views(weights: Tensor, x_BVk: Tensor, y: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Sums (R, classes, k) of the clipped mean gradients of V views, and the norms (B, R) of these means.

    A squared norm is the sum over pairs of views of the products of their deltas times those of their rows.
    """
    batch, views, k = x_BVk.shape
    x = x_BVk.reshape(-1, k)
    delta, norms = head_deltas(weights, x, y.repeat_interleave(views))
    if views > 1:
        of_views = delta.view(batch, views, *delta.shape[1:]) / views
        rows = torch.einsum("bvk,bwk->bvw", x_BVk, x_BVk)
        norms = torch.einsum("bvrc,bwrc,bvw->br", of_views, of_views, rows).clamp_min(0).sqrt()
    scale = factors(norms, bounds) / views
    return weighted_sums(delta, scale.repeat_interleave(views, 0), x), norms


def noise_beside_count(std: float, count_std: float) -> float:
    """Noise of the gradients where a count takes a part of the budget: (z^-2 - (2 sigma_b)^-2)^(-1/2)."""
    return (std**-2 - (2 * count_std) ** -2) ** -0.5


def train(
    part: Part, classes: int, budget: Budget, noise: NoiseOf, bound: float, rates: Sequence[float], way: Way, seed: int
) -> Tensor:
    """Weights (R, classes, k) of heads that start at zero, one for each rate, all with the same draws."""
    source, n = torch.Generator().manual_seed(seed), len(part.y)
    shape, size, steps = (classes, part.x.shape[-1]), n / budget.batches, budget.steps
    normals = correlated(noise.strategy, steps, shape, source)
    counts = torch.randn(steps, len(rates), generator=source)
    std, count_std = noise.std, size / COUNT_SHARE
    if way.adaptive:
        std = noise_beside_count(std, count_std)
    rate, bounds = torch.tensor(rates)[:, None, None], torch.full((len(rates),), bound)
    weights = torch.zeros(len(rates), *shape)
    first, second, mean = torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros_like(weights)
    of_noise = 0.0
    for step, rows in enumerate(batches(noise, budget, n, source)):
        x = part.x[rows, None] if part.x.dim() == 2 else part.x[rows]
        if way.views > 1:
            x = x[:, torch.randperm(x.shape[1], generator=source)[: way.views]]
        sums, norms = sums_of_views(weights, x, part.y[rows], bounds)
        noisy = sums + (bounds * std)[:, None, None] * normals[step]
        grads = noisy / size
        variance = ((bounds * std / size) ** 2)[:, None, None]
        if way.adaptive:
            below = ((norms <= bounds).float() - 0.5).sum(0)
            share = (below + count_std * counts[step]) / size + 0.5
            bounds = bounds * torch.exp(-SPEED * (share - QUANTILE))
        change = grads
        if way.optimizer == "adam":
            first = torch.lerp(grads, first, BETAS[0])
            second = torch.lerp(grads.square(), second, BETAS[1])
            of_noise = BETAS[1] * of_noise + (1 - BETAS[1]) * variance
            moment = second - of_noise if way.corrected else second
            moment = torch.where(moment > 0, moment, second) / (1 - BETAS[1] ** (step + 1))
            change = first / (1 - BETAS[0] ** (step + 1)) / (moment.sqrt() + ROOM)
        weights = weights - rate * (1 - step / steps if way.falling else 1.0) * change
        late = step - steps // 2
        if late >= 0:
            mean = torch.lerp(mean, weights, 1 / (late + 1))
    return mean if way.averaged else weights


def rates_of(recipe_rate: float, recipe_steps: int, steps: int, optimizer: str) -> tuple[float, ...]:
    """The rates that a contestant may choose from, on validation data."""
    if optimizer == "sgd":
        return (1.0, 4.0, 16.0, 64.0)
    scaled = recipe_rate * math.sqrt(recipe_steps / steps)
    return tuple(scaled * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0))
