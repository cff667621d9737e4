"""Several modules in one loss: per-sample gradients of all are those of single rows, in each engine."""

from __future__ import annotations

import pytest
import torch
from models import Case
from torch import nn
from torch.nn import functional as F
from zoo.parity import ENGINES, differences, truth_of

from dpfunc.errors import UnsupportedModel
from dpfunc.functional import functionalize, with_params


def distilled(forward, params, x):
    """A student learns a frozen teacher's classes; the criterion has a parameter."""
    found = forward(params, "scale", forward(params, "student", x))
    return -(forward(params, "teacher", x).softmax(1) * found.log_softmax(1)).sum(1)


def encoded(forward, params, x):
    mean, log_var = forward(params, "encoder", x).chunk(2, dim=1)
    error = forward(params, "decoder", mean * (log_var / 2).exp()) - x
    return error.square().sum(1) + 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)


def adversarial(forward, params, x):
    made = forward(params, "generator", x.flip(1))
    return F.softplus(-forward(params, "critic", x)[:, 0]) + F.softplus(forward(params, "critic", made)[:, 0])


def distilling():
    teacher = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval().requires_grad_(False)
    return {"teacher": teacher, "student": nn.Linear(4, 3), "scale": nn.PReLU()}


def shared():
    encoder, decoder = nn.Linear(4, 4), nn.Linear(2, 4)
    encoder.bias = decoder.bias
    return {"encoder": encoder, "decoder": decoder}


LOSSES = {
    "teacher and student": (distilling, distilled),
    "encoder and decoder that share a bias": (shared, encoded),
    "generator and critic": (
        lambda: {"generator": nn.Linear(4, 4), "critic": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))},
        adversarial,
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_all_modules_equal_the_loop(name, engine):
    make, loss = LOSSES[name]
    torch.manual_seed(0)
    modules = {part: module.double() for part, module in make().items()}
    forward, params = functionalize(modules)
    case = Case(lambda params, x: loss(forward, params, x), params, torch.randn(5, 4, dtype=torch.float64))
    truth = truth_of(case)
    assert all((norms_B > 0).any() for norms_B in truth.norms.values())
    found = differences(ENGINES[engine](), case, truth)
    assert all(value < 1e-10 for value in found.values()), found
    assert not any(at.startswith("teacher") for at in params)
    moved = with_params(modules, {at: p + 1 for at, p in params.items()})
    named = dict(moved.named_parameters())
    assert all(torch.equal(named[at], p + 1) for at, p in params.items())
    x = torch.randn(3, 4, dtype=torch.float64)
    first = next(iter(modules))
    assert torch.equal(forward(functionalize(moved).params, first, x), moved[first](x))


def test_batchnorm_in_training_mode_is_refused_in_any_of_the_modules():
    modules = distilling()
    modules["teacher"].train()
    with pytest.raises(UnsupportedModel, match=r"teacher\.1"):
        functionalize(modules)
