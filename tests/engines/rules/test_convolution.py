"""Convolutions of any kind: per-sample gradients are torch's, and a bad sample stays in its group."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from factors import TOLERANCE, Draw, close, seeds, sizes, sq_norms, weighted_sum, with_bad_row
from hypothesis import given
from hypothesis import strategies as st

from dpfunc.engines._per_sample import Outer
from dpfunc.engines._rules.convolution import ConvolutionArgs, Convolved, of_weight


@st.composite
def convolutions(draw, dtype=torch.float64):
    """A convolution of any kind, and torch's own gradient of each sample."""
    axes, groups, transposed = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.booleans())
    each = lambda *values: tuple(draw(st.sampled_from(values)) for _ in range(axes))
    stride, padding, dilation, taps = each(1, 2, 3), each(0, 1, 2), each(1, 2), each(1, 2, 3)
    further = tuple(draw(st.integers(0, max(pair) - 1)) for pair in zip(stride, dilation, strict=True))
    width_in, width_out = draw(st.sampled_from([1, 2, 16])), draw(st.sampled_from([1, 3, 16]))
    x_BmC = Draw(draw(seeds), draw(sizes), dtype).normal(draw(st.integers(1, 2)), width_in * groups, *each(5, 6, 7))
    shape = (width_in * groups, width_out, *taps) if transposed else (width_out * groups, width_in, *taps)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    options |= {"output_padding": further} if transposed else {}
    run = partial(getattr(torch, f"conv{'_transpose' if transposed else ''}{axes}d"), bias=None, **options)
    weight = torch.zeros(shape, dtype=dtype, requires_grad=True)
    results = [run(x_mC, weight) for x_mC in x_BmC]
    g_BmP = Draw(draw(seeds), len(results), dtype).normal(*results[0].shape)
    rows = [torch.autograd.grad(y, weight, g)[0] for y, g in zip(results, g_BmP, strict=True)]
    args = ConvolutionArgs(shape, stride, padding, dilation, groups, transposed, further if transposed else ())
    return Convolved(g_BmP, x_BmC, args), torch.stack(rows)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(data=st.data())
def test_convolutions_of_any_kind_are_torchs(dtype, data):
    grad, rows_B = data.draw(convolutions(dtype))
    sq_norms_B, tolerance = rows_B.double().flatten(1).square().sum(1), TOLERANCE[dtype]
    for each in (grad, of_weight(grad.g_BmP, grad.x_BmC, grad.args)):
        assert close(each.dense(), rows_B.double(), tolerance, float(rows_B.norm()))
        assert close(sq_norms(each), sq_norms_B, 10 * tolerance, float(sq_norms_B.norm()))


# taps, stride, padding, dilation, groups, and if each cell is in one window at most: then the kernel is a matrix
GEOMETRIES = {
    "patches": ((4, 4), (4, 4), (0, 0), (1, 1), 1, True),
    "cells that no window reaches": ((2, 3), (3, 5), (0, 0), (1, 1), 1, True),
    "one tap": ((1, 1), (1, 1), (0, 0), (1, 1), 1, True),
    "one tap, some cells": ((1, 1), (2, 3), (0, 0), (1, 1), 1, True),
    "taps with gaps": ((2, 2), (4, 4), (0, 0), (3, 2), 1, True),
    "gaps that overlap": ((2, 2), (2, 2), (0, 0), (2, 1), 1, False),
    "one axis overlaps": ((2, 3), (2, 2), (0, 0), (1, 1), 1, False),
    "padded": ((2, 2), (2, 2), (0, 1), (1, 1), 1, False),
    "grouped": ((2, 2), (2, 2), (0, 0), (1, 1), 2, False),
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("images", [1, 2])
def test_windows_that_are_apart_are_positions_of_a_matrix(name, images):
    taps, stride, padding, dilation, groups, apart = GEOMETRIES[name]
    args = ConvolutionArgs((6, 4 // groups, *taps), stride, padding, dilation, groups)
    draw = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_BmC, options = draw(3, images, 4, 9, 10), {"stride": stride, "padding": padding, "dilation": dilation}
    y_NP = torch.conv2d(x_BmC.flatten(0, 1), draw(*args.shape), groups=groups, **options)
    g_BmP = draw(3, images, *y_NP.shape[1:])
    found, usual = of_weight(g_BmP, x_BmC, args), Convolved(g_BmP, x_BmC, args)
    assert isinstance(found, Outer) == apart
    torch.testing.assert_close(found.dense(), usual.dense())
    torch.testing.assert_close(sq_norms(found), sq_norms(usual))
    factors_B = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(weighted_sum(found, factors_B), weighted_sum(usual, factors_B))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@given(drawn=convolutions(torch.float32))
def test_a_bad_sample_stays_in_its_group(bad, drawn):
    """Samples lie side by side in one convolution of torch's: none may reach into another."""
    grad, rows_B = drawn
    if len(rows_B) > 1:
        spoilt = with_bad_row(grad, len(rows_B) - 1, bad)
        assert close(spoilt.dense()[:-1], rows_B[:-1].double(), 2e-5, float(rows_B.norm()))
        assert torch.isfinite(sq_norms(spoilt)[:-1]).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_small_inputs_beside_large_gradients_have_their_norm(transposed):
    """Their squares are 0 and infinite in float32, and their product is neither."""
    args = ConvolutionArgs((2, 2, 3, 3), (1, 1), (1, 1), (1, 1), 1, transposed)
    generator = torch.Generator().manual_seed(0)
    g, x = (torch.randn(4, 1, 2, 12, 12, generator=generator) for _ in range(2))
    assert not args.costs(144).ghost_pays
    found = sq_norms(Convolved(g * 1e20, x * 1e-24, args))
    torch.testing.assert_close(found, sq_norms(Convolved(g, x, args)) * 1e-8, rtol=1e-4, atol=0)
