"""Models and adapters: before and after, and per-sample gradients by transforms and by a loop."""

from __future__ import annotations

import torch
from torch.func import grad, vmap

from dpfunc.rng import insecure_key

KEY = insecure_key(0)
IDS = torch.randint(50, (3, 6), generator=torch.Generator().manual_seed(0))


def snapshot(module):
    return {name: (id(value), value.detach().clone()) for name, value in module.state_dict(keep_vars=True).items()}


def same(before, after):
    return before.keys() == after.keys() and all(
        before[k][0] == after[k][0] and torch.equal(before[k][1], after[k][1]) for k in before
    )


def logits(output):
    return getattr(output, "logits", output)


def random_b(params):
    """Values in B too, which is zero at first."""
    generator = torch.Generator().manual_seed(7)
    return {n: 10 * torch.randn(p.shape, generator=generator) if "lora_B" in n else p for n, p in params.items()}


def per_sample(forward, params, x):
    """The batch axis of 1 stays inside."""
    loss = lambda p, row: logits(forward(p, row[None])).square().mean()
    return vmap(grad(loss), in_dims=(None, 0), randomness="different")(params, x)


def loop(forward, params, x):
    rows = []
    for row in x:
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        loss = logits(forward(leaves, row[None])).square().mean()
        rows.append(torch.autograd.grad(loss, list(leaves.values())))
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(params)}


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name in got:
        assert torch.allclose(got[name], expected[name], rtol=1e-3, atol=1e-5 * largest), name
