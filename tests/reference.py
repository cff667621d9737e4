"""The truth: slow, obvious loops over single samples in plain autograd. Nothing here uses dpfunc."""

from __future__ import annotations

import math

import torch
from torch.utils import _pytree as pytree


def loop_gradients(loss_fn, params, batch):
    """Losses and gradients of each sample, one backward pass each: list of (loss, {name: gradient})."""
    leaves = pytree.tree_leaves(batch)
    results = []
    for i in range(leaves[0].shape[0]):
        row = pytree.tree_map(lambda leaf, i=i: leaf[i : i + 1], batch)
        leaf_params = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        loss = loss_fn(leaf_params, row)[0]
        grads = torch.autograd.grad(loss, list(leaf_params.values()), allow_unused=True)
        found = zip(leaf_params.items(), grads, strict=True)
        dense = {name: torch.zeros_like(p) if grad is None else grad.to_dense() for (name, p), grad in found}
        results.append((loss.detach(), dense))
    return results


def group_norms(grads, group_of):
    """Norm of one sample's gradient in each group, in Python floats from float64."""
    squares = {}
    for name, grad in grads.items():
        squares[group_of[name]] = squares.get(group_of[name], 0.0) + float(grad.double().square().sum())
    return {group: math.sqrt(square) for group, square in squares.items()}


def loop_clipped_sum(loss_fn, params, batch, factor, group_of, bounds):
    """Sum of gradients scaled by `factor(norm, bound)` for each group; samples that are not finite are left out."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    for _, grads in loop_gradients(loss_fn, params, batch):
        norms = group_norms(grads, group_of)
        if not all(math.isfinite(norm) for norm in norms.values()):
            continue
        for name, grad in grads.items():
            group = group_of[name]
            total[name] += factor(norms[group], bounds[group]) * grad.double()
    return total
