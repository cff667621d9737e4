"""Rules of users' own."""

from __future__ import annotations

import pytest
import torch
from reference import loop_gradients

from dpfunc import engines
from dpfunc.engines import register_rule
from dpfunc.engines._rules import REGISTERED
from dpfunc.errors import InvalidArgument


@pytest.fixture
def clean():
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def xlog1py_grad(grad, input, other):
    return grad * input / (1.0 + WEIGHT.to(grad.dtype))


WEIGHT = torch.arange(4.0, dtype=torch.float64)
COLUMN = {"input": torch.tensor([[1.0], [2.0], [-3.0]], dtype=torch.float64), "other": WEIGHT}


def xlog1py_loss(p, b):
    return torch.special.xlog1py(b[:, None], p["w"]).square().sum(1)


@pytest.mark.usefixtures("clean")
def test_a_registered_rule_is_used():
    params, batch = {"w": torch.arange(4.0)}, torch.tensor([1.0, 0.5, -2.0])
    assert [use.op for use in engines.explain(xlog1py_loss, params, batch).uses] == ["vmap(grad)"]
    register_rule(torch.special.xlog1py, "other", xlog1py_grad, needs=["input"], example=COLUMN)
    assert [use.op for use in engines.explain(xlog1py_loss, params, batch).uses] == ["special_xlog1py"]
    found = engines.auto()(xlog1py_loss, params, batch).grads["w"].dense()
    assert torch.allclose(found, torch.stack([grads["w"] for _, grads in loop_gradients(xlog1py_loss, params, batch)]))


def everywhere(p, b):
    """A hidden input, a use by rows that are no batch of one, one without rows, and one in place."""
    hidden = torch.special.xlog1py((b * p["scale"])[:, None], p["w"])
    shared = torch.special.xlog1py(torch.ones(4), p["w"])
    many = torch.special.xlog1py(b.expand(3, len(b)).T[..., None].flatten(0, 1), p["w"])
    return (hidden.mul_(2) + shared).square().sum(1) + many.sum().reshape(1).expand(len(b))


@pytest.mark.usefixtures("clean")
def test_all_uses_of_the_operation_give_the_gradients_of_single_samples():
    params = {"w": torch.arange(4.0), "scale": torch.tensor(2.0)}
    batch = torch.tensor([1.0, 0.5, -2.0])
    register_rule(torch.special.xlog1py, "other", xlog1py_grad, needs=["input"], example=COLUMN)
    grads = engines.auto()(everywhere, params, batch).grads
    for name in params:
        truth = torch.stack([each[name] for _, each in loop_gradients(everywhere, params, batch)])
        assert torch.allclose(grads[name].dense(), truth), name


WRONG = {
    "twice as large": lambda grad, input, other: 2 * xlog1py_grad(grad, input, other),
    "summed over the samples": lambda grad, input, other: xlog1py_grad(grad, input, other).sum(0).expand(3, 4),
    "samples in another order": lambda grad, input, other: xlog1py_grad(grad, input, other).flip(0),
}
REFUSED = {
    **{name: (torch.special.xlog1py, rule, "what single samples give") for name, rule in WRONG.items()},
    "another shape": (
        torch.special.xlog1py, lambda grad, input, other: xlog1py_grad(grad, input, other).sum(1),
        r"gradients \(3, 4\), got \(3,\)",
    ),
    # rows whose rule fails are computed without it, and say nothing of the rule
    "an error": (torch.special.xlog1py, lambda grad, input: grad, "to be used"),
    "not seen by torch": (lambda input, other: torch.special.xlog1py(input, other), xlog1py_grad, "to be used"),
}  # fmt: skip


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_rule_is_refused(name):
    op, rule, message = REFUSED[name]
    with pytest.raises(InvalidArgument, match=message):
        register_rule(op, "other", rule, needs=["input"], example=COLUMN)
    assert op not in REGISTERED


@pytest.mark.usefixtures("clean")
def test_bad_arguments():
    with pytest.raises(InvalidArgument, match="tensor 'weight'"):
        register_rule(torch.special.xlog1py, "weight", xlog1py_grad, needs=["input"], example=COLUMN)
    with pytest.raises(InvalidArgument, match=r"unknown \['x'\]"):
        register_rule(torch.special.xlog1py, "other", xlog1py_grad, needs=["x"], example=COLUMN)
