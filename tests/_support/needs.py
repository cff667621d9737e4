"""What a loss may need of an engine that is not the fast way: the same loss, computed otherwise."""

from __future__ import annotations

import torch


class Doubled(torch.autograd.Function):
    """Twice the values, in a form that torch's transforms do not take."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def own_gradient(p, x, out):
    leaf = x.detach().clone().requires_grad_()
    return out + 1e-3 * torch.autograd.grad(leaf.square().sum(), leaf)[0].sum(1)
