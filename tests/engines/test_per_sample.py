"""Representations of per-sample gradients: each is worth its dense form, whatever the rounding."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from factors import (
    ROWS,
    TOLERANCE,
    WIDTH,
    Draw,
    close,
    seeds,
    sizes,
    sq_norms,
    weighted_sum,
    with_bad_row,
    with_changed,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import allocated
from dpfunc.clipping.rules import SLACK
from dpfunc.engines._per_sample import Dense, Gather, Outer, PerSample, Tied, Zeros, add
from dpfunc.engines._rules.convolution import ConvolutionArgs, Convolved


def outer(draw, p=ROWS, d=WIDTH):
    return Outer(draw.normal(draw.length, p), draw.normal(draw.length, d), (p, d))


def gather(draw):
    return Gather(draw.ids(), draw.normal(draw.length, WIDTH), (ROWS, WIDTH))


def convolved(draw, axes=2, groups=1, stride=1, padding=1, dilation=1, transposed=False, out=4, channels=2, edge=5):
    """One kernel, at several images of each sample; the sizes follow from torch's own convolution."""
    kernel = (3, 2, 2)[:axes]
    shape = (out, channels // groups, *kernel) if not transposed else (channels, out // groups, *kernel)
    many = lambda value: (value,) * axes
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
    "outer, ghost norm": lambda draw: outer(draw, 40, 50),
    "outer and gathers added": lambda draw: add([outer(draw), gather(draw), gather(draw), outer(draw)]),
    "all added": lambda draw: add([make(draw) for make in ADDABLE.values()]),
    "conv1d": lambda draw: convolved(draw, axes=1),
    "conv2d": convolved,
    "conv2d, ghost norm, unfolded": lambda draw: convolved(draw, padding=0, edge=3, out=12, channels=14),
    "conv3d": lambda draw: convolved(draw, axes=3, groups=2, stride=2),
    "transposed 2d": lambda draw: convolved(draw, transposed=True, stride=2),
    "conv2d, ghost norm": lambda draw: convolved(draw, edge=3, out=32, channels=32),
    "conv2d, ghost norm, groups": lambda draw: convolved(draw, groups=2, edge=3, out=64, channels=64),
    "conv3d, ghost norm, unfolded": lambda draw: convolved(
        draw, axes=3, stride=3, padding=0, out=24, channels=32, edge=4
    ),
    "transposed 2d, ghost norm": lambda draw: convolved(draw, transposed=True, out=40, channels=40, padding=1, edge=2),
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


@kinds
@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float16, torch.bfloat16], ids=str)
@given(seed=seeds, size=sizes)
def test_equals_its_dense_form(kind, dtype, seed, size):
    """What float64 gives for the same inputs; narrow ones are summed in float32: a bfloat16 sum would be off by a percent."""
    grad, wide = KINDS[kind](Draw(seed, size, dtype)), dtype if dtype in TOLERANCE else torch.float32
    rows_BP, factors_B = dense_of(_as_double(grad)), factors_of(size, wide)
    sq_norms_B, total = sq_norms(grad), weighted_sum(grad, factors_B)
    assert sq_norms_B.dtype == total.dtype == wide
    assert sq_norms_B.shape == (size,)
    assert total.shape == grad.dense().shape[1:] == grad.shape
    scale = float(rows_BP.norm())
    assert close(sq_norms_B, rows_BP.square().sum(1), TOLERANCE[wide], scale**2)
    assert close(total.flatten(), factors_B.double() @ rows_BP, TOLERANCE[wide], scale)


def _as_double(grad):
    return with_changed(grad, torch.Tensor.double)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zeros"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@given(seed=seeds, size=st.integers(2, 4))
@settings(max_examples=10)  # for each of three numbers: 30 in all
def test_a_factor_of_zero_removes_its_row(kind, bad, seed, size):
    """Also one that is not finite: it changes nothing for the others, and its norm is not finite, so it is seen."""
    grad = KINDS[kind](Draw(seed, size))
    spoilt, row = with_bad_row(grad, size - 1, bad), size - 1
    factors_B = factors_of(size, torch.float64)
    factors_B[row] = 0
    assert torch.allclose(weighted_sum(spoilt, factors_B), weighted_sum(grad, factors_B), rtol=1e-12, atol=1e-12)
    assert not torch.isfinite(sq_norms(spoilt)[row])
    assert torch.allclose(sq_norms(spoilt)[:row], sq_norms(grad)[:row], rtol=1e-9, atol=1e-12)
    assert torch.equal(weighted_sum(spoilt, torch.zeros(size)), torch.zeros_like(weighted_sum(grad, factors_B)))


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


def cancelling_convolved(draw, p, d, scale):
    """One pixel in each of many images, and a kernel with padding on both sides of it."""
    outer = cancelling_outer(draw, p, d, scale)
    args = ConvolutionArgs((p, d, 3), (1,), (1,), (1,), 1)
    return Convolved(outer.a_BTp[..., None], outer.b_BTd[..., None], args)


CANCELLING = {
    "outer, formed": lambda draw, scale: cancelling_outer(draw, 6, 5, scale),
    "outer, formed, large": lambda draw, scale: cancelling_outer(draw, 32, 48, scale),
    "outer, ghost norm": lambda draw, scale: cancelling_outer(draw, 80, 90, scale),
    "gather": cancelling_gather,
    "tied": cancelling_tied,
    "conv1d, formed": lambda draw, scale: cancelling_convolved(draw, 6, 5, scale),
    "conv1d, ghost norm": lambda draw, scale: cancelling_convolved(draw, 60, 50, scale),
}


@pytest.mark.parametrize("kind", CANCELLING)
@given(seed=seeds, length=st.sampled_from([1, 8, 24]), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_norms_bound_what_is_released(kind, seed, length, scale):
    """Where products cancel, rounding may be larger than the gradient: the norm is that of what is released, at least.

    With factors `C / norm` one sample moves the sum by its bound, also where the gradients of all samples cancel, and
    rounding depends on who is there. And what is added for rounding is small.
    """
    grad = CANCELLING[kind](Draw(seed, 5, length=length), scale)
    norms_B = sq_norms(grad).double().sqrt()
    released_B = torch.stack([weighted_sum(grad, one).double().norm() for one in torch.eye(5)])
    exact_B = dense_of(_as_double(grad)).norm(dim=1)
    assert bool((torch.maximum(released_B, exact_B) <= norms_B * (1 + SLACK)).all())
    factors_B = (1 - SLACK) / sq_norms(grad).sqrt()
    without_B = torch.where(torch.arange(5) == 2, 0.0, factors_B)
    moved = weighted_sum(grad, factors_B).double() - weighted_sum(grad, without_B).double()
    assert float(moved.norm()) <= 1.0
    reach_B = dense_of(with_changed(_as_double(grad), torch.abs)).norm(dim=1)
    assert bool((norms_B <= exact_B * (1 + 1e-3) + 3e-3 * reach_B).all())


@pytest.mark.parametrize("sides", [(1, 1), (2, 3), (6, 7), (64, 64)], ids=str)
@pytest.mark.parametrize("length", [1024, 4096])
def test_parts_that_grow_and_then_vanish_move_the_sum_by_the_bound(sides, length):
    """The first half of the positions adds up to a large number, which the second half takes away: each addition of
    another row's parts to it rounds."""
    for value in (1.0, 1 / 3, 0.7):
        generator = torch.Generator().manual_seed(0)
        a, b = (
            torch.randn(5, length, side, generator=generator) * scale
            for side, scale in zip(sides, (1, 1e-6), strict=True)
        )
        a[2], b[2] = value + torch.rand(sides[0], generator=generator), 0.9 * value
        b[2, length // 2 :] *= -1
        b[2, -1] += 1e-6
        grad = Outer(a, b, sides)
        factors_B = (1 - SLACK) / sq_norms(grad).sqrt()
        without_B = torch.where(torch.arange(5) == 2, 0.0, factors_B)
        moved = weighted_sum(grad, factors_B).double() - weighted_sum(grad, without_B).double()
        assert float(moved.norm()) <= 1.0


@kinds
def test_no_samples(kind):
    grad = KINDS[kind](Draw(3, 0))
    assert sq_norms(grad).shape == (0,)
    assert torch.equal(weighted_sum(grad, torch.zeros(0)), torch.zeros(grad.shape, dtype=torch.float64))


def test_large_rows_are_summed_in_pieces():
    """Sums of squares of many numbers: one long float32 sum of equal numbers is off by far more."""
    row = Dense(torch.full((2, 2**22 + 3), 0.1))
    exact = (2**22 + 3) * float(torch.tensor(0.1).double()) ** 2
    assert float(sq_norms(row)[0]) == pytest.approx(exact, rel=1e-5)


def _kinds_of_stacks():
    a, b = torch.randn(4, 3, 2), torch.randn(4, 3, 5)
    cancelling = torch.tensor([1e6, -1e6, 1.0])[None, :, None].expand(4, 3, 2).contiguous()
    return {
        "outer": [Outer(torch.randn(4, 3, 2), torch.randn(4, 3, 5), (2, 5)) for _ in range(3)],
        "one position": [Outer(a[:, :1], b[:, :1], (2, 5)), Outer(a[:, 1:2], b[:, 1:2], (2, 5))],
        "a cancels": [Outer(a, b, (2, 5)), Outer(cancelling, torch.ones(4, 3, 5), (2, 5))],
        "dense": [Dense(torch.randn(4, 2, 5)) for _ in range(3)],
        "numbers": [Dense(torch.randn(4)) for _ in range(2)],
        "others": [Dense(torch.randn(4, 2)), Outer(a, b, (2, 5)), Dense(torch.randn(4, 3))],
    }


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("kind", _kinds_of_stacks())
def test_gradients_that_are_computed_together(kind, dropped):
    """Norms and sums are those of each parameter alone, whether all have the same factors or not."""
    grads = dict(enumerate(_kinds_of_stacks()[kind]))
    factors = {name: torch.rand(4) + 0.5 for name in grads}
    for name, grad in grads.items() if dropped else ():
        factors[name][1] = 0.0
        next(value for value in vars(grad).values() if isinstance(value, torch.Tensor))[1] = math.inf
    together = PerSample(torch.zeros(4), grads)
    norms = together.sq_norms()
    for each in (factors, dict.fromkeys(grads, factors[0])):
        sums = together.weighted_sum(each)
        for name, grad in grads.items():
            torch.testing.assert_close(norms[name], sq_norms(grad), equal_nan=True)
            torch.testing.assert_close(sums[name], weighted_sum(grad, each[name]))


def test_memory_of_sums_does_not_depend_on_the_order_of_parameters():
    """A sum takes three times its memory while it is made: the largest one is made first."""
    large, small = (convolved(Draw(0, 2, torch.float32), out=out, channels=out) for out in (256, 64))
    factors, peaks = dict.fromkeys("ab", torch.ones(2)), []
    for grads in ({"a": large, "b": small}, {"a": small, "b": large}):
        per_sample = PerSample(torch.zeros(2), grads)
        per_sample.weighted_sum(factors)
        sums, used = allocated(partial(per_sample.weighted_sum, factors))
        assert list(sums) == list(grads)
        peaks.append(used.peak)
    assert peaks[0] == peaks[1] < 4 * sums["b"].nbytes


def test_gradients_with_the_same_side_share_its_products(monkeypatch):
    """Norms of uses of as many positions are measured together; they are those of the formed gradients."""
    a, other, *sides = (torch.randn(4, 3, size, dtype=torch.float64) for size in (64, 64, 50, 60, 64, 70))
    both = zip("fghi", (a, a, other, a), sides, strict=True)
    uses = {name: Outer(of, b, (64, b.shape[2])) for name, of, b in both}
    calls, product = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *sides, **options: calls.append(1) or product(*sides, **options))
    found = PerSample(torch.zeros(4), uses).sq_norms()
    assert len(calls) == 6  # of a, other, and four inputs
    for name, grad in uses.items():
        torch.testing.assert_close(found[name], sq_norms(Dense(grad.dense())), rtol=1e-9, atol=0)


@pytest.mark.parametrize("scratch", [0, 9 * 6, 2**22])
def test_uses_that_do_not_fit_are_measured_in_pieces(monkeypatch, scratch):
    monkeypatch.setattr("dpfunc.engines._numerics.SCRATCH", scratch)
    shapes = {"f": (64, 50), "g": (60, 64), "h": (80, 64)}
    uses = {name: Outer(torch.randn(4, 3, p), torch.randn(4, 3, d), (p, d)) for name, (p, d) in shapes.items()}
    found = PerSample(torch.zeros(4), uses).sq_norms()
    for name, grad in uses.items():
        torch.testing.assert_close(found[name], sq_norms(Dense(grad.dense())), rtol=1e-4, atol=0)
