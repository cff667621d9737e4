"""Representations of per-sample gradients: each is worth its dense form, whatever the rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpfunc.clipping.bounds import SLACK
from dpfunc.engines.per_sample import Dense, Gather, Outer, Tied, Zeros, add
from dpfunc.engines.rules.convolution import ConvolutionArgs, Convolved

ROWS, WIDTH = 6, 5
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 4)


class Draw:
    """Random factors for B samples of one dtype; half and bfloat16 values are exact in float64 as well."""

    def __init__(self, seed, size, dtype=torch.float64, length=None):
        self.generator, self.size, self.dtype = torch.Generator().manual_seed(seed), size, dtype
        self.length = 1 + seed % 7 if length is None else length

    def normal(self, *shape):
        return torch.randn(self.size, *shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def ids(self):
        return torch.randint(ROWS, (self.size, self.length), generator=self.generator)


def outer(draw, p=ROWS, d=WIDTH):
    return Outer(draw.normal(draw.length, p), draw.normal(draw.length, d), (p, d))


def gather(draw):
    return Gather(draw.ids(), draw.normal(draw.length, WIDTH), (ROWS, WIDTH))


def convolved(draw, axes=2, groups=1, stride=1, padding=1, dilation=1, transposed=False, out=4, channels=2, edge=5):
    """One kernel, at several images of each sample; the sizes follow from torch's own convolution."""
    kernel = (3, 2, 2)[:axes]
    shape = (out, channels // groups, *kernel) if not transposed else (channels, out // groups, *kernel)
    many = lambda value: (value,) * axes  # noqa: E731
    args = ConvolutionArgs(shape, many(stride), many(padding), many(dilation), groups, transposed)
    x_BmC = draw.normal(2, channels, *many(edge))
    run = getattr(torch, f"conv{'_transpose' if transposed else ''}{axes}d")
    options = {"stride": stride, "padding": padding, "groups": groups, "dilation": dilation}
    size = run(torch.zeros(1, *x_BmC.shape[2:]), torch.zeros(shape), **options).shape[1:]
    return Convolved(draw.normal(2, *size), x_BmC, args)


# All of one parameter (ROWS, WIDTH), so that they can be added.
ADDABLE = {
    "dense": lambda draw: Dense(draw.normal(ROWS, WIDTH)),
    "zeros": lambda draw: Zeros(draw.size, torch.zeros(ROWS, WIDTH, dtype=draw.dtype)),
    "outer": outer,
    "gather": gather,
    "tied": lambda draw: Tied(gather(draw), outer(draw)),
}
KINDS = {
    **ADDABLE,
    "dense number": lambda draw: Dense(draw.normal()),
    "outer, ghost norm": lambda draw: outer(draw, 40, 50),
    "outer, one position": lambda draw: outer(Draw(draw.size, draw.size, draw.dtype, 1), 9, 11),
    "outers added": lambda draw: add([outer(draw), outer(draw), outer(draw)]),
    "gathers added": lambda draw: add([gather(draw), gather(draw)]),
    "outer and gathers added": lambda draw: add([outer(draw), gather(draw), gather(draw), outer(draw)]),
    "all added": lambda draw: add([make(draw) for make in ADDABLE.values()]),
    "conv1d": lambda draw: convolved(draw, axes=1),
    "conv2d": convolved,
    "conv2d, ghost norm": lambda draw: convolved(draw, padding=0, edge=3, out=12, channels=14),
    "conv2d, stride, dilation": lambda draw: convolved(draw, stride=2, dilation=2, edge=6),
    "conv2d, groups": lambda draw: convolved(draw, groups=2),
    "conv3d": lambda draw: convolved(draw, axes=3, groups=2, stride=2),
    "transposed 2d": lambda draw: convolved(draw, transposed=True, stride=2),
    "transposed 1d, groups": lambda draw: convolved(draw, axes=1, transposed=True, groups=2),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def dense_of(grad):
    """(B, P) in float64."""
    rows = grad.dense().double()
    return rows.reshape(len(rows), -1)


def factors_of(size, dtype):
    factors_B = torch.linspace(0.5, 1.5, size, dtype=dtype)
    factors_B[size // 2] *= -1
    return factors_B


def close(got, expected, tolerance, scale):
    return bool((got.double() - expected).norm() <= tolerance * scale + 1e-30)


@kinds
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(seed=seeds, size=sizes)
def test_equals_its_dense_form(kind, dtype, seed, size):
    grad = KINDS[kind](Draw(seed, size, dtype))
    rows_BP, factors_B = dense_of(grad), factors_of(size, dtype)
    sq_norms_B, total = grad.sq_norms(), grad.weighted_sum(factors_B)
    assert sq_norms_B.dtype == total.dtype == dtype
    assert sq_norms_B.shape == (size,)
    assert total.shape == grad.dense().shape[1:]
    scale = float(rows_BP.norm())
    assert close(sq_norms_B, rows_BP.square().sum(1), TOLERANCE[dtype], scale**2)
    assert close(total.flatten(), factors_B.double() @ rows_BP, TOLERANCE[dtype], scale)


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@given(seed=seeds, size=sizes)
def test_narrow_inputs_are_summed_in_float32(kind, dtype, seed, size):
    """Exactly what float64 gives for the same inputs, up to float32: a bfloat16 sum would be off by a percent."""
    grad = KINDS[kind](Draw(seed, size, dtype))
    truth = _as_double(grad)
    factors_B = factors_of(size, torch.float32)
    sq_norms_B, total, rows_BP = grad.sq_norms(), grad.weighted_sum(factors_B), dense_of(truth)
    assert sq_norms_B.dtype == total.dtype == torch.float32
    scale = float(rows_BP.norm())
    assert close(sq_norms_B, rows_BP.square().sum(1), 2e-5, scale**2)
    assert close(total.flatten(), factors_B.double() @ rows_BP, 2e-5, scale)


def _as_double(grad):
    return _with(grad, torch.Tensor.double)


def _with(grad, change):
    """The same with all floating tensors changed."""
    changes = {}
    for name, value in vars(grad).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            changes[name] = change(value)
        elif isinstance(value, (Gather, Outer)):
            changes[name] = _with(value, change)
    return replace(grad, **changes)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zeros"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@given(seed=seeds, size=st.integers(2, 4))
def test_a_factor_of_zero_removes_its_row(kind, bad, seed, size):
    """Also one that is not finite: it changes nothing for the others, and its norm is not finite, so it is seen."""
    grad = KINDS[kind](Draw(seed, size))
    spoilt, row = _with_bad_row(grad, size - 1, bad), size - 1
    factors_B = factors_of(size, torch.float64)
    factors_B[row] = 0
    assert torch.allclose(spoilt.weighted_sum(factors_B), grad.weighted_sum(factors_B), rtol=1e-12, atol=1e-12)
    assert not torch.isfinite(spoilt.sq_norms()[row])
    assert torch.allclose(spoilt.sq_norms()[:row], grad.sq_norms()[:row], rtol=1e-9, atol=1e-12)
    assert torch.equal(spoilt.weighted_sum(torch.zeros(size)), torch.zeros_like(grad.weighted_sum(factors_B)))


def _with_bad_row(grad, row, bad):
    def change(value):
        value = value.clone()
        value[row] = bad
        return value

    return _with(grad, change)


def cancelling(draw, width):
    """Values at pairs of positions that are equal and opposite, up to one part in 10^4 and less."""
    half = torch.randn(draw.size, draw.length, width, generator=draw.generator)
    nudged = -half * (1 + 1e-4 * torch.randn(draw.size, 1, 1, generator=draw.generator))
    order = torch.randperm(2 * draw.length, generator=draw.generator)
    return torch.cat([half, nudged], 1)[:, order], order


def twice(values, order):
    return torch.cat([values, values], 1)[:, order]


def cancelling_outer(draw, p, d, scale):
    a_BTp, order = cancelling(draw, p)
    b_BTd = torch.randn(draw.size, draw.length, d, generator=draw.generator) * scale
    return Outer(a_BTp, twice(b_BTd, order), (p, d))


def cancelling_gather(draw, scale):
    g_BTd, order = cancelling(draw, WIDTH)
    return Gather(twice(draw.ids(), order), scale * g_BTd, (ROWS, WIDTH))


def cancelling_tied(draw, scale):
    """The look-ups take away what the products add: `outer` is the same table, row by row."""
    gathered = Gather(
        draw.ids(), scale * torch.randn(draw.size, draw.length, WIDTH, generator=draw.generator), (ROWS, WIDTH)
    )
    rows_BTV = torch.nn.functional.one_hot(gathered.ids_BT, ROWS).to(torch.float32)
    nudged = -gathered.g_BTd * (1 + 1e-4 * torch.randn(draw.size, 1, 1, generator=draw.generator))
    return Tied(gathered, Outer(rows_BTV, nudged, (ROWS, WIDTH)))


CANCELLING = {
    "outer, formed": lambda draw, scale: cancelling_outer(draw, 6, 5, scale),
    "outer, formed, large": lambda draw, scale: cancelling_outer(draw, 32, 48, scale),
    "outer, ghost norm": lambda draw, scale: cancelling_outer(draw, 400, 500, scale),
    "gather": cancelling_gather,
    "tied": cancelling_tied,
}
cancelling_kinds = pytest.mark.parametrize("kind", CANCELLING)
lengths = st.sampled_from([1, 8, 50])
scales = st.sampled_from([1e-3, 1.0, 1e3])


@cancelling_kinds
@given(seed=seeds, length=lengths, scale=scales)
def test_norms_are_never_too_small(kind, seed, length, scale):
    """Where products cancel, rounding may be larger than the gradient: the norm is that of what is released."""
    size = 3
    grad = CANCELLING[kind](Draw(seed, size, length=length), scale)
    norms_B = grad.sq_norms().double().sqrt()
    released_B = torch.stack([grad.weighted_sum(one).double().norm() for one in torch.eye(size)])
    exact_B = dense_of(_as_double(grad)).norm(dim=1)
    assert bool((released_B <= norms_B * (1 + SLACK)).all())
    assert bool((exact_B <= norms_B * (1 + SLACK)).all())


@cancelling_kinds
@given(seed=seeds, length=lengths, scale=scales)
def test_one_sample_moves_the_sum_by_its_bound(kind, seed, length, scale):
    """With factors `C / norm`: also where the gradients of all samples cancel, and rounding depends on who is there."""
    size = 5
    grad = CANCELLING[kind](Draw(seed, size, length=length), scale)
    factors_B = (1 - SLACK) / grad.sq_norms().sqrt()
    without_B = factors_B.clone()
    without_B[size // 2] = 0
    moved = grad.weighted_sum(factors_B).double() - grad.weighted_sum(without_B).double()
    assert float(moved.norm()) <= 1.0


@cancelling_kinds
@given(seed=seeds, length=lengths)
def test_norms_are_not_much_too_large(kind, seed, length):
    """What is added for rounding is small: a norm of a gradient that does not cancel is right."""
    grad = CANCELLING[kind](Draw(seed, 3, length=length), 1.0)
    exact_B = dense_of(_as_double(grad)).norm(dim=1)
    reach_B = dense_of(_with(_as_double(grad), torch.abs)).norm(dim=1)
    assert bool((grad.sq_norms().double().sqrt() <= exact_B * (1 + 1e-3) + 3e-3 * reach_B).all())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "conv" in kind or "transposed" in kind])
@given(seed=seeds, size=sizes)
def test_samples_side_by_side_are_samples_one_by_one(kind, seed, size):
    """What other devices do, on this one."""
    grad = KINDS[kind](Draw(seed, size))
    assert torch.allclose(grad._formed(grad.g_BmP, grad.x_BmC), grad.dense(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "expected"), [("conv2d", False), ("conv2d, ghost norm", True)])
def test_both_norms_of_convolutions_are_taken(kind, expected):
    grad = KINDS[kind](Draw(0, 2))
    assert grad.cost().ghost_pays() is expected


@pytest.mark.parametrize("kind", ADDABLE)
def test_no_samples(kind):
    grad = KINDS[kind](Draw(3, 0))
    assert grad.sq_norms().shape == (0,)
    assert not grad.weighted_sum(torch.zeros(0)).any()


def test_large_rows_are_summed_in_pieces():
    """Sums of squares of many numbers: one long float32 sum of equal numbers is off by far more."""
    row = Dense(torch.full((2, 2**22 + 3), 0.1))
    exact = (2**22 + 3) * float(torch.tensor(0.1).double()) ** 2
    assert float(row.sq_norms()[0]) == pytest.approx(exact, rel=1e-5)
