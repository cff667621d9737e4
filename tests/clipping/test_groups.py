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
def test_number_of_groups(name, expected):
    assert len(partition(GROUPINGS[name], NAMES).group_names) == expected


@pytest.mark.parametrize("name", GROUPINGS)
def test_equal_bounds_keep_the_total(name):
    parts = partition(GROUPINGS[name], NAMES)
    bounds = group_bounds(1.5, parts.group_names)
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


def test_more_blocks_than_parameters():
    with pytest.raises(InvalidArgument, match="num_blocks=5 for 4 parameters"):
        clipping.Blocks(5).assign(NAMES)


def test_mapping_must_name_each_parameter_once():
    with pytest.raises(
        InvalidArgument,
        match=r"got it without head.weight, and with the unknown head.weigth\..*Did you mean head.weight",
    ):
        clipping.ByName({**dict.fromkeys(NAMES[:3], "a"), "head.weigth": "b"}).assign(NAMES)


def test_bounds_must_name_the_groups():
    with pytest.raises(InvalidArgument, match=r"Expected clip_norm to name the groups \[body, head\], got \[head\]"):
        group_bounds({"head": 1.0}, ("body", "head"))
