"""Groupings and bounds."""

from __future__ import annotations

import math

import pytest
import torch
from cases import GROUPINGS, NAMES

from dpfunc import clipping
from dpfunc.clipping.bounds import group_bounds, group_sensitivities
from dpfunc.clipping.groups import partition
from dpfunc.errors import InvalidArgument
from dpfunc.types import ClippedSum


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clipping.Blocks(5).assign(NAMES), "num_blocks=5 for 4 parameters"),
        (
            lambda: clipping.ByName(ONE_WRONG).assign(NAMES),
            r"without head.weight, and with the unknown head.weigth\..*Did you mean head.weight",
        ),
        (
            lambda: group_bounds({"head": 1.0}, ("body", "head")),
            r"Expected clip_norm to name the groups \[body, head\], got \[head\]",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()
