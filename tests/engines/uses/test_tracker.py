"""Losses that once gave wrong numbers in silence: each is exact now, or an error."""

from __future__ import annotations

import pytest
import torch
from models import Case
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo.parity import ENGINES, differences, truth_of

from dpfunc.errors import DPFuncError

FAST = ("bookkeeping", "ghost", "auto")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_or_refused(engine, loss_fn, params, *batches):
    """One engine sees all batches in turn; whether any was refused."""
    run, refused = ENGINES[engine](), False
    for batch in batches:
        case = Case(loss_fn, params, batch)
        try:
            found = differences(run, case, truth_of(case))
        except (DPFuncError, RuntimeError):
            refused = True
            continue
        assert all(value < 1e-8 for value in found.values()), found
    return refused


every_fast_engine = pytest.mark.parametrize("engine", FAST)


@every_fast_engine
def test_rows_that_are_selected_by_a_mask(engine):
    """As many images as rows, but not one a row."""

    def loss_fn(p, b):
        features = F.linear(b["images"][b["real"]], p["project"]).tanh()
        words = F.embedding(b["text"], p["words"]).masked_scatter((b["text"] == 0)[..., None], features)
        return F.linear(words.tanh().mean(1), p["head"]).square().sum(1)

    def batch(counts):
        real = torch.arange(3) < torch.tensor(counts)[:, None]
        text = torch.where(torch.cat([real, torch.zeros(len(counts), 2, dtype=torch.bool)], 1), 0, 1)
        return {"images": random(len(counts), 3, 5), "real": real, "text": text}

    params = {"project": random(4, 5), "words": random(2, 4), "head": random(2, 4)}
    refused = exact_or_refused(engine, loss_fn, params, batch([1, 1, 1]), batch([1, 1, 1, 3, 2, 0, 0, 0]))
    assert refused == (engine != "auto")  # auto falls back


@every_fast_engine
def test_a_branch_on_the_length(engine):
    def loss_fn(p, b):
        long = b.shape[1] > 4
        y = F.linear(b.transpose(0, 1) if long else b, p["w"]).tanh()
        return (y.transpose(0, 1) if long else y).square().sum((1, 2))

    assert not exact_or_refused(engine, loss_fn, {"w": random(3, 2)}, random(4, 4, 2), random(8, 8, 2))


@every_fast_engine
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda p, b: (F.linear(b, p["w"]).tanh() @ p["w"]).square().sum((1, 2)),
        lambda p, b: (F.linear(b, p["w"]).tanh() + F.linear(b, p["w"].exp())).square().sum((1, 2)),
        lambda p, b: F.linear(b, p["w"]).tanh().sum((1, 2)) + p["w"].square().sum() * b[:, 0, 0],
        lambda p, b: F.linear(b, p["w"], p["w"][:, 0]).square().sum((1, 2)),
        lambda p, b: (b @ p["w"].t().reshape(3, 3)).tanh().sum((1, 2)),
    ],
)
def test_direct_and_derived_uses_of_one_parameter(engine, loss_fn):
    assert not exact_or_refused(engine, loss_fn, {"w": random(3, 3)}, random(4, 5, 3))


@every_fast_engine
def test_a_transpose_that_is_reshaped(engine):
    loss_fn = lambda p, b: (b @ p["w"].t().reshape(3, 8)).tanh().sum((1, 2))
    assert not exact_or_refused(engine, loss_fn, {"w": random(4, 6)}, random(4, 5, 3))


@every_fast_engine
def test_a_gradient_inside_of_the_loss(engine):
    def constant(p, b):
        b = b.detach().requires_grad_()
        y = F.linear(F.linear(b, p["w"]).tanh(), p["w"])
        (g,) = torch.autograd.grad(y.sum(), b, retain_graph=True)
        return (y * g.sigmoid()).tanh().sum((1, 2))

    def penalty(p, b):
        b = b.detach().requires_grad_()
        y = F.linear(F.linear(b, p["w"]).tanh(), p["w"])
        (g,) = torch.autograd.grad(y.sum(), b, create_graph=True)
        return g.square().sum((1, 2)) + y.sum((1, 2))

    exact_or_refused(engine, constant, {"w": random(3, 3)}, random(4, 5, 3))
    assert exact_or_refused(engine, penalty, {"w": random(3, 3)}, random(4, 5, 3)) or engine == "auto"


@pytest.mark.parametrize("engine", ["bookkeeping", "ghost"])
def test_an_input_that_is_written_into_after_its_use(engine):
    def loss_fn(p, b):
        b = b.clone()
        y = F.linear(b, p["w"])
        b.relu_()
        return y.tanh().sum((1, 2))

    assert exact_or_refused(engine, loss_fn, {"w": random(40, 3)}, random(4, 5, 3))


@every_fast_engine
def test_shapes_that_broadcast(engine):
    losses = [
        (lambda p, b: F.linear(b, random(4, 3), p["b"]).square().sum((1, 2)), {"b": random(1)}),
        (lambda p, b: torch.einsum("btd,td->bt", b, p["b"]).square().sum(1), {"b": random(1, 3)}),
        (lambda p, b: torch.einsum("bi,oi->bo", b[:, 0, :1], p["b"]).square().sum(1), {"b": random(4, 3)}),
    ]
    for loss_fn, params in losses:
        exact_or_refused(engine, loss_fn, params, random(4, 5, 3))


@every_fast_engine
def test_derived_parameters_in_a_checkpoint(engine):
    block = lambda x, w, a, b: F.linear(x, w + b @ a).tanh()
    loss_fn = lambda p, b: checkpoint(block, b, p["w"], p["a"], p["b"], use_reentrant=False).sum((1, 2))
    params = {"w": random(4, 3), "a": random(2, 3, seed=1), "b": random(4, 2, seed=2)}
    assert not exact_or_refused(engine, loss_fn, params, random(4, 5, 3))


@every_fast_engine
def test_a_bad_record_in_the_first_batch_does_not_stop_the_run(engine):
    """Rows that are not finite do not affect the sample axis, and contribute nothing."""
    from dpfunc import clipping
    from dpfunc.clipped import clipped_grad

    params, batch = {"w": random(4, 3), "b": random(4)}, random(5, 2, 3)
    loss_fn = lambda p, b: F.linear(b, p["w"], p["b"]).tanh().square().sum((1, 2))
    batch[0, 1, 2] = torch.nan
    got, _ = clipped_grad(loss_fn, params, batch, clipping.Flat(0.1), engine=ENGINES[engine]())
    expected, _ = clipped_grad(loss_fn, params, batch[1:], clipping.Flat(0.1))
    assert all(torch.allclose(got.sums[name], expected.sums[name], atol=1e-12) for name in params)
