"""replace_batchnorm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfunc.batchnorm import count_batchnorm, replace_batchnorm
from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize


def model():
    shared = nn.BatchNorm2d(12)
    return nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Conv2d(3, 12, 3), shared),
            "b": nn.Sequential(nn.Conv2d(12, 12, 3), shared, nn.InstanceNorm2d(12)),
            "c": nn.BatchNorm1d(7, affine=False),
            "d": nn.SyncBatchNorm(8),
        }
    )


def test_all_kinds_are_replaced_and_the_original_is_not():
    before = model()
    after = replace_batchnorm(before, max_groups=4)
    assert (count_batchnorm(before), count_batchnorm(after)) == (3, 0)
    assert after["a"][1].num_groups == 4
    assert after["a"][1] is after["b"][1]  # sharing is kept
    assert isinstance(after["b"][2], nn.InstanceNorm2d)
    assert (after["c"].num_groups, after["c"].weight) == (1, None)
    assert isinstance(after["d"], nn.GroupNorm)


def test_weights_are_kept():
    norm = nn.BatchNorm2d(6, eps=1e-3)
    with torch.no_grad():
        norm.weight.uniform_()
        norm.bias.uniform_()
    norm.weight.requires_grad_(False)
    group = replace_batchnorm(norm)
    assert torch.equal(group.weight, norm.weight)
    assert torch.equal(group.bias, norm.bias)
    assert group.eps == 1e-3
    assert not group.weight.requires_grad
    assert group.bias.requires_grad
    assert group.weight is not norm.weight


def test_samples_no_longer_mix():
    net = replace_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).train()
    forward, params = functionalize(net)
    x = torch.randn(4, 3, 8, 8)
    alone = torch.cat([forward(params, row[None]) for row in x])
    assert torch.allclose(forward(params, x), alone, atol=1e-5)


def test_two_dimensional_input():
    assert replace_batchnorm(nn.BatchNorm1d(6))(torch.randn(4, 6)).shape == (4, 6)


def test_bad_groups():
    with pytest.raises(InvalidArgument, match="max_groups=0"):
        replace_batchnorm(nn.BatchNorm1d(4), max_groups=0)
