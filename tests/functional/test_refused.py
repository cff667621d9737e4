"""Modules that mix samples, or compute with parameters of their own, are refused; what is right passes."""

import pytest
import torch
from models import tiny_bert
from module_cases import per_sample
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpfunc.errors import UnsupportedModel
from dpfunc.functional import functionalize


def batchnorm_model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))


def checkpointing():
    model = tiny_bert().train()
    model.activation_checkpointing_enable()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (batchnorm_model, r"2 BatchNorm layers in training mode.*1, 4.*dpfunc.functional.replace_batchnorm"),
        (lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(), "1 BatchNorm layers"),
        (checkpointing, r"Gradient checkpointing is on.*gradient_checkpointing_disable\(\)"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), "embeddings 0 have max_norm"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), r"the module \(DataParallel\).*Take its \.module.*one process a device"),
        (lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), r"0 \(DataParallel\)"),
    ],
)  # fmt: skip
def test_modules_that_cannot_work_are_refused(make, message):
    with pytest.raises(UnsupportedModel, match=message):
        functionalize(make())


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_trained_parameters_are_refused(register):
    """One that trains some rows of a table alone was left out in silence: all rows got noise."""
    module = nn.Embedding(4, 2)
    handle = getattr(module.weight, register)(lambda grad: None)
    with pytest.raises(UnsupportedModel, match="hooks, got some on weight.*to the released gradients"):
        functionalize(module)
    handle.remove()
    functionalize(module)


def test_batchnorm_switched_on_later_is_refused():
    module = batchnorm_model().eval()
    forward, params = functionalize(module)
    forward(params, torch.randn(1, 3, 8, 8))
    module.train()
    with pytest.raises(UnsupportedModel, match="2 BatchNorm layers"):
        forward(params, torch.randn(1, 3, 8, 8))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(3, 3), use_reentrant

    def forward(self, x):
        return checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=self.use_reentrant)


def test_checkpointing_inside_the_module_is_refused():
    """Recomputing would take the module's own parameters: the gradient would be that of other parameters."""
    module = Checkpointed(False)
    forward, params = functionalize(module)
    x = torch.ones(1, 3)
    with torch.no_grad():  # harmless
        assert torch.equal(forward(params, x), module(x))
    with torch.autograd.graph.save_on_cpu():  # hooks are allowed again after the call
        pass
    with pytest.raises(UnsupportedModel, match=r"uses gradient checkpointing.*gradient_checkpointing_disable"):
        forward({name: p.requires_grad_() for name, p in params.items()}, x)
    with pytest.raises(UnsupportedModel, match="uses gradient checkpointing"):
        per_sample(forward, params, x)


def test_reentrant_checkpointing_is_refused():
    """It would cut the parameters off, or write gradients into the module's own; before the call it is harmless."""
    x = torch.ones(1, 3, requires_grad=True)
    forward, params = functionalize(Checkpointed(True))
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    with pytest.raises(UnsupportedModel, match=r"reentrant gradient checkpointing.*gradient_checkpointing_disable"):
        forward(leaves, x)
    with pytest.raises(RuntimeError, match="setup_context"):  # torch itself
        per_sample(forward, params, torch.ones(2, 3))
    forward, params = functionalize(nn.Linear(3, 3))
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    assert forward(leaves, checkpoint(torch.tanh, x, use_reentrant=True)).requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_around_the_whole_call_is_right(use_reentrant):
    forward, params = functionalize(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    params = {name: (p + 1).requires_grad_() for name, p in params.items()}
    x = torch.randn(2, 3)
    call = lambda y, *values: forward(dict(zip(params, values, strict=True)), y).sum()
    checkpoint(call, x, *params.values(), use_reentrant=use_reentrant).backward()
    got = [p.grad for p in params.values()]
    expected = torch.autograd.grad(forward(params, x).sum(), list(params.values()))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
