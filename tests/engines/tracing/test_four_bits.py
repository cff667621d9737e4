"""Products with weights in 4 bits: their rows are those of the input, and no gradient is lost without a word."""

from __future__ import annotations

import pytest
import torch

from dpfunc.engines import auto, bookkeeping, loop
from dpfunc.errors import UnsupportedModel

# Overloads of a stand-in: they collide with nothing where the package is installed.
LIBRARY = torch.library.Library("bitsandbytes", "FRAGMENT")
for operation in ("gemm_4bit", "gemv_4bit"):
    LIBRARY.define(f"{operation}.stand_in(Tensor A, Tensor B, Tensor? bias=None) -> Tensor")
    LIBRARY.impl(f"{operation}.stand_in", lambda x, w, bias=None: torch.nn.functional.linear(x, w - 7.0, bias), "CPU")


class Product(torch.autograd.Function):
    """The product as the package computes it, with the gradient of its input alone."""

    @staticmethod
    def forward(ctx, x, packed):
        ctx.packed = packed
        return torch.ops.bitsandbytes.gemm_4bit.stand_in(x, packed)

    @staticmethod
    def backward(ctx, grad):
        return grad @ (ctx.packed - 7.0), None


PACKED = torch.randint(15, (4, 6), generator=torch.Generator().manual_seed(0)).float()
PARAMS = {"below": torch.eye(6) + 0.1, "above": torch.ones(2, 4)}
BATCH = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(1))


def loss_of(product, axis=0):
    def loss_fn(params, x_BTd):
        x_BTd = torch.nn.functional.linear(x_BTd, params["below"])
        y_BTp = product(x_BTd.transpose(0, axis), PACKED).transpose(0, axis)
        return torch.nn.functional.linear(y_BTp, params["above"]).square().sum((1, 2))

    return loss_fn


@pytest.mark.parametrize("axis", [0, 1])
def test_the_rows_are_those_of_the_input(axis):
    loss_fn = loss_of(Product.apply, axis)
    truth = loop()(loss_fn, PARAMS, BATCH)
    found = bookkeeping(unproven="refuse")(loss_fn, PARAMS, BATCH)
    for name, norms in truth.sq_norms().items():
        torch.testing.assert_close(found.sq_norms()[name], norms, rtol=1e-4, atol=1e-4)


def test_samples_that_the_product_combines_are_not_proven():
    def loss_fn(params, x_Bd):
        mixed = Product.apply((x_Bd @ params["below"]).mT[:, :4], torch.ones(3, 4))
        return mixed.sum(0)[:1].expand(len(x_Bd)) + x_Bd.sum(1)

    with pytest.raises(UnsupportedModel, match="gemm_4bit"):
        bookkeeping(unproven="refuse")(loss_fn, PARAMS, BATCH[:, 0])


def test_a_product_without_a_gradient_is_refused():
    """Above a trained layer; below it nothing is lost."""
    product = torch.ops.bitsandbytes.gemv_4bit.stand_in
    for engine in (auto(), bookkeeping()):
        with pytest.raises(UnsupportedModel, match="packed for inference"):
            engine(loss_of(product), PARAMS, BATCH)

    def frozen_below(params, x_BTd):
        return torch.nn.functional.linear(product(x_BTd, PACKED), params["above"]).square().sum((1, 2))

    params = {"above": PARAMS["above"]}
    norms = bookkeeping(unproven="refuse")(frozen_below, params, BATCH).sq_norms()["above"]
    torch.testing.assert_close(norms, loop()(frozen_below, params, BATCH).sq_norms()["above"], rtol=1e-4, atol=1e-4)
