"""Mixing in the backward pass only: the losses are those of rows alone, the gradients are not."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from isolation.cases import Built, D, add, calm, case, features, growing, module, squares, tokens, usual

hooked = case("backward: hooks of activations")
later = case("backward: hooks that are idle at first", calm)
weights = case("backward: hooks of parameters")
custom = case("backward: autograd.Function")
detached = case("backward: detached factors")
saved = case("backward: saved tensors")


def hook(h, change):
    """The same values, with a changed gradient."""
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(change)
    return h


@hooked
def gradient_over_its_norm(p, b):
    return squares(hook(features(p, b), lambda g: g / (1.0 + g.norm())))


@hooked
def gradient_less_its_mean(p, b):
    return squares(hook(features(p, b), lambda g: g - 0.5 * g.mean(0)))


@hooked
def gradient_of_the_neighbour(p, b):
    return squares(hook(features(p, b), lambda g: g.roll(1, 0)))


@hooked
def largest_row_is_silenced(p, b):
    def change(g):
        size = g.square().sum(1)
        return g * (size < size.max())[:, None] if len(g) > 1 else g

    return squares(hook(features(p, b), change))


@hooked
def gradient_by_position(p, b):
    return squares(hook(features(p, b), lambda g: g * torch.arange(1.0, len(g) + 1, dtype=g.dtype)[:, None]))


@hooked
def gradient_over_rows(p, b):
    return squares(hook(features(p, b), lambda g: g / len(g)))


@hooked
def gradient_of_tokens_over_its_norm(p, b):
    return squares(hook(tokens(p, b), lambda g: F.normalize(g.flatten(), dim=0).view_as(g)))


@hooked
def hook_of_a_node(p, b):
    h = features(p, b)
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda grads: (grads[0] - 0.5 * grads[0].mean(0),))
    return squares(h)


@hooked
def hook_after_a_node(p, b):
    h = b["y"] @ p["w"]
    out = torch.tanh(h)
    if out.grad_fn is not None:
        out.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * (1.0 + inputs[0].abs().max()),))
    return squares(out)


@hooked
def hook_of_the_losses(p, b):
    return hook(squares(features(p, b)), lambda g: g / g.sum())


@hooked
def hook_that_writes(p, b):
    def change(g):
        g.copy_(g.cumsum(0))

    return squares(hook(features(p, b), change))


@later
def clipped_by_the_norm_of_all(p, b):
    return squares(hook(0.3 * b["y"] @ p["w"], lambda g: g * (3.0 / g.norm()).clamp(max=1.0)))


@later
def silenced_where_one_is_large(p, b):
    return squares(hook(0.3 * b["y"] @ p["w"], lambda g: g * 0.5 if bool(g.abs().max() > 4.0) else g))


@case("backward: hooks that are idle at first", growing)
def gradient_rolled_from_nine_rows(p, b):
    return squares(hook(features(p, b), lambda g: g.roll(1, 0) if len(g) > 8 else g))


@case("backward: hooks that are idle at first", growing)
def hook_only_in_large_batches(p, b):
    h = features(p, b)
    return squares(hook(h, lambda g: g + g.mean(0)) if len(h) > 8 else h)


@hooked
def sometimes_at_random(p, b):
    def change(g):
        return g.flip(0) if float(torch.rand(())) < 0.5 else g

    return squares(hook(features(p, b), change))


def _linear(change, pre=False):
    net, parameters = module(lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)))
    if pre:
        net[1].register_full_backward_pre_hook(lambda _, outputs: (change(outputs[0]),))
    else:
        net[1].register_full_backward_hook(lambda _, inputs, outputs: (change(inputs[0]),))
    return lambda: Built(lambda p, b: squares(functional_call(net, p, (b["y"],))), dict(parameters), usual())


_family = "backward: hooks of modules"
add("module hook over its norm", _family, _linear(lambda g: g / (1.0 + g.norm())), honest=False)
add("module hook centres", _family, _linear(lambda g: g - 0.5 * g.mean(0), pre=True), honest=False)
add("module hook scales", _family, _linear(lambda g: 0.5 * g), honest=True)


@weights
def gradient_of_a_weight_over_its_norm(p, b):
    return squares(torch.tanh(b["y"] @ hook(p["w"], lambda g: g / (1.0 + g.norm()))))


@weights
def gradient_of_the_parameter_itself(p, b):
    if p["w"].requires_grad:
        p["w"].register_hook(lambda g: g.clamp(-0.5, 0.5))
    return squares(features(p, b))


@weights
def gradient_of_a_view_of_a_weight(p, b):
    turned = p["w"].t()
    if turned.requires_grad:
        turned.register_hook(lambda g: g.clamp(-0.5, 0.5))
    return squares(torch.tanh(F.linear(b["y"], turned)))


@weights
def sign_of_the_gradient(p, b):
    return squares(features(p, b) * hook(p["u"], torch.sign))


@weights
def hook_of_many_gradients(p, b):
    h = features(p, b) * p["u"]
    if p["u"].requires_grad:
        torch.autograd.graph.register_multi_grad_hook((h,), lambda grads: grads[0].mul_(1.0 / (1.0 + grads[0].norm())))
    return squares(h)


class MeanOfGradients(torch.autograd.Function):
    """The values go through; each row gets the mean of the gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.mean(0, keepdim=True).expand_as(grad)


class Reversed(MeanOfGradients):
    """The gradient turns round, as far as the batch says."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -grad * (1.0 + x.square().mean())


class Sorted(MeanOfGradients):
    """The largest gradient goes to the first row."""

    @staticmethod
    def backward(ctx, grad):
        return grad.sort(0, descending=True).values


class WrongSum(torch.autograd.Function):
    """x @ w, whose gradient of w is divided by the number of rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad / len(x)


@custom
def mean_of_gradients(p, b):
    return squares(MeanOfGradients.apply(features(p, b)))


@custom
def gradient_reversed_by_the_batch(p, b):
    return squares(Reversed.apply(features(p, b)))


@custom
def gradients_sorted(p, b):
    return squares(Sorted.apply(features(p, b)))


@custom
def product_with_a_mean_gradient(p, b):
    return squares(torch.tanh(WrongSum.apply(b["y"], p["w"])))


def scaled(loss, factor):
    """The value of a loss, with a scaled gradient."""
    return loss.detach() + factor * (loss - loss.detach())


@detached
def scaled_by_the_deviation(p, b):
    loss = squares(features(p, b))
    return scaled(loss, 1.0 / (1.0 + loss.detach().std(unbiased=False)))


@detached
def scaled_by_rank(p, b):
    loss = squares(features(p, b))
    return scaled(loss, 1.0 + loss.detach().argsort().argsort())


@detached
def scaled_by_the_neighbour(p, b):
    loss = squares(features(p, b))
    return scaled(loss, (b["coin"] - b["coin"].roll(1)).abs() + 0.5)


@detached
def scaled_by_the_size(p, b):
    loss = squares(features(p, b))
    return scaled(loss, 1.0 / len(loss))


@detached
def scaled_by_python(p, b):
    loss = squares(features(p, b))
    return scaled(loss, 1.0 / (1.0 + loss.detach().max().item()))


@case("backward: detached factors", calm)
def scaled_where_the_batch_is_large(p, b):
    loss = squares(0.3 * b["y"] @ p["w"])
    return scaled(loss, torch.where(b["y"].abs().max() > 4.0, 0.5, 1.0))


@detached
def other_rows_with_gradient_zero(p, b):
    """h + (other - other): the values cancel, the gradients do not."""
    h = features(p, b)
    other = h.sum(0) - h
    return squares(h + other - other.detach())


@detached
def straight_through_the_mean(p, b):
    h = features(p, b)
    return squares(h.detach() + 0.5 * (h - h.detach()) + 0.5 * (h.mean(0) - h.mean(0).detach()))


@saved
def checkpoint_around_mixing(p, b):
    def inner(y, w):
        h = torch.tanh(y @ w)
        return h - 0.5 * h.mean(0)

    return squares(checkpoint(inner, b["y"], p["w"], use_reentrant=False))


@saved
def saved_tensors_rolled(p, b):
    def unpack(t):
        return t.roll(1, 0) if t.ndim == 2 and t.shape[0] == len(b["y"]) and len(b["y"]) != D else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        return squares(features(p, b))


@saved
def saved_value_written_behind_autograd(p, b):
    h = features(p, b)
    losses = squares(h)
    h.data.copy_(h.data.roll(1, 0))
    return losses


@saved
def inner_gradient_of_all_losses(p, b):
    y = b["y"].detach().clone().requires_grad_()
    with torch.enable_grad():
        h = torch.tanh(y @ p["w"].detach())
        (g,) = torch.autograd.grad(h.mean(0).square().sum(), y)
    return squares(features(p, {"y": b["y"] + g}))


@saved
def gradient_penalty_of_the_batch(p, b):
    y = b["y"].detach().clone().requires_grad_()
    with torch.enable_grad():
        h = torch.tanh(y @ p["w"])
        (g,) = torch.autograd.grad((h.mean(0) ** 2).sum(), y, create_graph=True)
    return squares(h) + squares(g)
