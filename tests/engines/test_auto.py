"""What engines.auto decides, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from models import CASES, build
from torch import nn
from torch.nn import functional as F
from zoo.language import CASES as LANGUAGE
from zoo.language import build as build_language

from dpfunc import clipping, engines, make_dp_step, sampling, secure_key
from dpfunc.clipped import clipped_grad
from dpfunc.engines.per_sample import Dense, PerSample
from dpfunc.errors import UnsupportedModel
from dpfunc.functional import functionalize
from dpfunc.plan import Plan


def tokens(lengths):
    """Token scores (B, T) and masks with these lengths."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(8) < torch.tensor(lengths)[:, None]).double()
    return {"x": torch.randn(len(lengths), 8, 4, generator=generator, dtype=torch.float64), "mask": mask}


W = {"w": torch.ones(4, dtype=torch.float64)}


def token_losses(p, b):
    return (b["x"] @ p["w"]).square() * b["mask"]


MIXING = {
    "divided by the tokens of the batch": lambda p, b: token_losses(p, b).sum(1) / b["mask"].sum(),
    "mean of the batch taken off": lambda p, b: ((b["x"] - b["x"].mean(0)) @ p["w"]).square().mean(1),
    "statistics of the batch": lambda p, b: (
        F.batch_norm(b["x"].transpose(1, 2), None, None, p["w"], training=True).square().sum((1, 2))
    ),
    "in-batch negatives": lambda p, b: F.cross_entropy(
        (b["x"].mean(1) * p["w"]) @ b["x"].mean(1).T, torch.arange(len(b["x"])), reduction="none"
    ),
    "routing over the batch": lambda p, b: (
        token_losses(p, b).sum(1) * (torch.argsort(torch.argsort(b["x"].sum((1, 2)))) < (len(b["x"]) + 1) // 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_losses_that_mix_rows_are_refused(name):
    with pytest.raises(UnsupportedModel, match=r"depends on the other samples.*row \d: .* alone, .*Likely causes"):
        engines.auto()(MIXING[name], W, tokens([2, 8, 5, 3]))


def test_a_mean_over_own_tokens_is_not_refused():
    loss_fn = lambda p, b: token_losses(p, b).sum(1) / b["mask"].sum(1)
    engine = engines.auto()
    engine(loss_fn, W, tokens([2, 8, 5, 3]))
    assert engine.decision(loss_fn).engine == "bookkeeping"


@pytest.mark.parametrize("name", CASES)
def test_models_take_the_fast_engine(name):
    case = build(name)
    engine = engines.auto()
    engine(case.loss_fn, case.params, case.batch)
    assert engine.decision(case.loss_fn).engine == "bookkeeping"


@pytest.mark.parametrize("case", LANGUAGE, ids=str)
def test_language_models_take_the_fast_engine(case):
    built = build_language(*case, torch.float32)
    engine = engines.auto()
    engine(built.loss_fn, built.params, built.batch)
    assert engine.decision(built.loss_fn).engine == "bookkeeping"


def test_an_engine_that_disagrees_is_not_used():
    """An engine that leaves a parameter out, or is off by 1 %, is seen by the audit before anything is released."""
    case = build("mlp")
    for wrong in (1.01, 0.0):

        def off(loss_fn, params, batch, wrong=wrong):
            found = engines.loop()(loss_fn, params, batch)
            grads = {n: Dense(grad.dense() * (wrong if n == "1.weight" else 1)) for n, grad in found.grads.items()}
            return PerSample(found.losses_B, grads)

        with pytest.raises(UnsupportedModel, match=r"computed alone.*gradient of '1.weight'.*Nothing was released"):
            clipped_grad(case.loss_fn, case.params, case.batch, clipping.Flat(1.0), engine=off)


def test_falls_back_to_what_works():
    solve = lambda p, b: torch.linalg.solve(p["a"] + 3 * torch.eye(3), b.T).square().sum(0)
    branch = lambda p, b: solve(p, b) * (2 if bool((b == b).all()) else 1)
    params, batch = {"a": torch.eye(3)}, torch.randn(4, 3)
    for loss_fn, expected in ((solve, "vmap"), (branch, "loop")):
        engine = engines.auto()
        found = engine(loss_fn, params, batch)
        assert engine.decision(loss_fn).engine == expected
        assert "No rule gives per-sample gradients" in engine.decision(loss_fn).reason
        assert torch.allclose(found.sq_norms()["a"], engines.loop()(loss_fn, params, batch).sq_norms()["a"], rtol=1e-4)


def test_dropout_does_not_disturb_the_comparison():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    forward, params = functionalize(model.train())
    loss_fn = lambda p, b: forward(p, b).square().mean((1, 2))
    engine = engines.auto()
    engine(loss_fn, params, torch.randn(3, 5, 4))
    assert engine.decision(loss_fn).engine == "bookkeeping"


def test_random_numbers_are_the_same_for_a_row_alone():
    loss_fn = lambda p, b: (b * p["w"]).sum(1).square() * torch.rand(len(b))
    engine, params = engines.auto(), {"w": torch.ones(4)}
    with torch.random.fork_rng():
        for step in range(3):
            clipped_grad(loss_fn, params, torch.randn(3 + step, 4), clipping.Flat(1.0), engine=engine)
    assert engine.decision(loss_fn).engine == "bookkeeping"


def test_rows_that_are_not_finite_give_zeros_and_no_error():
    loss_fn = lambda p, b: (b @ p["w"]).square()
    engine, params = engines.auto(), {"w": torch.ones(4)}
    for batch in (torch.full((3, 4), torch.nan), torch.ones(3, 4).cumsum(0)):
        clipped, _ = clipped_grad(loss_fn, params, batch, clipping.Flat(1.0), engine=engine)
        assert torch.isfinite(clipped.sums["w"]).all()
        assert engine.decision(loss_fn).proven


def test_the_step_says_what_was_decided():
    loss_fn = lambda p, b: (b @ p["w"]).square()
    plan = Plan(sampling.Poisson(100, 0.2), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=2, delta=1e-3)
    dp_step, data, params = make_dp_step(loss_fn, plan), torch.randn(100, 4), {"w": torch.ones(4)}
    assert dp_step.decision is None
    state = dp_step.init(params, secure_key())
    for indices in plan.batches(state):
        _, state, _ = dp_step(params, data[indices], state)
    assert dp_step.decision.engine == "bookkeeping"
    assert make_dp_step(loss_fn, plan, engine="vmap").decision is None


def test_batch_norm_of_single_rows_is_explained():
    loss_fn = lambda p, b: F.batch_norm(b["x"].mean(1), None, None, p["w"], training=True).square().sum(1)
    with pytest.raises(UnsupportedModel, match=r"not that of one sample alone.*replace_batchnorm"):
        engines.auto()(loss_fn, W, tokens([2, 8, 5]))


@pytest.mark.parametrize(
    "make_engine", [engines.auto, engines.bookkeeping, engines.ghost], ids=["auto", "bookkeeping", "ghost"]
)
def test_rows_that_are_all_alike_hide_nothing(make_engine):
    """One sample, or one and its copies, cannot show what rows do to each other: an operation that mixes does."""

    def mixing(params, batch):
        losses_B = (params["w"] * batch).sum(1).square() + 1.0
        return losses_B * (losses_B / losses_B.mean()).detach()

    params, batch = {"w": torch.ones(3)}, torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    engine = make_engine()
    found = engine(mixing, params, batch[:1])
    torch.testing.assert_close(found.sq_norms()["w"], engines.loop()(mixing, params, batch[:1]).sq_norms()["w"])
    if make_engine is not engines.auto:
        with pytest.raises(UnsupportedModel, match="mean"):
            engine(mixing, params, batch[:1].repeat(4, 1))
    with pytest.raises(UnsupportedModel, match=r"depends on the other samples|mean"):
        engine(mixing, params, batch)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_first_rows_that_are_not_finite_do_not_stop_rows_alone(bad):
    """A loss that only vmap takes, with nothing to compare in the rows that are computed first."""
    params = {"w": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}

    def loss_fn(params, batch):
        def one(row):
            return torch.tanh(torch.nn.functional.linear(row, params["w"])).square().sum()

        return torch.func.vmap(torch.func.grad(one))(batch).square().sum(1)

    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    batch[:2] = bad
    found, _ = clipped_grad(loss_fn, params, batch, clipping.Flat(0.5))
    expected, _ = clipped_grad(loss_fn, params, batch[2:], clipping.Flat(0.5), engine=engines.loop())
    torch.testing.assert_close(found.sums, expected.sums)
