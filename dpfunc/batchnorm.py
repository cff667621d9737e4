"""BatchNorm mixes samples: find it, and replace it by GroupNorm."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpfunc.checks import whole


def training_batchnorms(module: nn.Module) -> list[str]:
    """The names of BatchNorm layers that would use the statistics of the batch."""
    return [
        name or type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    ]


def count_batchnorm(module: nn.Module) -> int:
    """How many BatchNorm layers a module has, in any mode.

    Args:
        module: any module.

    >>> count_batchnorm(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4)))
    2
    """
    return sum(isinstance(part, _BatchNorm) for part in module.modules())


def replace_batchnorm(module: nn.Module, max_groups: int = 32) -> nn.Module:
    """A copy of a module with GroupNorm in place of every BatchNorm (SyncBatchNorm too).

    GroupNorm normalises each sample for itself. Weights and biases are kept, running statistics are dropped: the
    function changes, so train it (or fine-tune) after the replacement.

    Args:
        module: any module; it is not changed. InstanceNorm stays.
        max_groups: the number of groups is the greatest common divisor of this and the number of channels, >= 1.

    Returns:
        The copy. `count_batchnorm(module)` says how many layers were replaced.

    >>> replace_batchnorm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1]
    GroupNorm(16, 48, eps=1e-05, affine=True, bias=True)
    """
    whole("max_groups", max_groups, minimum=1)
    replaced: dict[int, nn.Module] = {
        id(part): _group_norm(part, max_groups) for part in module.modules() if isinstance(part, _BatchNorm)
    }
    return copy.deepcopy(module, replaced)  # deepcopy takes what its memo holds in place of the original


def _group_norm(norm: _BatchNorm, max_groups: int) -> nn.GroupNorm:
    affine = norm.weight is not None
    device = norm.weight.device if affine else None
    dtype = norm.weight.dtype if affine else None
    groups = math.gcd(norm.num_features, max_groups)
    result = nn.GroupNorm(groups, norm.num_features, eps=norm.eps, affine=affine, device=device, dtype=dtype)
    theirs = dict(norm.named_parameters())
    for name, ours in result.named_parameters():
        with torch.no_grad():
            ours.copy_(theirs[name])
        ours.requires_grad_(theirs[name].requires_grad)
    return result.train(norm.training)
