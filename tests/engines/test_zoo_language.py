"""Every engine against the loop over single samples, on Hugging Face families: text, images, both."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from zoo.language import CASES, FAMILIES, build
from zoo.parity import ENGINES, differences, truth_of, without_gradient

from dpfunc import engines
from dpfunc.engines.per_sample import Dense

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

cases = pytest.mark.parametrize(("family", "choice"), CASES, ids=[f"{name}, {choice}" for name, choice in CASES])
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])


@cache
def truth(family, choice, dtype):
    return truth_of(build(family, choice, dtype))


@dtypes
@cases
@pytest.mark.parametrize("engine", ENGINES)
def test_language_models_equal_the_loop(engine, family, choice, dtype):
    found = differences(ENGINES[engine](), build(family, choice, dtype), truth(family, choice, dtype))
    assert "gradients" in found or engine != "loop"  # groups of rows, and ghosts, have none
    assert all(value < TOLERANCE[dtype] for value in found.values()), found


@cases
def test_every_trained_parameter_of_a_language_model_has_a_gradient(family, choice):
    """Otherwise the comparison above says nothing about it."""
    unused = without_gradient(truth(family, choice, torch.float32))
    assert all(re.search(FAMILIES[family].unused, name) for name in unused), unused


@cases
def test_samples_of_a_family_differ(family, choice):
    """An engine that gave each sample the mean gradient would be seen."""
    norms = torch.stack(list(truth(family, choice, torch.float32).norms.values()))
    totals_B = norms.square().sum(0).sqrt()
    assert totals_B.min() > 0
    assert totals_B.std() > 1e-2 * totals_B.mean()


def scaled(name, factor):
    """The loop, with one of its answers wrong by a factor."""

    def times(values):
        return {key: value * factor for key, value in values.items()}

    def engine(loss_fn, params, batch):
        right = engines.loop()(loss_fn, params, batch)
        return SimpleNamespace(
            losses_B=right.losses_B * (factor if name == "losses" else 1),
            sq_norms=lambda: times(right.sq_norms()) if name == "squared norms" else right.sq_norms(),
            weighted_sum=lambda f: times(right.weighted_sum(f)) if name == "sums" else right.weighted_sum(f),
            grads={
                key: Dense(grad.dense() * (factor if name == "gradients" else 1)) for key, grad in right.grads.items()
            },
        )

    return engine


@pytest.mark.parametrize("name", ["losses", "squared norms", "sums", "gradients"])
def test_a_wrong_engine_is_seen(name):
    case = ("BERT", "biases", torch.float64)
    found = differences(scaled(name, 1.001), build(*case), truth(*case))
    assert [key for key, value in found.items() if value > TOLERANCE[torch.float64]] == [name]
