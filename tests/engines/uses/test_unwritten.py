"""Gradients that are kept by reference are refused where the rest of the backward pass writes into them."""

from __future__ import annotations

import pytest
import torch
from backward_functions import Identity
from torch import Tensor
from torch.nn.functional import conv1d, relu_

from dpfunc import clipping
from dpfunc.clipped import clipped_grad
from dpfunc.engines import auto, bookkeeping, ghost, loop
from dpfunc.errors import UnsupportedModel

SIZES = {"computed after the backward pass": (8, 20), "kept as factors": (128, 60)}


class MixedInPlace(Identity):
    """Identity, whose backward returns a copy of its gradient, and then adds that of all samples into the gradient."""

    @staticmethod
    def backward(ctx, grad):
        result = grad.clone()
        grad.add_(grad.sum(0))
        return result


class MixedUncounted(MixedInPlace):
    """The same by `tensor.data`, whose writes torch does not count."""

    @staticmethod
    def backward(ctx, grad):
        result = grad.clone()
        grad.data.add_(grad.sum(0))
        return result


def same(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution whose result has the size of its input."""
    return conv1d(x, weight, padding=1)


def mixed(p, x):
    """`conv1d` and `MixedInPlace` get the same gradient; the convolution, which comes later, gets it first."""
    h = same(x, p["b"])
    return (MixedInPlace.apply(h) + same(h.tanh(), p["a"])).square().sum((1, 2))


def mixed_uncounted(p, x):
    h = same(x, p["b"])
    return (MixedUncounted.apply(h) + same(h.tanh(), p["a"])).square().sum((1, 2))


def tied(p, x):
    h = same(x, p["a"])
    return (MixedInPlace.apply(h) + same(h.tanh(), p["a"])).square().sum((1, 2)) + 0 * p["b"].sum()


def hooked(p, x):
    h = same(x, p["b"])
    scaled = h * 1
    if scaled.requires_grad:
        scaled.register_hook(lambda grad: grad.mul_(3.0))
    return (same(h.tanh(), p["a"]) + scaled).square().sum((1, 2))


def honest(p, x):
    """In place in the forward pass only, as many models are."""
    h = relu_(same(x, p["b"]).add_(x))
    return same(h, p["a"]).add_(h).square().sum((1, 2))


def inputs(size):
    channels, cells = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(channels, channels, 3, generator=generator) / channels for name in "ab"}
    return params, torch.randn(5, channels, cells, generator=generator)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss_fn", [mixed, mixed_uncounted, hooked])
def test_a_gradient_that_is_written_into_is_refused(loss_fn, size):
    with pytest.raises(UnsupportedModel, match=r"conv1d of parameter 'a'.*writes into its gradient"):
        bookkeeping()(loss_fn, *inputs(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("engine", [bookkeeping(), ghost()])
def test_a_gradient_that_waits_for_another_use_is_refused(engine, size):
    with pytest.raises(UnsupportedModel, match=r"conv1d of parameter 'a'.*writes into its gradient"):
        engine(tied, *inputs(size))


def test_a_gradient_that_waits_for_its_clip_group_is_refused():
    rule = clipping.Flat(1.0, groups=clipping.PerParameter())
    with pytest.raises(UnsupportedModel, match=r"conv1d of parameter 'a'.*writes into its gradient"):
        clipped_grad(tied, *inputs("kept as factors"), rule, engine=bookkeeping(memory_budget=0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("loss_fn", "engine"), [(mixed, auto()), (honest, bookkeeping()), (honest, ghost())])
def test_the_default_computes_rows_alone_and_honest_models_are_served(loss_fn, engine, size):
    params, batch = inputs(size)
    rule = clipping.Flat(0.1)
    got, _ = clipped_grad(loss_fn, params, batch, rule, engine=engine)
    expected, _ = clipped_grad(loss_fn, params, batch, rule, engine=loop())
    for name in params:
        torch.testing.assert_close(got.sums[name], expected.sums[name], rtol=1e-4, atol=1e-6)
