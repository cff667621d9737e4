"""Scale, then privatise: gradients are clipped in other coordinates, and go back after the noise."""

from __future__ import annotations

import pytest
import torch
from cases import as_batch, flat, linear_loss, params, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.engines.by_name import ENGINES, engine_of
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat
from dpfunc.updates import scaled_loss, unscaled


def scales_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.exp(torch.randn(value.shape, generator=generator) * 2) for name, value in params().items()}


def scaled_rows(batch, scales):
    return {name: value * scales[name] for name, value in batch.items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_gradients_are_clipped_where_they_are_scaled(engine, microbatch_size):
    """The sum of clipped scaled gradients, and not the scaled sum of clipped ones; losses and parameters stay."""
    batch, scales = as_batch(random_rows(0, 5)), scales_of(1)
    options = {"engine": engine_of(engine), "microbatch_size": microbatch_size}
    values = {name: torch.ones_like(value) for name, value in params().items()}
    found, unreleased = dpfunc.clipped.clipped_grad(
        scaled_loss(linear_loss, scales), values, batch, clipping.Flat(1.0), **options
    )
    expected, _ = dpfunc.clipped.clipped_grad(
        linear_loss, values, scaled_rows(batch, scales), clipping.Flat(1.0), **options
    )
    after, plain = dpfunc.clipped.clipped_grad(linear_loss, values, batch, clipping.Flat(1.0), **options)
    torch.testing.assert_close(flat(found.sums), flat(expected.sums), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(unreleased.losses_B, plain.losses_B, rtol=1e-4, atol=1e-4)
    assert found.sensitivity == 1.0
    assert float((flat(found.sums) - flat(scaled_rows(after.sums, scales))).norm()) > 0.1
    back = unscaled(found.sums, scales)
    torch.testing.assert_close(flat(scaled_rows(back, scales)), flat(found.sums), rtol=1e-5, atol=1e-6)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 4), scale=st.sampled_from([1e-6, 1.0, 1e9]))
def test_sensitivity(seed, size, scale):
    batch, scales = as_batch(random_rows(seed, size, scale)), scales_of(seed)

    def summed(rows):
        clipped, _ = dpfunc.clipped.clipped_grad(scaled_loss(linear_loss, scales), params(), rows, clipping.Flat(1.0))
        return flat(clipped.sums)

    assert (summed(batch) - summed({name: value[1:] for name, value in batch.items()})).norm() <= 1.0


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
def test_scales_may_be_written_between_steps(engine):
    """A layer of torch, over three steps of a run: each has the scales of its time."""
    plan = dpfunc.Plan(sampling.Poisson(6, 1.0), clipping.Flat(1.0), 1e-6, 3, 1e-2, adjacency="zero_out")
    generator = torch.Generator().manual_seed(0)
    values = {"w": torch.randn(4, 3, generator=generator)}
    x, y = torch.randn(6, 3, generator=generator), torch.randint(0, 4, (6,), generator=generator)

    def loss_fn(p, batch):
        logits = torch.nn.functional.linear(batch["x"], p["w"])
        return torch.nn.functional.cross_entropy(logits, batch["y"], reduction="none")

    scales = {"w": torch.ones(4, 3)}
    dp_step = dpfunc.make_dp_step(scaled_loss(loss_fn, scales), plan, engine=engine, reduction="sum")
    state = allow_repeat(dp_step.init(values, insecure_key(0)))
    for number in range(3):
        grads, state, _ = dp_step(values, {"x": x + number, "y": y}, state)
        rows = torch.func.vmap(torch.func.grad(lambda w, a, b: loss_fn({"w": w}, {"x": a[None], "y": b[None]})[0]),
                               in_dims=(None, 0, 0))(values["w"], x + number, y) * scales["w"]  # fmt: skip
        norms = rows.flatten(1).norm(dim=1)
        expected = (rows * (1 / norms.clamp(min=1.0))[:, None, None]).sum(0)
        torch.testing.assert_close(grads["w"], expected, rtol=1e-3, atol=1e-3)
        scales["w"].copy_(torch.exp(torch.randn(4, 3, generator=generator)))


def test_other_names_are_refused():
    for bad in (lambda: scaled_loss(linear_loss, {})(params(), {}), lambda: unscaled(params(), {})):
        with pytest.raises(InvalidArgument, match="a scale for each parameter"):
            bad()
