"""Every engine against the loop over single samples, on every model. A new engine or model is a new line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from devices import devices
from models import CASES, build
from reference import loop_clipped_sum
from zoo import language
from zoo.parity import differences, truth_of, without_gradient

from dpfunc import clipping
from dpfunc.clipped import clipped_grad
from dpfunc.clipping.rules import SLACK, group_bounds, partition
from dpfunc.engines import auto, captured, ghost, loop, vmap
from dpfunc.engines._per_sample import Dense

ENGINES = {"auto": auto(), "vmap": vmap(), "ghost": ghost(), "loop": loop(), "captured": captured()}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
FAMILIES = [f"{family}, {choice}" for family, choice in language.CASES]

# The first passes of `captured` are those of `auto`.
engines = pytest.mark.parametrize("engine", [name for name in ENGINES if name != "captured"])
models = pytest.mark.parametrize("name", CASES)


@cache
def case_of(name, dtype=torch.float64, device="cpu"):
    return build(name, dtype=dtype, device=device) if name in CASES else language.build(*name.split(", "), dtype)


@cache
def truth(name, dtype=torch.float64, device="cpu"):
    return truth_of(case_of(name, dtype, device))


def check(engine, name, dtype, device="cpu"):
    case = case_of(name, dtype, device)
    for _ in range(3 if engine == "captured" else 0):  # after which its operations are replayed
        ENGINES[engine](case.loss_fn, case.params, case.batch)
    found = differences(ENGINES[engine], case, truth(name, dtype, device))
    assert "gradients" in found or engine != "loop"  # groups of rows, ghosts and replays have none
    assert all(value < TOLERANCE[dtype] for value in found.values()), found
    assert engine != "auto" or ENGINES[engine].decision(case.loss_fn).engine == "one pass"


# In float32 the default engine alone: rounding follows from the same rules in all.
runs = pytest.mark.parametrize(
    ("engine", "dtype"), [*((engine, torch.float64) for engine in ENGINES), ("auto", torch.float32)]
)


@devices
@models
@runs
def test_gradients_equal_the_loop(engine, name, dtype, device):
    check(engine, name, dtype, device)


# The default engine goes through all; the others through each family as a whole, and through each kind of adapter.
OTHERS = [name for name in FAMILIES if name.endswith(", full") or name.startswith(("BERT", "Llama"))]


@pytest.mark.parametrize(
    ("engine", "dtype", "name"),
    [
        *(("auto", dtype, name) for dtype in (torch.float64, torch.float32) for name in FAMILIES),
        *((engine, torch.float64, name) for engine in ("vmap", "ghost", "loop") for name in OTHERS),
    ],
)
def test_language_models_equal_the_loop(engine, name, dtype):
    """Hugging Face families: text, images, both."""
    check(engine, name, dtype)


@pytest.mark.parametrize("name", [*CASES, *FAMILIES])
def test_every_trained_parameter_gets_a_gradient(name):
    """Nothing is silently left out, and the comparisons say something about it; samples differ."""
    found = truth(name)
    unused = language.FAMILIES[name.split(", ")[0]].unused if name in FAMILIES else "position_embeddings|key"
    assert all(re.search(unused, param) for param in without_gradient(found))
    totals_B = torch.stack(list(found.norms.values())).square().sum(0).sqrt()
    assert totals_B.min() > 0
    assert totals_B.std() > 1e-3 * totals_B.mean(), "an engine that gave each sample the mean would be seen"


def scaled(name, factor):
    """The loop, with one of its answers wrong by a factor."""

    def engine(loss_fn, params, batch):
        right = loop()(loss_fn, params, batch)
        times = lambda values, of: {key: value * (factor if of == name else 1) for key, value in values.items()}
        return SimpleNamespace(
            losses_B=right.losses_B * (factor if name == "losses" else 1),
            sq_norms=lambda: times(right.sq_norms(), "squared norms"),
            weighted_sum=lambda factors: times(right.weighted_sum(factors), "sums"),
            grads={
                key: Dense(grad.dense() * (factor if name == "gradients" else 1)) for key, grad in right.grads.items()
            },
        )

    return engine


@pytest.mark.parametrize("name", ["losses", "squared norms", "sums", "gradients"])
def test_a_wrong_engine_is_seen(name):
    found = differences(scaled(name, 1.001), case_of("BERT, biases"), truth("BERT, biases"))
    assert [key for key, value in found.items() if value > TOLERANCE[torch.float64]] == [name]


@engines
@models
def test_no_graph_is_left(engine, name):
    """Parameters that are not trained may require gradients; nothing is recorded for them."""
    case = build(name)
    per_sample = ENGINES[engine](case.loss_fn, case.params, case.batch)
    assert not per_sample.losses_B.requires_grad
    sums = per_sample.weighted_sum(dict.fromkeys(case.params, torch.ones(len(per_sample.losses_B))))
    assert not any(value.requires_grad for value in sums.values())


def clipped_by_loop(case, groups, bound):
    parts = partition(groups, tuple(case.params))
    bounds = {group: c * (1 - SLACK) for group, c in group_bounds(bound, parts.group_names).items()}
    return loop_clipped_sum(case.loss_fn, case.params, case.batch, lambda n, c: c / max(n, c), parts.group_of, bounds)


@devices
@engines
@models
def test_clipped_sums_equal_the_loop(engine, name, device):
    """In microbatches of any size; and clipping changes the sum, also where biases alone are trained."""
    case = build(name, size=7, dtype=torch.float64, device=device)
    expected = clipped_by_loop(case, clipping.AllParameters(), 0.5)
    for size in (None, 3, "auto"):
        got, seen = clipped_grad(*vars(case).values(), clipping.Flat(0.5), engine=ENGINES[engine], microbatch_size=size)
        assert (seen.norms_BG > 0.5).any()
        for param in case.params:
            assert torch.allclose(got.sums[param], expected[param], atol=1e-10), (param, size)


GROUPINGS = {"layer": clipping.PerLayer(), "parameter": clipping.PerParameter(), "blocks": clipping.Blocks(2)}


@models
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_clipped_sums_of_groups_equal_the_loop(grouping, name):
    case = build(name, size=7, dtype=torch.float64)
    groups = GROUPINGS["parameter" if len(case.params) < 2 else grouping]
    expected = clipped_by_loop(case, groups, 0.3)
    got, _ = clipped_grad(*vars(case).values(), clipping.Flat(0.3, groups=groups), engine=ENGINES["auto"])
    for param in case.params:
        assert torch.allclose(got.sums[param], expected[param], atol=1e-10), param


@engines
def test_groups_of_several_dtypes(engine):
    generator = torch.Generator().manual_seed(0)
    params = {
        "a.w": torch.randn(5, 4, generator=generator),
        "b.w": torch.randn(5, 5, generator=generator, dtype=torch.float64),
    }
    loss_fn = lambda params, batch: (batch @ params["a.w"].T).double().matmul(params["b.w"]).square().sum(1)
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
    got, expected = (clipped_grad(*vars(case).values(), Total(), engine=engine)[0] for engine in (auto(), loop()))
    torch.testing.assert_close(got.sums, expected.sums)
