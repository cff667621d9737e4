"""BatchNorm mixes samples: find it, and replace it by GroupNorm.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Privacy depends on it: no.
"""

import copy
import math
from collections import OrderedDict
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpfunc._utils.validation import integer, shorten
from dpfunc.errors import UnsupportedModel
from dpfunc.functional.copies import copied
from dpfunc.functional.names import OF_TORCH

_PLAIN_FORWARDS = {_BatchNorm.forward, nn.SyncBatchNorm.forward}


def count_batchnorm(module: nn.Module) -> int:
    """Count the BatchNorm layers of any module, in training and in evaluation mode, each once.

    >>> count_batchnorm(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4)))
    2
    """
    return sum(isinstance(part, _BatchNorm) for part in module.modules())


def replace_batchnorm(module: nn.Module, max_groups: int = 32) -> nn.Module:
    """A copy of a module with GroupNorm in place of every BatchNorm (SyncBatchNorm too).

    GroupNorm normalises each sample for itself (Wu and He 2018). Weights and biases are kept, also tied ones, running
    statistics are dropped: the function changes, so train it (or fine-tune) after the replacement.

    Args:
        module: any module; it is not changed. InstanceNorm stays.
        max_groups: the number of groups is the largest that divides this and the number of channels, with at least two
            channels a group, >= 1. A group of one channel would be a constant on (B, C, 1, 1), and as InstanceNorm on
            larger inputs, so a prime number of channels is one group. BatchNorm1d gets one group: it may run on (B, C).

    Returns:
        The copy. `count_batchnorm(module)` says how many layers were replaced.

    Raises:
        InvalidArgument: max_groups < 1.
        UnsupportedModel: a BatchNorm that does more than normalise: code of its own, hooks, parametrizations, other
            parameters; a lazy one that has not seen data. One of timm, which goes on with its children `drop` and
            `act`, becomes that sequence. Attributes of the module that cannot be copied.

    >>> replace_batchnorm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1]
    GroupNorm(16, 48, eps=1e-05, affine=True, bias=True)
    """
    limit = integer("max_groups", max_groups, minimum=1)
    parts = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    if unknown := [f"{name or 'the module'} ({type(part).__name__}: {shorten(_lost(part))})"
                   for name, part in parts.items() if _lost(part)]:  # fmt: skip
        raise UnsupportedModel(
            f"Expected layers that do what BatchNorm does, got {shorten(unknown)}, which would be lost. Replace these "
            "layers before this call, or take it off them (a lazy one becomes a plain one when the model runs once)."
        )
    memo: dict[int, Any] = {}  # deepcopy takes what its memo holds in place of the original
    memo.update({id(part): _replacement(part, limit, memo) for part in parts.values()})
    result: nn.Module = copied(module, memo)
    return result


def _lost(norm: _BatchNorm) -> list[str]:
    """Names of code, hooks, children and parameters of a layer that GroupNorm would not have."""
    kind, own = type(norm), vars(norm)
    in_timm = _goes_on(norm)
    plain = kind.forward in _PLAIN_FORWARDS or in_timm
    return [
        *(["__call__"] if kind.__call__ is not nn.Module.__call__ else []),
        *(["forward"] if "forward" in own or not plain else []),
        *(name for name in OF_TORCH if name.endswith("hooks") and own.get(name)),
        *(name for name in norm._modules if not in_timm),
        *(name for name in norm._parameters if name not in ("weight", "bias")),
    ]


def _goes_on(norm: _BatchNorm) -> bool:
    """True for a BatchNorm of timm, which drops and activates what it has normalised."""
    library = type(norm).forward.__module__.partition(".")[0]
    return library == "timm" and list(norm._modules) == ["drop", "act"]


def _replacement(norm: _BatchNorm, max_groups: int, memo: dict[int, Any]) -> nn.Module:
    ours = _group_norm(norm, max_groups, memo)
    if not _goes_on(norm):
        return ours
    after = {name: copy.deepcopy(child, memo) for name, child in norm.named_children()}
    return nn.Sequential(OrderedDict[str, nn.Module](norm=ours, **after)).train(norm.training)


def _group_norm(norm: _BatchNorm, max_groups: int, memo: dict[int, Any]) -> nn.Module:
    theirs = {name: copy.deepcopy(param, memo) for name, param in norm.named_parameters(recurse=False)}
    channels = norm.num_features
    common = 1 if isinstance(norm, nn.BatchNorm1d) else math.gcd(channels, max_groups)
    counts = (count for count in range(common, 1, -1) if common % count == 0 and 2 * count <= channels)
    result = nn.GroupNorm(next(counts, 1), channels, eps=norm.eps, affine="weight" in theirs, bias="bias" in theirs)
    for name, param in theirs.items():
        result.register_parameter(name, param)
    return result.train(norm.training)
