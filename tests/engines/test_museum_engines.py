"""Faults of other libraries' engines, one test each, for every engine here."""

from __future__ import annotations

import pytest
import torch
from cases import RULES
from models import build
from reference import loop_clipped_sum
from torch import nn

from dpfunc import clipping, engines
from dpfunc.clipped import clipped_grad
from dpfunc.clipping.rules import SLACK, partition
from dpfunc.functional import functionalize

ENGINES = {name: getattr(engines, name) for name in ("auto", "vmap", "ghost", "loop")}
every_engine = pytest.mark.parametrize("engine", ENGINES)


def check(engine, loss_fn, params, batch, rule, factor, **options):
    """The clipped sum is that of the loop, and clipping has changed it."""
    parts = partition(rule.groups, tuple(params))
    bounds = {group: rule.clip_norm / len(parts.group_names) ** 0.5 * (1 - SLACK) for group in parts.group_names}
    expected = loop_clipped_sum(loss_fn, params, batch, RULES[factor][1], parts.group_of, bounds)
    raw = loop_clipped_sum(loss_fn, params, batch, lambda n, c: 1.0, parts.group_of, bounds)
    got, _ = clipped_grad(loss_fn, params, batch, rule, engine=ENGINES[engine](), **options)
    for name in params:
        assert torch.allclose(got.sums[name], expected[name], atol=1e-10), name
    assert any(not torch.allclose(got.sums[name], raw[name], rtol=1e-3) for name in params)


@every_engine
@pytest.mark.parametrize("name", ["transformer bias-only", "mlp", "cnn"])
def test_no_engine_returns_the_raw_gradient(engine, name):
    """Also where no matrix is trained."""
    case = build(name, dtype=torch.float64)
    check(engine, case.loss_fn, case.params, case.batch, clipping.Flat(0.01), "flat")


class Volume(nn.Module):
    """Convolutions of one, two and three axes, grouped ones too; the layers run in another order than registered."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.line = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.plane = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.space = nn.Conv3d(2, 4, 2)

    def forward(self, x):
        x = torch.tanh(self.space(x)).mean(2)
        x = torch.tanh(self.plane(x)).mean(2)
        return self.head(self.line(x).mean(2))


@every_engine
def test_grouped_and_3d_convolutions_are_trained_in_any_order(engine):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        forward, params = functionalize(Volume().double())
    batch = torch.randn(4, 2, 3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss_fn = lambda p, b: forward(p, b).square().sum(1)
    check(engine, loss_fn, params, batch, clipping.Flat(1e-3), "flat")
    norms = ENGINES[engine]()(loss_fn, params, batch).sq_norms()
    assert all((value > 0).all() for value in norms.values())


@every_engine
def test_per_layer_is_not_silently_flat(engine):
    case = build("mlp", dtype=torch.float64)
    rule = clipping.Flat(0.05, groups=clipping.PerLayer())
    check(engine, case.loss_fn, case.params, case.batch, rule, "flat")
    flat, _ = clipped_grad(case.loss_fn, case.params, case.batch, clipping.Flat(0.05), engine=ENGINES[engine]())
    layers, _ = clipped_grad(case.loss_fn, case.params, case.batch, rule, engine=ENGINES[engine]())
    assert any(not torch.allclose(flat.sums[name], layers.sums[name], rtol=1e-2) for name in case.params)


@every_engine
def test_auto_v_at_a_zero_gradient(engine):
    """A sample that the loss does not see contributes zero, not NaN."""
    loss_fn = lambda p, b: torch.nn.functional.linear(b, p["w"], p["b"]).square().sum(1) * b[:, 0]
    batch = torch.tensor([[1.0, 2.0], [0.0, 3.0], [2.0, 1.0]], dtype=torch.float64)
    params = {"w": torch.ones(3, 2, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}
    check(engine, loss_fn, params, batch, clipping.auto_v(1.0), "auto_v")


@every_engine
def test_the_length_of_others_does_not_matter(engine):
    """The norm of a sample with a mean over its own tokens is that of the sample alone."""
    case = build("GPT-2 full, tied", size=4)
    together = ENGINES[engine]()(case.loss_fn, case.params, case.batch).sq_norms()["transformer.wte.weight"]
    for i in range(4):
        row = {key: value[i : i + 1] for key, value in case.batch.items()}
        alone = ENGINES[engine]()(case.loss_fn, case.params, row).sq_norms()["transformer.wte.weight"]
        assert torch.allclose(together[i : i + 1], alone, rtol=1e-5)
