"""What the trace of a step found goes to the audit with its gradients, whichever engine made them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from dpfunc import engines
from dpfunc.engines.evidence import NOTHING_FOUND
from dpfunc.engines.guards.audit import credited_by
from dpfunc.errors import UnsupportedModel
from dpfunc.types import GroupFactors

PARAMS = {"w": torch.ones(3, 2), "b": torch.ones(2)}


def grouped():
    factors = GroupFactors(4, {"w": "w", "b": "b"}, lambda group, norms: torch.ones(4))
    return engines.bookkeeping(unproven="audit").groupwise(factors)


ENGINES = {
    "bookkeeping": lambda: engines.bookkeeping(unproven="audit"),
    "ghost": lambda: engines.ghost(unproven="audit"),
    "auto": lambda: engines.auto(unproven="audit"),
    "groupwise": grouped,
}


def found(engine, loss_fn):
    per_sample = engine(loss_fn, PARAMS, torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    return credited_by(per_sample, per_sample.sq_norms()).evidence


def linear(params, x):
    return x @ params["w"] + params["b"]


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_gives_its_evidence(name):
    assert found(ENGINES[name](), lambda params, x: linear(params, x).sum(1)) == NOTHING_FOUND
    noisy = found(ENGINES[name](), lambda params, x: torch.nn.functional.dropout(linear(params, x)).sum(1))
    assert len(noisy.random_calls) == 1
    mixing = found(ENGINES[name](), lambda params, x: linear(params, x - x.mean(0)).sum(1))
    assert mixing.doubts
    assert found(ENGINES[name](), lambda params, x: linear(params, x).bfloat16().float().sum(1)).coarse


@pytest.mark.parametrize("name", ENGINES)
def test_the_doubt_of_a_number_that_was_read_stays(name):
    engine, now = ENGINES[name](), {"step": 0}

    def loss_fn(params, x):
        if now["step"] == 0:
            float(x.sum())
        return linear(params, x).sum(1)

    first = found(engine, loss_fn)
    now["step"] = 1
    second = found(engine, loss_fn)
    assert first.doubts
    assert "may be kept" in second.doubts[-1]


def test_a_doubt_of_the_second_pass_is_found_beside_earlier_ones():
    """The first step gave a number to Python; in the second step a hook reads one in the second backward pass."""
    now, hidden = {"step": 0}, ModuleType("hidden")  # a module is no state of a loss
    hidden.passes = []

    def loss_fn(params, x):
        if now["step"] == 0:
            float(x.sum())

        def hook(grad):
            hidden.passes.append(1)
            if len(hidden.passes) == 2:
                float(grad.sum())

        y = linear(params, x)
        y.register_hook(hook)
        return y.square().sum(1)

    engine, factors = engines.ghost(unproven="audit"), {"w": torch.ones(4), "b": torch.ones(4)}
    engine(loss_fn, PARAMS, torch.ones(4, 3))
    now["step"] = 1
    hidden.passes.clear()
    second = engine(loss_fn, PARAMS, torch.ones(4, 3))
    assert "may be kept" in second.evidence.doubts[-1]
    with pytest.raises(UnsupportedModel, match="numbers of the batch"):
        second.weighted_sum(factors)
