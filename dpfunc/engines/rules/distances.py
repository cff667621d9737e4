"""Similarities, distances, outer products and repetitions, decomposed into operations that broadcast.

The formulas and their guards against division by zero are those of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """`(x1 / |x1|) . (x2 / |x2|)`; `dim` is an axis of the result of broadcasting."""
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    dim = dim - len(shape) if dim >= 0 else dim
    if x1.shape[dim:] != shape[dim:] or x2.shape[dim:] != shape[dim:]:  # the axis itself may be broadcast
        x1, x2 = (_broadcast_along(x, dim, shape[dim]) for x in (x1, x2))
    return ((x1 / _length(x1, dim, eps)) * (x2 / _length(x2, dim, eps))).sum(dim)


def _broadcast_along(x: Tensor, dim: int, size: int) -> Tensor:
    while x.ndim < -dim:
        x = x.unsqueeze(0)
    sizes = [-1] * x.ndim
    sizes[dim] = size
    return x if x.shape[dim] == size else x.expand(sizes)


def _length(x: Tensor, dim: int, eps: float) -> Tensor:
    """At least eps; the gradient is that of the length itself, as in torch."""
    length: Tensor = torch.linalg.vector_norm(x, 2, dim, True)
    return length + (length.clamp(min=eps) - length).detach()


def _pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """`|x1 - x2 + eps|_p` over the last axis."""
    distances: Tensor = torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)
    return distances


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """All distances between rows, from their differences: (..., P, d), (..., R, d) -> (..., P, R)."""
    distances: Tensor = torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)
    return distances


def _outer(input: Tensor, vec2: Tensor) -> Tensor:
    return input.unsqueeze(1) * vec2.unsqueeze(0)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(batch1, batch2)
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # then torch does not look at it
        return product
    return product + (input if beta == 1 else input * beta)


def _repeat(input: Tensor, *sizes: Any) -> Tensor:
    """Every axis (s) as (1, s), expanded to (r, s), joined to r * s."""
    return _tiled(input, sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes)


def _tile(input: Tensor, *dims: Any) -> Tensor:
    given = tuple(dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims)
    return _tiled(input, (1,) * (input.ndim - len(given)) + given)


def _tiled(input: Tensor, repeats: Sequence[int]) -> Tensor:
    own = (1,) * (len(repeats) - input.ndim) + tuple(input.shape)
    separated = input.reshape([part for size in own for part in (1, size)])
    expanded = separated.expand([part for pair in zip(repeats, own, strict=True) for part in pair])
    return expanded.reshape([times * size for times, size in zip(repeats, own, strict=True)])


DISTANCES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.cosine_similarity: _cosine_similarity,
    torch.cosine_similarity: _cosine_similarity,
    F.pairwise_distance: _pairwise_distance,
    torch.pairwise_distance: _pairwise_distance,
    torch.cdist: _cdist,
    torch.outer: _outer,
    Tensor.outer: _outer,
    torch.ger: _outer,
    Tensor.ger: _outer,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    Tensor.repeat: _repeat,
    torch.tile: _tile,
    Tensor.tile: _tile,
}
