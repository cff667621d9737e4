"""What is promised of every clip rule and every grouping, as properties of clipped sums."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from cases import GROUPINGS, RULES, as_batch, flat, linear_loss, params, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import loop_clipped_sum

from dpfunc import clipping
from dpfunc.batches import check_finite
from dpfunc.clipped import clipped_grad, make_clipped_grad
from dpfunc.clipping.rules import SLACK, group_bounds, partition
from dpfunc.engines.by_name import ENGINES, engine_of
from dpfunc.errors import InvalidArgument

every_rule = pytest.mark.parametrize("rule_name", RULES)
every_grouping = pytest.mark.parametrize("grouping", GROUPINGS)
some = settings(max_examples=3)  # for each of 30 pairs: 90 in all
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 24)
scales = st.sampled_from([1e-18, 1e-6, 1e-2, 1.0, 1e3, 1e12])
UNEQUAL = {"body": 0.3, "head": 2.0}


PREPARED = {}


def clipped_sum(rule, rows_BP, dtype=torch.float32, **options):
    """By one computation a rule, as in a run: its preparation takes three times as long as a sum."""
    prepared = PREPARED.setdefault(
        (repr(rule), dtype, *options.items()), make_clipped_grad(linear_loss, rule, **options)
    )
    return prepared(params(dtype), as_batch(rows_BP))[0]


def rule_of(rule_name, grouping, bound=1.0):
    return RULES[rule_name][0](bound, GROUPINGS[grouping])


@every_rule
@every_grouping
@some
@given(seed=seeds, size=sizes, scale=scales)
def test_sensitivity(rule_name, grouping, seed, size, scale):
    """One record moves the float32 sum by at most the sensitivity, with no tolerance: added, removed and replaced."""
    rows_BP = random_rows(seed, size + 1, scale)
    rule = rule_of(rule_name, grouping)
    full = clipped_sum(rule, rows_BP[:-1])
    removed = clipped_sum(rule, rows_BP[1:-1])
    replaced = clipped_sum(rule, torch.cat([rows_BP[-1:], rows_BP[1:-1]]), adjacency="replace_one")
    assert (flat(full.sums) - flat(removed.sums)).norm() <= full.sensitivity
    assert (flat(full.sums) - flat(replaced.sums)).norm() <= replaced.sensitivity
    assert full.sensitivity == pytest.approx(1.0)
    assert replaced.sensitivity == pytest.approx(2.0)


@pytest.mark.parametrize("microbatch_size", [None, 256])
@given(seed=seeds, size=st.integers(512, 1024))
@settings(max_examples=10)
def test_sensitivity_of_aligned_records(microbatch_size, seed, size):
    """The largest sums there are, whose float32 numbers lie furthest apart: every gradient points the same way."""
    rows_BP = random_rows(seed, 1, 100.0).expand(size, -1)
    rule = clipping.Flat(1.0)
    full, removed = (clipped_sum(rule, rows, microbatch_size=microbatch_size) for rows in (rows_BP, rows_BP[1:]))
    moved = (flat(full.sums).double() - flat(removed.sums).double()).norm()
    assert 0.99 <= moved <= full.sensitivity


@every_rule
@given(seed=seeds, size=sizes)
def test_sensitivity_of_each_group_with_unequal_bounds(rule_name, seed, size):
    rows_BP = random_rows(seed, size)
    rule = RULES[rule_name][0](UNEQUAL, GROUPINGS["mapping"])
    full, removed = clipped_sum(rule, rows_BP), clipped_sum(rule, rows_BP[1:])
    moved = dict.fromkeys(UNEQUAL, 0.0)
    for name, value in full.sums.items():
        moved[full.group_of[name]] += float((value.double() - removed.sums[name].double()).square().sum())
    assert all(math.sqrt(moved[group]) <= bound for group, bound in UNEQUAL.items())
    assert full.sensitivity == pytest.approx(math.hypot(0.3, 2.0))


@every_rule
@every_grouping
def test_the_bound_is_tight(rule_name, grouping):
    """The sensitivity is not overstated either: some gradient comes near it."""
    reach = 0.0
    ratio, number = (1.15, 54) if rule_name == "threshold" else (1.4, 24)  # which leaves out what is above its bound
    for scale in [0.1 * ratio**step for step in range(number)]:
        rows_BP = torch.ones(1, 19) * scale
        reach = max(reach, float(flat(clipped_sum(rule_of(rule_name, grouping), rows_BP).sums).norm()))
    assert 0.6 < reach <= 1.0


@every_rule
@every_grouping
@some
@given(seed=seeds, size=st.integers(1, 8))
def test_equals_the_loop(rule_name, grouping, seed, size):
    rows_BP = random_rows(seed, size, dtype=torch.float64)
    rule = rule_of(rule_name, grouping)
    names = tuple(params())
    parts = partition(GROUPINGS[grouping], names)
    bounds = {g: c * (1 - SLACK) for g, c in group_bounds(1.0, parts.group_names).items()}
    expected = loop_clipped_sum(
        linear_loss, params(torch.float64), as_batch(rows_BP), RULES[rule_name][1], parts.group_of, bounds
    )
    got = clipped_sum(rule, rows_BP, torch.float64)
    assert (flat(got.sums) - flat(expected)).norm() <= 1e-10 * max(1.0, float(flat(expected).norm()))


@every_rule
@every_grouping
@some
@given(bad=st.sampled_from([math.nan, math.inf, -math.inf, 3e38, 2e19]), seed=seeds, position=st.integers(0, 4))
def test_rows_that_are_not_finite(rule_name, grouping, bad, seed, position):
    """Such a sample (3e38 overflows the norm, 2e19 its square) contributes exact zero: the sum is that of the others."""
    rows_BP = random_rows(seed, 5)
    others = torch.cat([rows_BP[:position], rows_BP[position + 1 :]])
    rows_BP[position, seed % 19] = bad
    rule = rule_of(rule_name, grouping)
    with_bad, without = clipped_sum(rule, rows_BP), clipped_sum(rule, others)
    assert torch.isfinite(flat(with_bad.sums)).all()
    assert torch.allclose(flat(with_bad.sums), flat(without.sums), rtol=1e-6, atol=1e-6)
    only_bad = clipped_sum(rule, rows_BP[position : position + 1])
    assert (flat(only_bad.sums) == 0).all()


@every_rule
@every_grouping
def test_empty_batch(rule_name, grouping):
    """No rows: zeros of the right shapes, the same sensitivity, and nothing to look at."""
    rule = rule_of(rule_name, grouping)
    clipped, unreleased = clipped_grad(linear_loss, params(), as_batch(torch.zeros(0, 19)), rule)
    assert {name: value.shape for name, value in clipped.sums.items()} == {n: p.shape for n, p in params().items()}
    assert (flat(clipped.sums) == 0).all()
    assert clipped.sensitivity == pytest.approx(1.0)
    assert unreleased.losses_B.shape == (0,)
    assert unreleased.norms_BG.shape[0] == 0
    assert (flat(clipped_sum(rule, torch.zeros(3, 19)).sums) == 0).all(), "rows of zeros give zero"


@every_rule
@every_grouping
@some
@given(seed=seeds, size=sizes, microbatch_size=st.integers(1, 30))
def test_microbatch_invariance(rule_name, grouping, seed, size, microbatch_size):
    rows_BP = random_rows(seed, size)
    rule = rule_of(rule_name, grouping)
    whole = clipped_sum(rule, rows_BP)
    parts = clipped_sum(rule, rows_BP, microbatch_size=microbatch_size)
    assert torch.allclose(flat(whole.sums), flat(parts.sums), rtol=1e-5, atol=1e-5)
    assert whole.sensitivity == parts.sensitivity


@every_rule
@every_grouping
@some
@given(seed=seeds, size=sizes)
def test_permutation(rule_name, grouping, seed, size):
    rows_BP = random_rows(seed, size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    rule = rule_of(rule_name, grouping)
    assert torch.allclose(
        flat(clipped_sum(rule, rows_BP).sums), flat(clipped_sum(rule, rows_BP[order]).sums), rtol=1e-5, atol=1e-5
    )


@given(seed=seeds, size=sizes, padding=st.integers(1, 5))
def test_padding_contributes_nothing(seed, size, padding):
    rows_BP = random_rows(seed, size)
    junk = torch.full((padding, 19), math.nan)
    mask_B = torch.arange(size + padding) < size
    clipped, unreleased = clipped_grad(
        linear_loss, params(), as_batch(torch.cat([rows_BP, junk])), clipping.Flat(1.0), mask_B=mask_B
    )
    alone = clipped_sum(clipping.Flat(1.0), rows_BP)
    assert torch.allclose(flat(clipped.sums), flat(alone.sums), atol=1e-6)
    assert unreleased.losses_B.shape == (size,)


def loss_with_aux(params, batch):
    losses_B = linear_loss(params, batch)
    return losses_B, {"sign": losses_B > 0, "weights": [batch["head.weight"]], "twice": 2 * losses_B[:, None]}


def loss_that_reads(params, batch):
    """Rows in groups: a number that Python reads is another one."""
    losses_B, aux = loss_with_aux(params, batch)
    return (2 * losses_B if float(batch["head.weight"].sum()) > 0 else losses_B), aux


@pytest.mark.parametrize("loss", [loss_with_aux, loss_that_reads])
@pytest.mark.parametrize("microbatch_size", [None, 2, 3])
@pytest.mark.parametrize("name", ENGINES)
def test_aux(name, microbatch_size, loss):
    """Aux comes back for the real samples, in their order, without a graph; and changes no bit of what is summed."""
    rows_BP, mask_B = random_rows(0, 7), torch.tensor([1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    batch, values = as_batch(rows_BP), {name: value + 1 for name, value in params().items()}
    options = {"engine": engine_of(name), "microbatch_size": microbatch_size, "mask_B": mask_B}
    clipped, unreleased = clipped_grad(loss, values, batch, clipping.Flat(1.0), **options)
    alone, without = clipped_grad(lambda p, b: loss(p, b)[0], values, batch, clipping.Flat(1.0), **options)
    assert torch.equal(flat(clipped.sums), flat(alone.sums))
    assert without.aux is None
    assert torch.equal(unreleased.aux["weights"][0], batch["head.weight"][mask_B])
    torch.testing.assert_close(unreleased.aux["twice"][:, 0], 2 * linear_loss(values, batch)[mask_B])
    assert unreleased.aux["sign"].shape == (6,)
    assert not any(leaf.requires_grad for leaf in (unreleased.aux["twice"], unreleased.aux["sign"]))
    assert "2" not in repr(unreleased)
    none = clipped_grad(loss, values, as_batch(rows_BP[:0]), clipping.Flat(1.0), engine=engine_of(name))[1]
    assert none.aux is None


@pytest.mark.parametrize("aux", [1.0, {"a": torch.zeros(())}, {"a": torch.zeros(3)}, [torch.zeros(1), None]])
@pytest.mark.parametrize("name", ENGINES)
def test_aux_without_rows_is_refused(name, aux):
    with pytest.raises(InvalidArgument, match=r"Expected the aux of loss_fn.*got (shape|float|NoneType)"):
        clipped_grad(
            lambda p, b: (linear_loss(p, b), aux), params(), as_batch(random_rows(0, 4)), clipping.Flat(1.0),
            engine=engine_of(name),
        )  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_aux_of_other_shapes_is_refused(name):
    def loss(params, batch):
        losses_B = linear_loss(params, batch)
        return losses_B, torch.zeros(1, 1 + int(batch["head.weight"].sum() > 0))

    with pytest.raises(InvalidArgument, match="the same names, shapes and dtypes for all samples"):
        clipped_grad(loss, params(), as_batch(random_rows(0, 8)), clipping.Flat(1.0), engine=engine_of(name))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2e38])
def test_parameters_that_are_not_finite_are_refused(bad):
    """A norm that overflows is no reason: each number of the parameter is finite."""
    values = params()
    name = next(iter(values))
    values[name] = torch.full_like(values[name], bad)
    if math.isfinite(bad):
        assert math.isinf(values[name].norm())
        check_finite(values)
    else:
        with pytest.raises(InvalidArgument, match=f"^Expected finite parameters, got NaN or inf in {name}"):
            clipped_grad(linear_loss, values, as_batch(random_rows(0, 2)), clipping.Flat(clip_norm=1.0))


@pytest.mark.parametrize("part", ["norms", "sums"])
def test_an_engine_that_leaves_out_a_parameter_is_refused(part):
    """What is in no norm is not clipped."""

    def engine(loss_fn, own, batch):
        found = engine_of("vmap")(loss_fn, own, batch)
        missing = next(iter(own))

        def without(values, which):
            return {name: value for name, value in values.items() if part != which or name != missing}

        return SimpleNamespace(
            losses_B=found.losses_B,
            sq_norms=lambda: without(found.sq_norms(), "norms"),
            weighted_sum=lambda factors: without(found.weighted_sum(factors), "sums"),
        )

    with pytest.raises(InvalidArgument, match="Expected an engine with a norm and a sum of each parameter"):
        clipped_grad(linear_loss, params(), as_batch(random_rows(0, 3)), clipping.Flat(1.0), engine=engine)
