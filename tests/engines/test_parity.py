"""Every engine against the loop over single samples, on every model. A new engine or model is a new line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from devices import devices
from models import CASES, build
from reference import loop_clipped_sum, loop_gradients

from dpfunc import clipping
from dpfunc.clipped import clipped_grad
from dpfunc.clipping.bounds import SLACK, group_bounds
from dpfunc.clipping.groups import partition
from dpfunc.engines import auto, ghost, loop, vmap
from dpfunc.functional import functionalize
from dpfunc.rng import insecure_key

ENGINES = {"auto": auto(), "vmap": vmap(), "ghost": ghost(), "loop": loop()}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

engines = pytest.mark.parametrize("engine", ENGINES)
models = pytest.mark.parametrize("name", CASES)


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def gradients(engine, case):
    """Losses, squared norms and gradients of each sample; those of an engine without gradients as sums with factor 1."""
    per_sample = engine(case.loss_fn, case.params, case.batch)
    if hasattr(per_sample, "grads"):
        grads = {name: grad.dense() for name, grad in per_sample.grads.items()}
        return per_sample.losses_B, per_sample.sq_norms(), grads
    rows = []
    for one in torch.eye(len(per_sample.losses_B), dtype=torch.float64):
        again = engine(case.loss_fn, case.params, case.batch)
        rows.append(again.weighted_sum(dict.fromkeys(case.params, one.to(next(iter(case.params.values())).dtype))))
    grads = {name: torch.stack([row[name] for row in rows]) for name in case.params}
    return per_sample.losses_B, per_sample.sq_norms(), grads


@devices
@engines
@models
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
def test_gradients_equal_the_loop(engine, name, dtype, device):
    case = build(name, dtype=dtype, device=device)
    losses_B, sq_norms, grads_B = gradients(ENGINES[engine], case)
    truth = loop_gradients(case.loss_fn, case.params, case.batch)
    losses = torch.stack([loss for loss, _ in truth])
    assert relative(losses_B, losses) < TOLERANCE[dtype]
    largest = max(float(g.double().norm()) for _, grads in truth for g in grads.values())
    for param in case.params:
        got, expected = grads_B[param], torch.stack([grads[param] for _, grads in truth])
        assert (got.double() - expected.double()).norm() < TOLERANCE[dtype] * largest, param
        assert (
            relative(sq_norms[param], expected.double().flatten(1).square().sum(1)) < (10 * TOLERANCE[dtype])
            or expected.norm() < TOLERANCE[dtype] * largest
        )


@engines
@models
def test_no_graph_is_left(engine, name):
    """Parameters that are not trained may require gradients; nothing is recorded for them."""
    case = build(name)
    per_sample = ENGINES[engine](case.loss_fn, case.params, case.batch)
    assert not per_sample.losses_B.requires_grad
    sums = per_sample.weighted_sum(dict.fromkeys(case.params, torch.ones(len(per_sample.losses_B))))
    assert not any(value.requires_grad for value in sums.values())


@devices
@engines
@models
def test_clipped_sums_equal_the_loop(engine, name, device):
    case = build(name, size=7, dtype=torch.float64, device=device)
    group_of = dict.fromkeys(case.params, "all")
    flat = lambda n, c: c / max(n, c)
    bound = 0.5
    expected = loop_clipped_sum(case.loss_fn, case.params, case.batch, flat, group_of, {"all": bound * (1 - SLACK)})
    got, _ = clipped_grad(
        case.loss_fn, case.params, case.batch, clipping.Flat(bound), engine=ENGINES[engine], microbatch_size=3
    )
    for param in case.params:
        assert torch.allclose(got.sums[param], expected[param], atol=1e-10), param


GROUPINGS = {"layer": clipping.PerLayer(), "parameter": clipping.PerParameter(), "blocks": clipping.Blocks(2)}


@models
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_clipped_sums_of_groups_equal_the_loop(grouping, name):
    case, bound = build(name, size=7, dtype=torch.float64), 0.3
    groups = GROUPINGS["parameter" if len(case.params) < 2 else grouping]
    parts = partition(groups, tuple(case.params))
    bounds = {group: c * (1 - SLACK) for group, c in group_bounds(bound, parts.group_names).items()}
    expected = loop_clipped_sum(
        case.loss_fn, case.params, case.batch, lambda n, c: c / max(n, c), parts.group_of, bounds
    )
    got, _ = clipped_grad(
        case.loss_fn, case.params, case.batch, clipping.Flat(bound, groups=groups), engine=ENGINES["auto"]
    )
    for param in case.params:
        assert torch.allclose(got.sums[param], expected[param], atol=1e-10), param


@models
def test_models_take_one_pass(name):
    case, engine = build(name), auto()
    engine(case.loss_fn, case.params, case.batch)
    assert engine.decision(case.loss_fn).engine == "one pass"


@engines
def test_groups_of_several_dtypes(engine):
    generator = torch.Generator().manual_seed(0)
    params = {
        "a.w": torch.randn(5, 4, generator=generator),
        "b.w": torch.randn(5, 5, generator=generator, dtype=torch.float64),
    }

    def loss_fn(params, batch):
        return (batch @ params["a.w"].T).double().matmul(params["b.w"]).square().sum(1)

    batch, clip = torch.randn(6, 4, generator=generator), clipping.Flat(1.0, clipping.PerLayer())
    found, _ = clipped_grad(loss_fn, params, batch, clip, engine=ENGINES[engine])
    expected, _ = clipped_grad(loss_fn, params, batch, clip, engine=loop())
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-3, atol=1e-5)


@engines
def test_a_sample_that_is_not_finite_in_one_group_contributes_to_none(engine):
    """The others are as if it were not there; also where it is alone with its like."""

    def loss_fn(params, batch):
        hidden = torch.nn.functional.linear(batch, params["first"])
        return torch.nn.functional.linear(hidden, params["last"]).sum(1)

    params = {"first": torch.full((3, 3), 1e-30), "last": torch.ones(1, 3)}
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    batch[2] = 1e30
    rule = clipping.Flat(1.0, groups=clipping.PerParameter())
    got, seen = clipped_grad(loss_fn, params, batch, rule, engine=ENGINES[engine])
    without, _ = clipped_grad(loss_fn, params, batch[[0, 1, 3]], rule, engine=ENGINES[engine])
    assert not bool(torch.isfinite(seen.norms_BG[2]).all())
    torch.testing.assert_close(got.sums, without.sums)
    for bad in (torch.nan, torch.inf):
        none, _ = clipped_grad(loss_fn, params, torch.full((3, 3), bad), rule, engine=ENGINES[engine])
        assert not any(value.any() for value in none.sums.values())


def test_padded_rows_contribute_nothing():
    case, mask_B = build("mlp", size=4), torch.tensor([True, False, True, True])
    rule = clipping.Flat(0.5, groups=clipping.PerLayer())
    got, _ = clipped_grad(case.loss_fn, case.params, case.batch, rule, engine=auto(), mask_B=mask_B)
    rest = torch.utils._pytree.tree_map(lambda leaf: leaf[mask_B], case.batch)
    expected, _ = clipped_grad(case.loss_fn, case.params, rest, rule, engine=auto())
    torch.testing.assert_close(got.sums, expected.sums, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Total:
    """A rule whose factors need the norms of all groups."""

    clip_norm: float = 0.1
    groups: object = clipping.PerLayer()

    def factors(self, norms_BG, bounds_G):
        total_B1 = norms_BG.square().sum(1, keepdim=True).sqrt()
        return (bounds_G.square().sum().sqrt() / total_B1.clamp(min=1e-9)).expand_as(norms_BG) / 4


def test_a_rule_over_all_groups():
    case = build("mlp", size=5, dtype=torch.float64)
    got, _ = clipped_grad(case.loss_fn, case.params, case.batch, Total(), engine=auto())
    expected, _ = clipped_grad(case.loss_fn, case.params, case.batch, Total(), engine=loop())
    torch.testing.assert_close(got.sums, expected.sums)


@engines
@models
@pytest.mark.parametrize("microbatch_size", [1, 2, "auto"])
def test_microbatches_change_nothing(engine, name, microbatch_size):
    case = build(name, size=5, dtype=torch.float64)
    options = {"engine": ENGINES[engine]}
    whole, _ = clipped_grad(case.loss_fn, case.params, case.batch, clipping.Flat(0.5), **options)
    parts, _ = clipped_grad(
        case.loss_fn, case.params, case.batch, clipping.Flat(0.5), microbatch_size=microbatch_size, **options
    )
    for param in case.params:
        assert torch.allclose(whole.sums[param], parts.sums[param], atol=1e-10), param


@models
def test_every_trained_parameter_gets_a_gradient(name):
    """Nothing is silently left out."""
    case = build(name)
    norms = vmap()(case.loss_fn, case.params, case.batch).sq_norms()
    zero = [param for param, value in norms.items() if not (value > 0).any()]
    assert zero == [] or all("position_embeddings" in param or "key" in param for param in zero)


def test_dropout_is_replayed_by_key():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).train()
    forward, params = functionalize(model)
    batch = torch.randn(6, 4)
    loss_fn = lambda p, b: forward(p, b).square().sum(1)
    state = torch.random.get_rng_state()
    sums = [
        clipped_grad(loss_fn, params, batch, clipping.Flat(1.0), microbatch_size=4, key=insecure_key(seed))[0].sums
        for seed in (1, 1, 2)
    ]
    assert torch.equal(sums[0]["0.weight"], sums[1]["0.weight"])
    assert not torch.equal(sums[0]["0.weight"], sums[2]["0.weight"])
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is as it was


def test_dropout_masks_differ_between_samples():
    model = torch.nn.Dropout(0.5).train()
    losses = vmap()(lambda p, b: (model(b) * p["w"]).sum(1), {"w": torch.ones(64)}, torch.ones(4, 64)).losses_B
    assert len(set(losses.tolist())) > 1
