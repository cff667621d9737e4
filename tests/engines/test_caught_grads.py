"""Clip groups that are summed during the backward pass give the sums of the oracle, and keep nothing of a group."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases import RULES
from models import CASES, build
from reference import loop_clipped_sum
from torch.nn.functional import conv1d, linear

from dpfunc import clipping
from dpfunc.clipped import clipped_grad
from dpfunc.clipping.bounds import SLACK, group_bounds
from dpfunc.clipping.groups import partition
from dpfunc.engines import auto, bookkeeping, ghost, loop, vmap
from dpfunc.engines.caught_grads import CaughtGrads, GroupwiseSums
from dpfunc.engines.cost import Choice
from dpfunc.engines.rules.convolution import Convolved
from dpfunc.engines.rules.table import Use
from dpfunc.errors import InvalidArgument
from dpfunc.types import GroupFactors

GROUPINGS = {"layer": clipping.PerLayer(), "parameter": clipping.PerParameter(), "blocks": clipping.Blocks(2)}


def expected_sums(case, groups, bound, rule="flat"):
    """Clipped sums by the loop over single samples, with the bounds of the groups."""
    parts = partition(groups, tuple(case.params))
    bounds = {group: c * (1 - SLACK) for group, c in group_bounds(bound, parts.group_names).items()}
    return loop_clipped_sum(case.loss_fn, case.params, case.batch, RULES[rule][1], parts.group_of, bounds)


def ones(params, num_samples):
    """Factors of one for all samples; each parameter is a group."""
    return GroupFactors(num_samples, {name: name for name in params}, lambda group, sq_norms: torch.ones(num_samples))


@pytest.mark.parametrize(("channels", "cells", "early"), [(128, 60, False), (64, 200, True)])
@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_are_formed_when_it_takes_less_memory(monkeypatch, channels, cells, early, grouped):
    """After the backward pass where their factors are smaller, until then; at once where a clip group needs them."""
    order = []
    form, finish = Convolved.dense, CaughtGrads.finish
    monkeypatch.setattr(Convolved, "dense", lambda self: order.append("formed") or form(self))
    monkeypatch.setattr(CaughtGrads, "finish", lambda self: order.append("backward pass ends") or finish(self))
    monkeypatch.setattr(Use, "choose", lambda use, budget, *, groupwise: Choice("formed", 0, 0))
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(channels, channels, 3, generator=generator) / channels for name in "ab"}
    batch = torch.randn(3, channels, cells, generator=generator)
    loss_fn = lambda p, x: conv1d(conv1d(x, p["a"]).tanh(), p["b"]).square().sum((1, 2))
    groups = clipping.PerParameter() if grouped else clipping.AllParameters()
    rule = clipping.Flat(1.0, groups=groups)
    got, _ = clipped_grad(loss_fn, params, batch, rule, engine=bookkeeping())
    formed = ["formed", "formed"]
    assert order == ([*formed, "backward pass ends"] if early or grouped else ["backward pass ends", *formed])
    expected, _ = clipped_grad(loss_fn, params, batch, rule, engine=loop())
    for name in params:
        torch.testing.assert_close(got.sums[name], expected.sums[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_clipped_sums_equal_the_loop(grouping, name):
    case, bound = build(name, size=7, dtype=torch.float64), 0.3
    groups = GROUPINGS[grouping]
    if grouping == "blocks" and len(case.params) < 2:
        groups = clipping.PerParameter()
    expected = expected_sums(case, groups, bound)
    rule = clipping.Flat(bound, groups=groups)
    got, _ = clipped_grad(case.loss_fn, case.params, case.batch, rule, engine=bookkeeping(), microbatch_size=3)
    for param in case.params:
        assert torch.allclose(got.sums[param], expected[param], atol=1e-10), param


@pytest.mark.parametrize("rule", ["flat", "auto_s", "psac", "threshold"])
def test_every_rule_whose_factors_are_of_one_group(rule):
    case, groups = build("mlp", size=5, dtype=torch.float64), clipping.PerLayer()
    made = {
        "flat": clipping.Flat(0.5, groups=groups),
        "auto_s": clipping.Automatic(0.5, groups=groups),
        "psac": clipping.PSAC(0.5, regularizer=0.1, groups=groups),
        "threshold": clipping.Threshold(0.5, threshold=2.0, groups=groups),
    }[rule]
    got, seen = clipped_grad(case.loss_fn, case.params, case.batch, made, engine=bookkeeping())
    kept, seen_kept = clipped_grad(case.loss_fn, case.params, case.batch, made, engine=ghost())
    assert torch.allclose(seen.norms_BG, seen_kept.norms_BG)
    for param in case.params:
        assert torch.allclose(got.sums[param], kept.sums[param], atol=1e-10), param


def groupwise_sums(case, num_samples=4):
    """Sums of a batch with factors of one."""
    engine = bookkeeping().groupwise(ones(case.params, num_samples))
    return engine(case.loss_fn, case.params, case.batch)


def test_groups_are_summed_and_nothing_of_them_is_kept():
    case = build("mlp", size=4)
    result = groupwise_sums(case)
    assert isinstance(result, GroupwiseSums)
    assert set(result.caught.sums) == set(case.params)
    assert not result.rest.grads
    assert not result.caught.kept


def test_one_group_is_summed_while_others_wait():
    """The order is that of the backward pass: the last layer first."""
    case = build("mlp", size=4)
    order = []

    def factors(group, sq_norms):
        order.append(group)
        return torch.ones(4)

    layers = dict(zip(case.params, partition(clipping.PerLayer(), tuple(case.params)).group_of.values(), strict=True))
    bookkeeping().groupwise(GroupFactors(4, layers, factors))(case.loss_fn, case.params, case.batch)
    assert order == list(reversed(dict.fromkeys(layers.values())))


class Doubled(torch.autograd.Function):
    """A function that no mode sees."""

    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@dataclass(frozen=True)
class Problem:
    loss_fn: object
    params: dict
    batch: torch.Tensor


def test_copies_are_known_after_the_backward_pass():
    """A bias that is added is a private copy for each sample: its group waits, the others do not."""

    def loss_fn(params, batch):
        return (torch.nn.functional.linear(batch, params["w"]) + params["b"]).tanh().sum(1)

    params = {"w": torch.ones(2, 3), "b": torch.ones(2)}
    result = groupwise_sums(Problem(loss_fn, params, torch.randn(4, 3)))
    assert set(result.caught.sums) == {"w"}
    assert set(result.rest.grads) == {"b"}


def in_two_ways(use):
    """A matrix with one use by a rule, and one in another way."""

    def loss_fn(params, batch):
        direct = torch.nn.functional.linear(batch, params["w"]).square().sum(1)
        return direct + torch.nn.functional.linear(batch, use(params["w"])).sum(1) + (batch @ params["v"]).sum(1)

    torch.manual_seed(0)
    params = {"w": torch.randn(3, 3, dtype=torch.float64), "v": torch.randn(3, 2, dtype=torch.float64)}
    return Problem(loss_fn, params, torch.randn(5, 3, dtype=torch.float64))


WAYS = {
    "custom Function": Doubled.apply,
    "transposed": lambda w: w.t(),
    "scaled": lambda w: w * 3,
    "twice": lambda w: w,
    "added": lambda w: torch.eye(3, dtype=torch.float64) + w,
    "part": lambda w: torch.cat([w[:2], w[:1]]),
}


@pytest.mark.parametrize("engine", [auto, bookkeeping, ghost])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_is_used_in_two_ways(way, engine):
    problem = in_two_ways(WAYS[way])
    expected = expected_sums(problem, clipping.PerParameter(), 0.5)
    rule = clipping.Flat(0.5, groups=clipping.PerParameter())
    got, _ = clipped_grad(problem.loss_fn, problem.params, problem.batch, rule, engine=engine())
    for name in problem.params:
        assert torch.allclose(got.sums[name], expected[name], atol=1e-10), name


def test_uses_that_the_loss_does_not_depend_on():
    def loss_fn(params, batch):
        torch.nn.functional.linear(batch, params["v"])
        return torch.nn.functional.linear(batch, params["w"]).sum(1)

    params = {"w": torch.ones(2, 3), "v": torch.ones(2, 3), "unused": torch.ones(4)}
    rule = clipping.Flat(0.5, groups=clipping.PerParameter())
    got, _ = clipped_grad(loss_fn, params, torch.randn(4, 3), rule, engine=auto())
    assert got.sums["w"].norm() > 0
    assert not got.sums["v"].any()
    assert not got.sums["unused"].any()


def test_a_sample_that_is_not_finite_in_one_group_contributes_to_none():
    """The group of its last layer is summed before the other norm is known."""

    def loss_fn(params, batch):
        hidden = torch.nn.functional.linear(batch, params["first"])
        return torch.nn.functional.linear(hidden, params["last"]).sum(1)

    params = {"first": torch.full((3, 3), 1e-30), "last": torch.ones(1, 3)}
    batch = torch.randn(4, 3)
    batch[2] = 1e30
    rule = clipping.Flat(1.0, groups=clipping.PerParameter())
    got, seen = clipped_grad(loss_fn, params, batch, rule, engine=auto())
    without, _ = clipped_grad(loss_fn, params, batch[[0, 1, 3]], rule, engine=auto())
    assert not bool(torch.isfinite(seen.norms_BG[2]).all())
    assert bool(torch.isfinite(seen.norms_BG[2]).any())
    for name in params:
        assert torch.allclose(got.sums[name], without.sums[name]), name


def test_padded_rows_contribute_nothing():
    case = build("mlp", size=4)
    mask_B = torch.tensor([True, False, True, True])
    rule = clipping.Flat(0.5, groups=clipping.PerLayer())
    got, _ = clipped_grad(case.loss_fn, case.params, case.batch, rule, engine=auto(), mask_B=mask_B)
    rest = torch.utils._pytree.tree_map(lambda leaf: leaf[mask_B], case.batch)
    expected, _ = clipped_grad(case.loss_fn, case.params, rest, rule, engine=auto())
    for name in case.params:
        assert torch.allclose(got.sums[name], expected.sums[name], atol=1e-6), name


@dataclass(frozen=True)
class Total:
    """A rule whose factors need the norms of all groups; `by_group` says the contrary or nothing."""

    clip_norm: float = 0.1
    groups: object = clipping.PerLayer()

    def factors(self, norms_BG, bounds_G):
        total_B1 = norms_BG.square().sum(1, keepdim=True).sqrt()
        return (bounds_G.square().sum().sqrt() / total_B1.clamp(min=1e-9)).expand_as(norms_BG) / 4


@dataclass(frozen=True)
class Lying(Total):
    by_group: bool = True


def test_a_rule_over_all_groups_is_not_summed_early():
    case = build("mlp", size=5, dtype=torch.float64)
    got, _ = clipped_grad(case.loss_fn, case.params, case.batch, Total(), engine=auto())
    expected, _ = clipped_grad(case.loss_fn, case.params, case.batch, Total(), engine=ghost())
    for name in case.params:
        assert torch.allclose(got.sums[name], expected.sums[name]), name


def test_a_rule_that_claims_to_be_by_group_and_is_not_is_refused():
    case = build("mlp", size=5, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match="depend on more than the norms of the group"):
        clipped_grad(case.loss_fn, case.params, case.batch, Lying(), engine=auto())


def test_checkpointed_layers():
    def block(params, x):
        return torch.nn.functional.linear(x.tanh(), params["w"])

    def loss_fn(params, batch):
        hidden = torch.utils.checkpoint.checkpoint(block, params, batch, use_reentrant=False)
        return torch.nn.functional.linear(hidden, params["v"]).square().sum(1)

    torch.manual_seed(0)
    params = {"w": torch.randn(3, 3, dtype=torch.float64), "v": torch.randn(2, 3, dtype=torch.float64)}
    problem = Problem(loss_fn, params, torch.randn(5, 3, dtype=torch.float64))
    expected = expected_sums(problem, clipping.PerParameter(), 0.5)
    rule = clipping.Flat(0.5, groups=clipping.PerParameter())
    got, _ = clipped_grad(loss_fn, params, problem.batch, rule, engine=bookkeeping())
    for name in params:
        assert torch.allclose(got.sums[name], expected[name], atol=1e-10), name
    assert set(groupwise_sums(problem, num_samples=5).caught.sums) == set(params)


@pytest.mark.parametrize("engine", [bookkeeping, ghost, vmap])
def test_groups_of_several_dtypes(engine):
    params = {
        "a.w": torch.randn(5, 4, generator=torch.Generator().manual_seed(0)),
        "b.w": torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    }

    def loss_fn(params, batch):
        return linear(linear(batch, params["a.w"]).double(), params["b.w"]).square().sum(1)

    batch, clip = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)), clipping.Flat(1.0, clipping.PerLayer())
    found, _ = clipped_grad(loss_fn, params, batch, clip, engine=engine())
    expected, _ = clipped_grad(loss_fn, params, batch, clip, engine=loop())
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-3, atol=1e-5)
