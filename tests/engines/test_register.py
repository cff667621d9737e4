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


def outer_grad(grad, input, vec2):
    return torch.einsum("bp,b->bp", grad, input)


OUTER = {"input": torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64), "vec2": torch.ones(4, dtype=torch.float64)}


def outer_loss(p, b):
    return torch.outer(b, p["w"]).square().sum(1)


@pytest.mark.usefixtures("clean")
def test_a_registered_rule_is_used():
    params, batch = {"w": torch.arange(4.0)}, torch.tensor([1.0, 0.5, -2.0])
    with pytest.raises(UnsupportedModel, match="outer of parameter 'w'.*register_rule"):
        engines.bookkeeping()(outer_loss, params, batch)
    register_rule(torch.outer, "vec2", outer_grad, needs=["input"], example=OUTER)
    found = engines.bookkeeping()(outer_loss, params, batch).grads["w"].dense()
    assert torch.allclose(found, torch.stack([grads["w"] for _, grads in loop_gradients(outer_loss, params, batch)]))


WRONG = {
    "twice as large": lambda grad, input, vec2: 2 * outer_grad(grad, input, vec2),
    "summed over the samples": lambda grad, input, vec2: outer_grad(grad, input, vec2).sum(0).expand(3, 4),
    "samples in another order": lambda grad, input, vec2: outer_grad(grad, input, vec2).flip(0),
}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused(name):
    with pytest.raises(InvalidArgument, match="what single samples give"):
        register_rule(torch.outer, "vec2", WRONG[name], needs=["input"], example=OUTER)
    assert torch.outer not in RULES


@pytest.mark.usefixtures("clean")
def test_bad_arguments():
    with pytest.raises(InvalidArgument, match="tensor 'weight'"):
        register_rule(torch.outer, "weight", outer_grad, needs=["input"], example=OUTER)
    with pytest.raises(InvalidArgument, match=r"unknown \['x'\]"):
        register_rule(torch.outer, "vec2", outer_grad, needs=["x"], example=OUTER)
