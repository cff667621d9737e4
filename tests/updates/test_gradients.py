"""Released gradients where an optimizer reads them: each at its own parameter, and all of them or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfunc
from dpfunc.errors import InvalidArgument


def test_an_optimizer_reads_what_was_written():
    """Also of a model's own parameters, and of the mapping of functionalize; earlier gradients are replaced."""
    model = nn.Linear(2, 3)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    grads = {"bias": torch.tensor([1.0, 2.0, 3.0]), "weight": torch.arange(6.0).reshape(3, 2)}
    for params in (dict(model.named_parameters()), dpfunc.functionalize(model)[1]):
        optimizer = torch.optim.SGD(params.values(), lr=0.5)
        before = {name: param.detach().clone() for name, param in params.items()}
        dpfunc.set_grads(params, {name: 100 * grad for name, grad in grads.items()})
        dpfunc.set_grads(params, grads)
        optimizer.step()
        for name, param in params.items():
            torch.testing.assert_close(param.detach(), before[name] - 0.5 * grads[name], rtol=0, atol=0)
    assert set(start) == set(params)


ERRORS = {
    "missing": (lambda grads: {"weight": grads["weight"]}, "got grads without bias"),
    "unknown": (lambda grads: {**grads, "scale": torch.ones(1)}, "got grads with the unknown scale"),
    "shape": (
        lambda grads: {**grads, "weight": grads["weight"].T},
        r"gradient of 'weight' .*\(3, 2\) torch.float32 on cpu; got \(2, 3\) torch.float32",
    ),
    "dtype": (
        lambda grads: {**grads, "bias": grads["bias"].double()},
        r"gradient of 'bias' .*got \(3,\) torch.float64",
    ),
    "device": (
        lambda grads: {**grads, "bias": grads["bias"].to("meta")},
        "gradient of 'bias' .*on cpu; got .* on meta",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_names_the_parameter_and_nothing_is_written(case):
    change, words = ERRORS[case]
    params = dict(nn.Linear(2, 3).named_parameters())
    grads = {name: torch.ones_like(param) for name, param in params.items()}
    with pytest.raises(InvalidArgument, match=words):
        dpfunc.set_grads(params, change(grads))
    assert [name for name, param in params.items() if param.grad is not None] == []


def test_a_tied_parameter_under_two_names_is_refused():
    """Each name has a part of its gradient: the last one took the place of the other."""
    tied = nn.Parameter(torch.zeros(2))
    with pytest.raises(InvalidArgument, match="under one name.*Nothing was written"):
        dpfunc.set_grads({"a": tied, "b": tied}, {"a": torch.ones(2), "b": torch.ones(2)})
    assert tied.grad is None
