"""Products with weights in 4 bits: rows are apart, and no gradient is lost without a word."""

import pytest
import torch
from torch.nn import functional as F

from dpfunc.engines import auto, loop, vmap
from dpfunc.errors import UnsupportedModel

# Overloads of a stand-in: they collide with nothing where the package is installed.
LIBRARY = torch.library.Library("bitsandbytes", "FRAGMENT")
for operation in ("gemm_4bit", "gemv_4bit"):
    LIBRARY.define(f"{operation}.stand_in(Tensor A, Tensor B, Tensor? bias=None) -> Tensor")
    LIBRARY.impl(f"{operation}.stand_in", lambda x, w, bias=None: F.linear(x, w - 7.0, bias), "CPU")


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
PARAMS_OF_4_BITS = {"below": torch.eye(6) + 0.1, "above": torch.ones(2, 4)}
BATCH_OF_4_BITS = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(1))
PACKED_FOR_INFERENCE = torch.ops.bitsandbytes.gemv_4bit.stand_in


def loss_of(product, axis=0):
    def loss_fn(params, x_BTd):
        x_BTd = F.linear(x_BTd, params["below"])
        y_BTp = product(x_BTd.transpose(0, axis), PACKED).transpose(0, axis)
        return F.linear(y_BTp, params["above"]).square().sum((1, 2))

    return loss_fn


def frozen_below(params, x_BTd):
    y_BTp = PACKED_FOR_INFERENCE(x_BTd, PACKED)
    return F.linear(y_BTp, params["above"]).square().sum((1, 2))


@pytest.mark.parametrize(
    ("loss_fn", "params"),
    [
        (loss_of(Product.apply), PARAMS_OF_4_BITS),
        (loss_of(Product.apply, 1), PARAMS_OF_4_BITS),
        (frozen_below, {"above": PARAMS_OF_4_BITS["above"]}),
    ],
)
@pytest.mark.parametrize("make", [auto, vmap])
def test_norms_are_those_of_rows_alone(make, loss_fn, params):
    engine = make()
    found = engine(loss_fn, params, BATCH_OF_4_BITS).sq_norms()
    torch.testing.assert_close(found, loop()(loss_fn, params, BATCH_OF_4_BITS).sq_norms(), rtol=1e-4, atol=1e-4)
    assert engine.decision(loss_fn).engine == "one pass"


@pytest.mark.parametrize("make", [auto, vmap])
def test_a_product_without_a_gradient_is_refused(make):
    """Above a trained layer; below it nothing is lost."""
    with pytest.raises(UnsupportedModel, match="packed for inference"):
        make()(loss_of(PACKED_FOR_INFERENCE), PARAMS_OF_4_BITS, BATCH_OF_4_BITS)
