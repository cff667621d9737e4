"""Operations that broadcast: `w * x`, `x + b`, an attention bias, and expanding a parameter (a class token).

The parameter is replaced by a private copy for each sample, without memory (stride 0), and autograd does the rest: the
gradient of the copies is the per-sample gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.errors import UnsupportedModel

_NAMES = (
    "add", "sub", "mul", "div", "true_divide", "rsub", "where", "lerp", "maximum", "minimum", "pow", "addcmul",
    "addcdiv", "atan2", "arctan2", "clamp", "clamp_max", "clamp_min", "clip", "copysign", "float_power", "fmax", "fmin",
    "fmod", "hypot", "logaddexp", "logaddexp2", "remainder", "xlogy",
)  # fmt: skip
_METHODS = (
    *_NAMES, "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_", "multiply", "subtract",
    "__pow__", "__rpow__", "pow_",
    "divide",
)  # fmt: skip
POINTWISE: frozenset[Callable[..., Any]] = frozenset(
    getattr(owner, name) for owner in (torch, Tensor) for name in _METHODS if hasattr(owner, name)
)
_LISTED = tuple(POINTWISE)
# These broadcast the leading axes only; their result has the shape of the first argument there.
LIKE_FIRST: frozenset[Callable[..., Any]] = frozenset((F.scaled_dot_product_attention,))
JOINING: frozenset[Callable[..., Any]] = frozenset((torch.cat, torch.concat, torch.concatenate))
EXPANDING: frozenset[Callable[..., Any]] = frozenset(
    (Tensor.expand, Tensor.expand_as, Tensor.broadcast_to, torch.broadcast_to)
)


def is_pointwise(func: Callable[..., Any]) -> bool:
    """True if a torch function broadcasts its arguments."""
    # dynamo hashes methods that torch wraps in Python (`Tensor.__pow__`) in its own way, and finds them in no set.
    return func in (_LISTED if torch.compiler.is_compiling() else POINTWISE)


def copies_for(
    name: str, op: str, param: Tensor, output: torch.Size, sample_axis: SampleAxis, num_samples: int
) -> tuple[Tensor, Tensor, int]:
    """Private copies of a parameter that broadcast with a result of shape `output`.

    Returns:
        The leaf whose gradient is wanted; what stands in for the parameter; and the leaf's axis of samples.

    Raises:
        UnsupportedModel: the axis of the samples is one of the parameter's own.
    """
    if sample_axis.is_one_sample():  # one sample needs no copies
        leaf = param.detach().requires_grad_()
        return leaf, leaf, sample_axis.axis
    aligned = (1,) * (len(output) - param.ndim) + tuple(param.shape)
    if len(aligned) != len(output) or aligned[sample_axis.axis] != 1:
        raise UnsupportedModel(
            f"{op} of parameter {name!r} {tuple(param.shape)}, result {tuple(output)}: the samples are on axis "
            f'{sample_axis.axis}, which is an axis of the parameter. Use engine="vmap" or "loop".'
        )
    value = param.detach().reshape(aligned)
    leaf = value.expand(*aligned[: sample_axis.axis], num_samples, *aligned[sample_axis.axis + 1 :]).requires_grad_()
    return leaf, sample_axis.expand_copies(leaf, num_samples), sample_axis.axis
