"""Honest losses that change gradients: by a constant, row by row, or by a mask of entries."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from isolation.backward import MeanOfGradients, hook, scaled
from isolation.cases import D, T, batch, case, features, squares, tokens


@case("backward: hooks", honest=True)
def hook_that_scales(p, b):
    return squares(hook(features(p, b), lambda g: 0.5 * g))


@case("backward: hooks", honest=True)
def hook_that_clips_each_row(p, b):
    return squares(hook(features(p, b), lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=0.5)))


@case("backward: hooks", honest=True)
def hook_that_looks(p, b):
    return squares(hook(features(p, b), lambda g: None))


@case("backward: hooks", honest=True)
def mask_of_a_parameter(p, b):
    mask = torch.eye(D, dtype=p["w"].dtype)
    if p["w"].requires_grad:
        p["w"].register_hook(lambda g: g * mask)
    return squares(features(p, b))


@case("backward: hooks", honest=True)
def mask_of_a_view_of_a_parameter(p, b):
    mask, turned = torch.eye(D, dtype=p["w"].dtype), p["w"].t()
    if turned.requires_grad:
        turned.register_hook(lambda g: g * mask)
    return squares(torch.tanh(F.linear(b["y"], turned)))


class ScaledGradient(MeanOfGradients):
    """The gradient of each row by its own values."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.norm(dim=1, keepdim=True)


@case("backward: autograd.Function", honest=True)
def function_with_own_gradient_of_each_row(p, b):
    return squares(ScaledGradient.apply(features(p, b)))


@case("backward: detached factors", honest=True)
def scaled_by_its_own_loss(p, b):
    loss = squares(features(p, b))
    return scaled(loss, 1.0 / (1.0 + loss.detach()))


@case("backward: detached factors", honest=True)
def straight_through_rounding(p, b):
    h = features(p, b)
    return squares(h + (torch.round(4 * h) / 4 - h).detach())


@case("backward: saved tensors", honest=True)
def checkpointed(p, b):
    return squares(checkpoint(lambda x, w: torch.tanh(x @ w), b["x"], p["w"], use_reentrant=False))


@case("backward: saved tensors", lambda dtype: [batch(4, 1, dtype), batch(5, 2, dtype)], honest=True)
def inner_gradient_of_each_row(p, b):
    x = b["x"].detach().clone().requires_grad_()
    with torch.enable_grad():
        (g,) = torch.autograd.grad(torch.tanh(x @ p["w"].detach()).sum(), x)
    return squares(tokens(p, {"x": b["x"] + g})) / T
