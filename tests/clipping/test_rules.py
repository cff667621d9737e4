"""Clip rules alone: factors against the formulas, what holds for every norm; groups and their bounds."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from cases import GROUPINGS, NAMES, RULES
from hypothesis import example, given
from hypothesis import strategies as st

from dpfunc import clipping, engines
from dpfunc.clipped import clipped_grad
from dpfunc.clipping.rules import SLACK, group_bounds, group_sensitivities, partition, safe_factors
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.types import ClippedSum

all_rules = pytest.mark.parametrize("name", RULES)
norm_values = st.floats(min_value=0, max_value=1e19, allow_subnormal=True)


def factor(rule, norm, bound, dtype=torch.float32):
    norms_BG = torch.tensor([[norm]], dtype=dtype)
    mask = torch.ones(1, dtype=torch.bool)
    return float(safe_factors(rule, norms_BG, [bound], mask)[0, 0])


@all_rules
@given(norm=st.floats(min_value=1e-6, max_value=1e6), bound=st.floats(min_value=1e-3, max_value=1e3))
def test_factors_follow_the_formula(name, norm, bound):
    make, formula = RULES[name]
    expected = formula(norm, bound * (1 - SLACK))
    expected = min(expected, bound * (1 - SLACK) / max(norm, 1e-12))
    got = factor(make(bound, clipping.AllParameters()), norm, bound, torch.float64)
    assert got == pytest.approx(expected, rel=1e-12)


@all_rules
@given(norm=norm_values, bound=st.floats(min_value=1e-10, max_value=1e10))
@example(norm=0.0, bound=1.0)
@example(norm=1e-45, bound=1.0)
@example(norm=1e19, bound=1e-10)
def test_factor_times_norm_stays_inside(name, norm, bound):
    norm = float(torch.tensor(norm, dtype=torch.float32))
    got = factor(RULES[name][0](bound, clipping.AllParameters()), norm, bound)
    assert math.isfinite(got)
    assert 0 <= got * norm <= bound


@given(bound=st.floats(min_value=1e-6, max_value=1e6), share=st.floats(min_value=0, max_value=1))
def test_flat_is_a_no_op_inside_the_ball(bound, share):
    norm = share * bound * (1 - 2.0**-12)
    assert factor(clipping.Flat(clip_norm=bound), norm, bound) == 1.0


@pytest.mark.parametrize("big", [1e27, 1e35])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
def test_a_tiny_gradient_of_large_inputs_is_finite(engine, length, big):
    """Its parts are scaled: AUTO-V by 1e12 would make them infinite, and the sum of all records NaN."""
    x = torch.full((2, length, 3), big)
    x[1] = 1.0
    loss_fn = lambda params, x: ((x @ params["w"]) * 1e-20 / big).sum((1, 2))
    run = getattr(engines, engine)()
    clipped, _ = clipped_grad(loss_fn, {"w": torch.zeros(3, 4)}, x, clipping.auto_v(), engine=run, key=insecure_key(0))
    assert clipped.sums["w"].abs().max() < 1e-3


@all_rules
def test_zero_gradient_stays_zero(name):
    assert factor(RULES[name][0](1.0, clipping.AllParameters()), 0.0, 1.0) * 0.0 == 0.0


@all_rules
@pytest.mark.parametrize("norm", [math.inf, -math.inf, math.nan])
def test_rows_that_contribute_nothing(name, norm):
    """Padding, and a norm that is not finite: one bad group removes the whole sample."""
    rule = RULES[name][0](1.0, clipping.PerLayer())
    norms_BG = torch.tensor([[1.0, norm], [norm, norm], [1.0, 1.0], [1.0, 1.0]])
    factors_BG = safe_factors(rule, norms_BG, [0.7, 0.7], torch.tensor([True, True, False, True]))
    assert (factors_BG[:3] == 0.0).all()
    assert (factors_BG[3] > 0).all()


class Liar:
    def factors(self, norms_BG, bounds_G):
        return torch.full_like(norms_BG, 1e9)


def test_a_rule_with_wrong_factors_is_held_to_the_bound():
    assert factor(Liar(), 5.0, 1.0) * 5.0 <= 1.0


@all_rules
@given(seed=st.integers(0, 2**31), count=st.integers(1, 8), groups=st.integers(1, 3))
def test_factors_are_those_of_rows_alone(name, seed, count, groups):
    generator = torch.Generator().manual_seed(seed)
    norms_BG = torch.randn(count, groups, generator=generator).exp() * 3
    rule, bounds_G = RULES[name][0](1.0, clipping.AllParameters()), torch.rand(groups, generator=generator) + 0.1
    alone = [rule.factors(norms_BG[row : row + 1], bounds_G) for row in range(count)]
    torch.testing.assert_close(rule.factors(norms_BG, bounds_G), torch.cat(alone), rtol=1e-6, atol=0)


class OfTheLargest:
    """Scales by the largest norm of the batch, as adaptive clipping by quantiles would."""

    def factors(self, norms_BG, bounds_G):
        return bounds_G / norms_BG.amax(0, keepdim=True)


class Remembering:
    mean = None

    def factors(self, norms_BG, bounds_G):
        mean = norms_BG.mean(0, keepdim=True)
        self.mean = mean if self.mean is None else 0.5 * self.mean + 0.5 * mean
        return bounds_G / self.mean.expand_as(norms_BG)


class Reading:
    def factors(self, norms_BG, bounds_G):
        return bounds_G / max(float(norms_BG.max()), 1.0) * torch.ones_like(norms_BG)


class Locked:
    def __init__(self):
        self.lock = threading.Lock()

    def factors(self, norms_BG, bounds_G):
        return bounds_G / norms_BG


def test_a_rule_sees_one_row():
    """Of the library or of a user: the factor of a row is that of the row alone."""
    norms_BG, mask_B = torch.tensor([[0.5], [2.0], [40.0]]), torch.ones(3, dtype=torch.bool)
    for rule in (OfTheLargest(), clipping.Flat(1.0), clipping.Automatic()):
        together = safe_factors(rule, norms_BG, [1.0], mask_B)
        alone = [safe_factors(rule, norms_BG[i : i + 1], [1.0], mask_B[:1]) for i in range(3)]
        assert torch.equal(together, torch.cat(alone))
    assert safe_factors(OfTheLargest(), norms_BG[:0], [1.0], mask_B[:0]).shape == (0, 1)


def test_a_rule_remembers_nothing():
    """One record would change the factors of others in later steps."""
    rule, mask_B = Remembering(), torch.ones(2, dtype=torch.bool)
    safe_factors(rule, torch.full((2, 1), 50.0), [1.0], mask_B)
    assert rule.mean is None
    found = safe_factors(rule, torch.tensor([[1.0], [2.0]]), [1.0], mask_B)
    torch.testing.assert_close(found, torch.tensor([[1.0], [0.5]]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("rule", [Reading(), Locked()])
def test_a_rule_that_cannot_be_asked_row_by_row_is_refused(rule):
    with pytest.raises(InvalidArgument, match="sees one row at a time.*without what cannot be copied"):
        safe_factors(rule, torch.ones(3, 1), [1.0], torch.ones(3, dtype=torch.bool))


SHAPES = {  # of a row of two groups -> what the message says
    "(G,)": (lambda norms_BG, bounds_G: bounds_G, r"got \(2,\)"),
    "(1,), as many rows as groups": (lambda norms_BG, bounds_G: 1 / norms_BG.amax(1), r"got \(1,\)"),
    "(1, 1)": (lambda norms_BG, bounds_G: 1 / norms_BG.amax(1, keepdim=True), r"got \(1, 1\)"),
    "more columns": (lambda norms_BG, bounds_G: norms_BG.repeat(1, 2), r"got \(1, 4\)"),
    "a number": (lambda norms_BG, bounds_G: 0.5, r"got float\."),
}


@pytest.mark.parametrize(("factors", "got"), SHAPES.values(), ids=SHAPES)
def test_factors_of_another_shape_are_refused(factors, got):
    """Two rows with two groups: a factor a row was read as a factor a group, so that rows had those of others."""
    Named = type("Named", (), {"factors": staticmethod(factors)})
    with pytest.raises(InvalidArgument, match=rf"factors of Named .* \(1, 2\), {got}"):
        safe_factors(Named(), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [1.0, 1.0], None)


@pytest.mark.parametrize("bound", [1e-36, 1e-20, 1e-13, 1e-12, 1e30])
@pytest.mark.parametrize("norm", [1e-30, 1e-20, 5e-13, 1.0])
def test_bounds_that_no_rule_of_dpfunc_has_are_kept(bound, norm):
    """A rule of a user says its bound itself; norms below 1e-12 were let through whole."""
    Large = type("Large", (), {"factors": lambda self, norms_BG, _: torch.full_like(norms_BG, 1e30)})
    assert float(safe_factors(Large(), torch.tensor([[norm]]), [bound], None)) * norm <= bound


def test_factors_of_another_dtype_are_taken():
    norms_BG, Double = (
        torch.ones(3, 1),
        type("Double", (), {"factors": lambda self, norms_BG, _: norms_BG.double() / 4}),
    )
    found = safe_factors(Double(), norms_BG, [1.0], None)
    assert torch.equal(found, norms_BG / 4)
    assert found.dtype == norms_BG.dtype


@pytest.mark.parametrize(
    ("name", "expected"), [("all", 1), ("layer", 3), ("parameter", 4), ("blocks", 2), ("mapping", 2)]
)
def test_equal_bounds_keep_the_total(name, expected):
    parts = partition(GROUPINGS[name], NAMES)
    bounds = group_bounds(1.5, parts.group_names)
    assert len(bounds) == expected
    assert math.sqrt(sum(c * c for c in bounds.values())) == pytest.approx(1.5)


@pytest.mark.parametrize(("adjacency", "scale"), [("add_remove", 1), ("zero_out", 1), ("replace_one", 2)])
def test_sensitivity_of_unequal_bounds(adjacency, scale):
    bounds = group_bounds({"head": 3.0, "body": 4.0}, ("body", "head"))
    sensitivities = group_sensitivities(bounds, adjacency)
    assert ClippedSum({}, {}, sensitivities).sensitivity == pytest.approx(5.0 * scale)


def test_norms_and_spread_are_per_group():
    parts = partition(GROUPINGS["layer"], NAMES)
    sq_norms = {name: torch.tensor([float(i)]) for i, name in enumerate(NAMES)}
    norms_BG = parts.norms(sq_norms)
    assert norms_BG.square()[0].tolist() == pytest.approx([0 + 1, 2, 3])
    spread = parts.spread(torch.tensor([[10.0, 20.0, 30.0]]))
    assert [float(spread[name]) for name in NAMES] == [10, 10, 20, 30]


def test_blocks_are_contiguous_and_even():
    assert clipping.Blocks(3).assign(tuple("abcdefgh")) == ("block0",) * 3 + ("block1",) * 3 + ("block2",) * 2


ONE_WRONG = {**dict.fromkeys(NAMES[:3], "a"), "head.weigth": "b"}
BAD = [
    (lambda: clipping.Flat(clip_norm=-1.0), r"Expected 0 < clip_norm < inf, got clip_norm=-1\.0"),
    (lambda: clipping.Flat(clip_norm=0.0), r"Expected 0 < clip_norm < inf, got clip_norm=0\.0"),
    (lambda: clipping.Flat(clip_norm=math.nan), r"Expected 0 < clip_norm < inf, got clip_norm=nan"),
    (lambda: clipping.Flat(clip_norm=math.inf), r"Expected 0 < clip_norm < inf, got clip_norm=inf"),
    (lambda: clipping.Flat(clip_norm=1e30), r"Expected 1e-10 <= clip_norm <= 1e\+10"),
    (lambda: clipping.Flat(clip_norm="1"), r"got clip_norm='1'"),
    (lambda: clipping.Flat(clip_norm=True), r"got clip_norm=True"),
    (lambda: clipping.Flat(clip_norm={}), r"at least one group"),
    (lambda: clipping.Flat(clip_norm={"a": -1.0}), r"clip_norm\['a'\]"),
    (lambda: clipping.Automatic(gamma=-0.1), r"Expected 0 <= gamma < inf, got gamma=-0\.1"),
    (lambda: clipping.Threshold(clip_norm=1.0, threshold=0.0), r"Expected 0 < threshold < inf"),
    (lambda: clipping.PSAC(clip_norm=1.0, regularizer=-1.0), r"Expected 0 < regularizer < inf"),
    (lambda: clipping.normalized(1.0, regularizer=0.0), r"Expected 0 < regularizer < inf"),
    (lambda: clipping.Blocks(0), r"Expected an integer num_blocks >= 1, got num_blocks=0"),
    (lambda: clipping.Blocks(2.0), r"got num_blocks=2\.0"),
    (lambda: clipping.Blocks(5).assign(NAMES), "num_blocks=5 for 4 parameters"),
    (
        lambda: clipping.ByName(ONE_WRONG).assign(NAMES),
        r"without head.weight, and with the unknown head.weigth\..*Did you mean head.weight",
    ),
    (
        lambda: group_bounds({"head": 1.0}, ("body", "head")),
        r"Expected clip_norm to name the groups \[body, head\], got \[head\]",
    ),
]


@pytest.mark.parametrize(("build", "message"), BAD)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(InvalidArgument, match=message):
        build()
