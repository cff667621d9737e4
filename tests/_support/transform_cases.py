"""Per-sample gradients of models by transforms and by a loop."""

from __future__ import annotations

import torch
from torch.func import grad, vmap


def per_sample(forward, params, x, pick=lambda out: out):
    """The batch axis of 1 stays inside."""
    loss = lambda p, row: pick(forward(p, row[None])).square().mean()
    return vmap(grad(loss), in_dims=(None, 0), randomness="different")(params, x)


def loop(forward, params, x, pick=lambda out: out):
    rows = []
    for row in x:
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        loss = pick(forward(leaves, row[None])).square().mean()
        rows.append(torch.autograd.grad(loss, list(leaves.values())))
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(params)}


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name in got:
        assert torch.allclose(got[name], expected[name], rtol=1e-3, atol=1e-5 * largest), name


def logits(output):
    return output.logits
