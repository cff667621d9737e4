"""The engine of two backward passes: what is summed in the second one is what was measured in the first."""

from __future__ import annotations

import random
from functools import partial
from types import ModuleType

import pytest
import torch
from backward_functions import Identity
from torch.nn.functional import dropout, linear
from torch.utils.checkpoint import checkpoint

from dpfunc import clipping
from dpfunc.clipped import clipped_grad
from dpfunc.engines import bookkeeping, ghost, loop
from dpfunc.errors import UnsupportedModel

CLIP_NORM, SAMPLES, WIDTH = 0.01, 5, 16


def loss(y):
    return y.square().sum((1, 2))


def hidden(p, x):
    return linear(x, p["b"]).tanh()


def counting_hook():
    """100 times the gradient of the call before."""
    calls = []

    def loss_fn(p, x):
        calls.clear()
        y = linear(hidden(p, x), p["a"])
        if y.requires_grad:
            y.register_hook(lambda grad: calls.append(1) or grad * 100.0 ** (len(calls) - 1))
        return loss(y)

    return loss_fn


def counting_checkpoint():
    calls = []

    def body(h, a):
        calls.append(1)
        return linear(h * 10.0 ** len(calls), a)

    def loss_fn(p, x):
        calls.clear()
        return loss(checkpoint(body, hidden(p, x), p["a"], use_reentrant=False))

    return loss_fn


def python_dropout():
    """Random numbers of Python, which checkpoints do not repeat."""
    body = lambda h, a: linear(h * random.uniform(0.1, 10), a)
    return lambda p, x: loss(checkpoint(body, hidden(p, x), p["a"], use_reentrant=False))


def counting_backward():
    calls = []

    class Scaled(Identity):
        @staticmethod
        def backward(ctx, grad):
            calls.append(1)
            return grad * 10.0 ** len(calls)

    return lambda p, x: loss(Scaled.apply(linear(hidden(p, x), p["a"])))


def hook_that_writes():
    """Writes into an activation, which autograd does not notice, in each pass."""

    def enlarge(activation, grad):
        activation.data.mul_(10.0)

    def loss_fn(p, x):
        h = hidden(p, x) * 1
        if h.requires_grad:
            h.register_hook(partial(enlarge, h.detach()))
        return loss(linear(h, p["a"]))

    return loss_fn


def logging_hook():
    """Adds gradients up in the first one, which the engine keeps: the parameter is used through a view."""
    kept = ModuleType("kept")  # a module is no state of a loss, which would be refused
    kept.log = []

    def note(grad):
        if kept.log:
            kept.log[0] += grad
        kept.log.append(grad)

    def loss_fn(p, x):
        kept.log.clear()
        y = hidden(p, x) @ p["a"].t()
        if y.requires_grad:
            y.register_hook(note)
        return loss(y)

    return loss_fn


def checkpointed(rate=0.0):
    body = lambda h, a: dropout(linear(h, a).relu_(), rate)
    return lambda p, x: loss(checkpoint(body, hidden(p, x), p["a"], use_reentrant=False))


def torch_dropout():
    """Random numbers of torch, which checkpoints repeat in both passes."""
    return checkpointed(0.5)


def inputs():
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(WIDTH, WIDTH, generator=generator) for name in "ab"}
    return params, torch.randn(SAMPLES, 4, WIDTH, generator=generator)


def sums(loss_fn, engine):
    return clipped_grad(loss_fn, *inputs(), clipping.Flat(CLIP_NORM), engine=engine)[0].sums


@pytest.mark.parametrize(
    "make", [counting_hook, counting_checkpoint, python_dropout, counting_backward, hook_that_writes]
)
def test_a_second_pass_that_differs_is_refused(make):
    with pytest.raises(UnsupportedModel, match="differ between the two backward passes"):
        sums(make(), ghost())


@pytest.mark.parametrize("make", [logging_hook, checkpointed])
def test_what_the_first_pass_has_left_is_summed_before_the_second(make):
    got, expected = sums(make(), ghost()), sums(make(), loop())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-7)
    assert torch.cat([value.flatten() for value in got.values()]).norm() <= SAMPLES * CLIP_NORM


def test_random_numbers_of_torch_are_the_same_in_both_passes():
    got = sums(torch_dropout(), ghost())
    assert 0 < torch.cat([value.flatten() for value in got.values()]).norm() <= SAMPLES * CLIP_NORM


def test_one_backward_pass_clips_whatever_code_runs_in_it():
    for make in (counting_hook, counting_checkpoint, python_dropout):
        got = sums(make(), bookkeeping())
        assert torch.cat([value.flatten() for value in got.values()]).norm() <= SAMPLES * CLIP_NORM
