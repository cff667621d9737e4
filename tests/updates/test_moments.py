"""Joint moment estimation: sums of gradients and of their squares, from one release."""

from __future__ import annotations

import math

import pytest
import torch
from cases import as_batch, flat, linear_loss, params, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.engines.by_name import ENGINES, engine_of
from dpfunc.errors import InvalidArgument
from dpfunc.updates import JointMoments

MOMENTS = JointMoments(clip_norm=1.5, weight=0.3)


def summed(batch, moments=MOMENTS, loss_fn=linear_loss, values=None, **options):
    values = params() if values is None else values
    rule = clipping.Flat(moments.bound)
    clipped, _ = dpfunc.clipped.clipped_grad(moments.loss(loss_fn), moments.params(values), batch, rule, **options)
    return clipped


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_sums_are_those_of_single_rows(engine, microbatch_size):
    """Of rows inside and outside of the ball; a linear layer with a nonlinear loss."""
    generator = torch.Generator().manual_seed(0)
    values = {"w": torch.randn(4, 3, generator=generator), "b": torch.randn(4, generator=generator)}
    x, y = torch.randn(6, 3, generator=generator), torch.randint(0, 4, (6,), generator=generator)

    def loss_fn(p, batch):
        logits = torch.nn.functional.linear(batch["x"], p["w"], p["b"])
        return torch.nn.functional.cross_entropy(logits, batch["y"], reduction="none")

    options = {"engine": engine_of(engine), "microbatch_size": microbatch_size}
    batch = {"x": x, "y": y}
    found = summed(batch, loss_fn=loss_fn, values=values, **options)
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second, norms = {name: torch.zeros_like(value) for name, value in values.items()}, []
    for row in range(6):
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        loss = loss_fn(leaves, {"x": x[row : row + 1], "y": y[row : row + 1]}).sum()
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        norms.append(float(flat(grads).norm()))
        for name, grad in grads.items():
            clipped = grad * min(1.0, MOMENTS.clip_norm / norms[-1])
            first[name] += clipped
            second[name] += clipped.square()
    assert min(norms) < MOMENTS.clip_norm < max(norms)
    own, squares = MOMENTS.read(found.sums)
    torch.testing.assert_close(flat(own), flat(first), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(flat(squares), flat(second), rtol=1e-3, atol=1e-4)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 4), scale=st.sampled_from([1e-6, 1.0, 1e9]))
def test_sensitivity(seed, size, scale):
    """One record more; one whose gradient is not finite adds nothing."""
    batch = as_batch(random_rows(seed, size, scale))
    without = {name: value[1:] for name, value in batch.items()}
    moved = flat(summed(batch).sums) - flat(summed(without).sums)
    assert moved.norm() <= MOMENTS.bound
    spoiled = {name: value.index_fill(0, torch.tensor([0]), math.nan) for name, value in batch.items()}
    assert torch.equal(flat(summed(spoiled).sums), flat(summed(without).sums))


def test_a_parameter_with_the_name_of_squares_is_refused():
    """Its numbers were replaced by zeros."""
    with pytest.raises(InvalidArgument, match=r"no parameter whose name begins with '\(squares\) '"):
        JointMoments(1.0, 1.0).params({"w": torch.ones(2), "(squares) w": torch.ones(2)})


def test_the_bound_is_used_up():
    """A gradient of one number has the largest squares."""
    loss_fn = lambda p, x: x @ p["w"]
    found = summed(torch.tensor([[100.0, 0.0]]), loss_fn=loss_fn, values={"w": torch.zeros(2)})
    assert MOMENTS.bound * (1 - 2**-12) <= float(flat(found.sums).norm()) <= MOMENTS.bound


@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0])
def test_the_sensitivity_of_replaced_records(radius, weight):
    """No pair of vectors in the ball is further apart, and two in opposite directions of a plane come close to it."""
    moments = JointMoments(radius, weight)
    angles = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    lengths = torch.linspace(0, radius, 21, dtype=torch.float64)
    ball = (lengths[:, None, None] * torch.stack([angles.cos(), angles.sin()], 1)).reshape(-1, 2)
    outer = ball[-721:]  # the first of two is on the sphere: the distance is convex in each
    joint = lambda x: torch.cat([x, math.sqrt(weight) * x.square()], 1)
    far = torch.cdist(joint(outer), joint(ball)).max()
    assert far <= moments.replaced * (1 + 1e-9)
    assert far >= moments.replaced * (1 - 1e-2)
    if weight <= 1 / (2 * radius**2):
        assert moments.replaced == pytest.approx(2 * radius, rel=1e-12)  # the squares are free


def test_a_step_releases_both_with_noise_of_their_own():
    """The deviation of the squares is 1 / sqrt(weight) of that of the gradients; 0.9 and 1.1 of it are rejected."""
    moments = JointMoments(clip_norm=1.0, weight=4.0)
    plan = dpfunc.Plan(sampling.Poisson(4, 1.0), clipping.Flat(moments.bound), 2.0, 1, 1e-2, adjacency="zero_out")
    values = {"w": torch.zeros(20_000)}
    loss_fn = lambda p, x: x.sum(1) * p["w"].sum() * 0
    dp_step = dpfunc.make_dp_step(moments.loss(loss_fn), plan, reduction="sum")
    state = dp_step.init(moments.params(values), dpfunc.rng.insecure_key(3))
    grads, _, _ = dp_step(moments.params(values), torch.ones(4, 1), state)
    first, second = moments.read(grads)
    for found, deviation in ((first["w"], 2 * moments.bound), (second["w"], moments.bound)):
        spread = float(found.std()) / deviation
        assert 0.975 < spread < 1.025  # five deviations of such a spread are 0.025


def test_refused():
    for bad in ({"clip_norm": 0.0, "weight": 1.0}, {"clip_norm": 1.0, "weight": -1.0}):
        with pytest.raises(InvalidArgument, match="> 0|Expected"):
            JointMoments(**bad)
    with pytest.raises(InvalidArgument, match="squares of each parameter"):
        MOMENTS.read(params())
