"""The engine of two passes: what is summed in the second one is what was measured in the first."""

from __future__ import annotations

import random
from functools import partial
from types import ModuleType

import pytest
import torch
from torch.nn.functional import dropout, linear
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import allocated
from dpfunc import clipping
from dpfunc.clipped import clipped_grad
from dpfunc.engines import auto, ghost, loop
from dpfunc.errors import UnsupportedModel

CLIP_NORM, SAMPLES, WIDTH = 0.01, 5, 16


def loss(y):
    return y.square().sum((1, 2))


def hidden(p, x):
    return linear(x, p["b"]).tanh()


def python_random():
    """Random numbers of Python, of which both passes have their own."""
    return lambda p, x: loss(linear(hidden(p, x) * random.uniform(0.1, 10), p["a"]))


def counting():
    """Ten times the gradient of the call before; a module is no state of a loss, which would be refused."""
    seen = ModuleType("seen")
    seen.calls = 0

    def loss_fn(p, x):
        seen.calls += 1
        return loss(linear(hidden(p, x), p["a"])) * 10.0**seen.calls

    return loss_fn


def counting_hook():
    seen = ModuleType("seen")
    seen.calls = 0

    def enlarge(grad):
        seen.calls += 1
        return grad * 10.0**seen.calls

    def loss_fn(p, x):
        y = linear(hidden(p, x), p["a"])
        if y.requires_grad:
            y.register_hook(enlarge)
        return loss(y)

    return loss_fn


def checkpointed(rate=0.0):
    body = lambda h, a: dropout(linear(h, a).relu_(), rate)
    return lambda p, x: loss(checkpoint(body, hidden(p, x), p["a"], use_reentrant=False))


def tied():
    """A parameter that is used twice by a rule, and once without."""
    return lambda p, x: loss(linear(linear(hidden(p, x), p["a"]), p["a"]) * p["a"].diagonal())


def inputs():
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(WIDTH, WIDTH, generator=generator) for name in "ab"}
    return params, torch.randn(SAMPLES, 4, WIDTH, generator=generator)


def sums(loss_fn, engine):
    return clipped_grad(loss_fn, *inputs(), clipping.Flat(CLIP_NORM), engine=engine)[0].sums


@pytest.mark.parametrize("make", [python_random, counting, counting_hook])
def test_a_second_pass_that_differs_is_refused(make):
    with pytest.raises(UnsupportedModel, match="differ between the two passes"):
        sums(make(), ghost())


@pytest.mark.parametrize("make", [checkpointed, tied])
def test_sums_are_those_of_a_loop(make):
    torch.testing.assert_close(sums(make(), ghost()), sums(make(), loop()), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_random_numbers_of_torch_are_the_same_in_both_passes(rate):
    found = []
    for engine in (ghost(), auto()):
        torch.manual_seed(0)
        found.append(sums(checkpointed(rate), engine))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def test_sums_can_be_taken_again():
    found = ghost()(tied(), *inputs())
    for factors_B in (torch.ones(SAMPLES), torch.arange(SAMPLES) * 1.0):
        got, expected = (
            each.weighted_sum(dict.fromkeys("ab", factors_B)) for each in (found, auto()(tied(), *inputs()))
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [checkpointed, tied])
def test_norms_keep_no_gradients(make):
    """What the first pass leaves is losses, norms and the seed of the second pass; of parameters with several uses, too."""
    loss_fn, engine = make(), ghost()
    engine(loss_fn, *inputs())
    found, memory = allocated(partial(engine, loss_fn, *inputs()))
    norms = sum(value.nbytes for value in (found.losses_B, *found.sq_norms().values()))
    assert memory.left - torch.get_rng_state().nbytes < 2 * norms < WIDTH**2 < memory.peak / 4
