"""Rules of users' own."""

from __future__ import annotations

import pytest
import torch
from reference import loop_gradients

from dpfunc import engines
from dpfunc.engines import register_rule
from dpfunc.engines.rules import RULES
from dpfunc.errors import InvalidArgument, UnsupportedModel


@pytest.fixture
def clean():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def xlog1py_grad(grad, input, other):
    return grad * input / (1.0 + WEIGHT.to(grad.dtype))


WEIGHT = torch.arange(4.0, dtype=torch.float64)
COLUMN = {"input": torch.tensor([[1.0], [2.0], [-3.0]], dtype=torch.float64), "other": WEIGHT}


def xlog1py_loss(p, b):
    return torch.special.xlog1py(b[:, None], p["w"]).square().sum(1)


@pytest.mark.usefixtures("clean")
def test_a_registered_rule_is_used():
    params, batch = {"w": torch.arange(4.0)}, torch.tensor([1.0, 0.5, -2.0])
    with pytest.raises(UnsupportedModel, match="xlog1py of parameter 'w'.*register_rule"):
        engines.bookkeeping()(xlog1py_loss, params, batch)
    register_rule(torch.special.xlog1py, "other", xlog1py_grad, needs=["input"], example=COLUMN)
    found = engines.bookkeeping()(xlog1py_loss, params, batch).grads["w"].dense()
    assert torch.allclose(found, torch.stack([grads["w"] for _, grads in loop_gradients(xlog1py_loss, params, batch)]))


WRONG = {
    "twice as large": lambda grad, input, other: 2 * xlog1py_grad(grad, input, other),
    "summed over the samples": lambda grad, input, other: xlog1py_grad(grad, input, other).sum(0).expand(3, 4),
    "samples in another order": lambda grad, input, other: xlog1py_grad(grad, input, other).flip(0),
}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused(name):
    with pytest.raises(InvalidArgument, match="what single samples give"):
        register_rule(torch.special.xlog1py, "other", WRONG[name], needs=["input"], example=COLUMN)
    assert torch.special.xlog1py not in RULES


@pytest.mark.usefixtures("clean")
def test_bad_arguments():
    with pytest.raises(InvalidArgument, match="tensor 'weight'"):
        register_rule(torch.special.xlog1py, "weight", xlog1py_grad, needs=["input"], example=COLUMN)
    with pytest.raises(InvalidArgument, match=r"unknown \['x'\]"):
        register_rule(torch.special.xlog1py, "other", xlog1py_grad, needs=["x"], example=COLUMN)
