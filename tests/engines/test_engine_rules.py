"""Every way to use a parameter against the loop over single samples. A new layer is a line in layers.py."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from layers import LAYERS, build
from zoo.parity import ENGINES, differences, truth_of, without_gradient

from dpfunc.engines.cost import Costs, summed
from dpfunc.engines.rules import RULES

# torch says once that "same" padding of even kernels copies the input
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LENGTH = 3
# (seed, batch sizes): 1 is no batch, 2 and 3 are small batches, 3 is also the length.
RUNS = ((0, (1, 2, 3, 5)), (1, (3,)))
FAST = ("auto", "vmap", "ghost")

layers = pytest.mark.parametrize("name", LAYERS)


@cache
def built(name, dtype, seed):
    return build(name, dtype, seed)


@cache
def truth(name, dtype, seed, size, length):
    return truth_of(built(name, dtype, seed).case(size, length))


def check(engine, name, dtype, seed, size, length):
    case = built(name, dtype, seed).case(size, length)
    found = differences(engine, case, truth(name, dtype, seed, size, length))
    wrong = {what: value for what, value in found.items() if not value < TOLERANCE[dtype]}
    assert not wrong, f"B={size} T={length} seed={seed}"


@layers
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("engine", ["loop", *FAST])
def test_layers_equal_the_loop(engine, dtype, name):
    run = ENGINES[engine]()
    for seed, sizes in RUNS[: 1 if engine == "loop" else None]:
        for size in sizes:
            check(run, name, dtype, seed, size, LENGTH)


@layers
@pytest.mark.parametrize("formed", [True, False], ids=["formed", "factors"])
def test_both_forms_are_the_same(formed, name, monkeypatch):
    """Whether gradients are formed at once or kept as factors is a matter of speed."""
    costs = summed(1) if formed else Costs(product=0, ghost=0, numbers=1, factors=0)
    assert (costs.choose(3).representation == "formed") is formed
    for op, rule in RULES.items():
        monkeypatch.setitem(RULES, op, replace(rule, costs=lambda use: costs))
    check(ENGINES["auto"](), name, torch.float64, 0, 3, LENGTH)


@layers
def test_every_parameter_has_a_gradient(name):
    """Otherwise the comparisons say nothing about it."""
    assert tuple(without_gradient(truth(name, torch.float64, 0, 5, LENGTH))) == LAYERS[name].unused
