"""Operators and tensors of one's own: what is inside cannot be seen from outside."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from isolation.cases import case, features, fresh, squares

opaque = case("operators: of one's own")
honest = case("operators: of one's own", honest=True)


@torch.library.custom_op("dpfunc_zoo::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    """Less half of the mean of the batch."""
    return x - 0.5 * x.mean(0)


@torch.library.custom_op("dpfunc_zoo::through", mutates_args=())
def through(x: torch.Tensor) -> torch.Tensor:
    """The same values."""
    return x.clone()


@torch.library.custom_op("dpfunc_zoo::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice each row."""
    return 2.0 * x


@torch.library.custom_op("dpfunc_zoo::moved", mutates_args=("x",))
def moved(x: torch.Tensor) -> None:
    """Rolled in place."""
    x.copy_(x.roll(1, 0))


centred.register_autograd(lambda ctx, grad: grad)
through.register_autograd(lambda ctx, grad: grad.flip(0))
doubled.register_autograd(lambda ctx, grad: 2.0 * grad)


@opaque
def operator_whose_forward_mixes(p, b):
    return squares(centred(features(p, b)))


@opaque
def operator_whose_backward_mixes(p, b):
    return squares(through(features(p, b)))


@opaque
def operator_that_writes(p, b):
    y = b["z"].clone()
    moved(y)
    return squares(features(p, b) * y)


@honest
def operator_that_doubles(p, b):
    return squares(doubled(features(p, b)))


class Wrapped(torch.Tensor):
    """Holds another tensor; every tanh takes the mean of the batch off."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*(arg.held if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {}))
        return out - 0.5 * out.mean(0) if func is torch.ops.aten.tanh.default else out


class Overriding(torch.Tensor):
    """Every product is that of rolled rows."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func in (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__):
            return out.as_subclass(torch.Tensor).roll(1, 0)
        return out


@opaque
def tensor_that_holds_another(p, b):
    return squares(features(p, b) + torch.tanh(Wrapped(b["z"])))


@opaque
def tensor_of_another_class(p, b):
    rolled = b["z"].as_subclass(Overriding) * 1.0
    return squares(features(p, b) + rolled.as_subclass(torch.Tensor))


@fresh("operators: of one's own")
def mixing_when_computed_again():
    """A checkpoint computes rows alone the first time, and mixes them when it computes again for the backward pass."""

    def loss_fn(p, b):
        times = []

        def inner(y, w):
            times.append(1)
            return torch.tanh((y if len(times) == 1 else y.roll(1, 0)) @ w)

        return squares(checkpoint(inner, b["y"], p["w"], use_reentrant=False) * b["z"])

    return loss_fn


class Once(torch.autograd.Function):
    """Keeps its input on the context as an attribute, and mixes with it backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.kept = inputs[0].detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1.0 + ctx.kept.abs().amax(0))


class Dirty(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.sub_(0.5 * x.mean(0))

    @staticmethod
    def backward(ctx, grad):
        return grad - 0.5 * grad.mean(0)


@opaque
def attribute_of_a_context(p, b):
    return squares(Once.apply(features(p, b)))


@opaque
def function_that_writes_into_its_input(p, b):
    return squares(Dirty.apply(features(p, b) * 1.0))
