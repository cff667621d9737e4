"""BatchNorm mixes samples: find it, and replace it by GroupNorm.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Privacy depends on it: no.
"""

import copy
import math
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from dpfunc._utils.validation import integer, shorten
from dpfunc.errors import UnsupportedModel

_PLAIN_FORWARDS = {_BatchNorm.forward, nn.SyncBatchNorm.forward}


def count_batchnorm(module: nn.Module) -> int:
    """Count the BatchNorm layers of any module, in training and in evaluation mode, each once.

    >>> count_batchnorm(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4)))
    2
    """
    return sum(isinstance(part, _BatchNorm) for part in module.modules())


def replace_batchnorm(module: nn.Module, max_groups: int = 32) -> nn.Module:
    """A copy of a module with GroupNorm in place of every BatchNorm (SyncBatchNorm too).

    GroupNorm normalises each sample for itself (Wu and He 2018). Weights and biases are kept, running statistics are
    dropped: the function changes, so train it (or fine-tune) after the replacement.

    Args:
        module: any module; it is not changed. InstanceNorm stays.
        max_groups: the number of groups is the largest that divides this and the number of channels, with at least two
            channels a group, >= 1. A group of one channel would be a constant on (B, C, 1, 1), and as InstanceNorm on
            larger inputs, so a prime number of channels is one group. BatchNorm1d gets one group: it may run on (B, C).

    Returns:
        The copy. `count_batchnorm(module)` says how many layers were replaced.

    Raises:
        InvalidArgument: max_groups < 1.
        UnsupportedModel: a kind of BatchNorm that does more than normalise, or a lazy one that has not seen data. One
            that goes on with its children `drop` and `act` (timm) becomes that sequence.

    >>> replace_batchnorm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1]
    GroupNorm(16, 48, eps=1e-05, affine=True, bias=True)
    """
    limit = integer("max_groups", max_groups, minimum=1)
    parts = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    if unknown := [
        f"{name or 'the module'} ({type(part).__name__})" for name, part in parts.items() if not _known(part)
    ]:
        raise UnsupportedModel(
            f"These layers do more than BatchNorm does: {shorten(unknown)}. Replace them before this call (a lazy one "
            "becomes a plain one when the model runs once)."
        )
    memo: dict[int, object] = {id(part): _replacement(part, limit) for part in parts.values()}
    return copy.deepcopy(module, memo)  # deepcopy takes what its memo holds in place of the original


def _known(norm: _BatchNorm) -> bool:
    plain = type(norm).forward in _PLAIN_FORWARDS or list(norm._modules) == ["drop", "act"]
    return plain and not isinstance(norm, LazyModuleMixin)


def _replacement(norm: _BatchNorm, max_groups: int) -> nn.Module:
    ours = _group_norm(norm, max_groups)
    if type(norm).forward in _PLAIN_FORWARDS:
        return ours
    after = {name: copy.deepcopy(child) for name, child in norm.named_children()}
    return nn.Sequential(OrderedDict[str, nn.Module](norm=ours, **after)).train(norm.training)


def _group_norm(norm: _BatchNorm, max_groups: int) -> nn.GroupNorm:
    theirs = dict(norm.named_parameters(recurse=False))
    like = next(iter(theirs.values()), norm.running_mean)
    channels = norm.num_features
    common = 1 if isinstance(norm, nn.BatchNorm1d) else math.gcd(channels, max_groups)
    counts = (count for count in range(common, 1, -1) if common % count == 0 and 2 * count <= channels)
    kind: dict[str, Any] = {} if like is None else {"device": like.device, "dtype": like.dtype}
    result = nn.GroupNorm(
        next(counts, 1), channels, eps=norm.eps, affine="weight" in theirs, bias="bias" in theirs, **kind
    )
    for name, ours in result.named_parameters():
        with torch.no_grad():
            ours.copy_(theirs[name])
        ours.requires_grad_(theirs[name].requires_grad)
    return result.train(norm.training)
