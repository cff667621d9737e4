"""Checks of trainable parameters: their kind, which needs no number of them, and that all numbers are finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from dpfunc._utils.dtensor import local
from dpfunc._utils.validation import shorten
from dpfunc.engines._numerics import to_accumulation_dtype
from dpfunc.errors import InvalidArgument
from dpfunc.types import Params

_TRAINED = (torch.float64, torch.float32, torch.bfloat16)


def check_named(params: Params) -> None:
    """Check that params are a non-empty mapping of floating tensors.

    Raises:
        InvalidArgument: naming the parameter.
    """
    if not isinstance(params, Mapping):
        raise InvalidArgument(f"Expected params to be a mapping name -> tensor, got {type(params).__name__}.")
    if not params:
        raise InvalidArgument("Expected at least one parameter, got params={}. Nothing would be trained.")
    for name, param in params.items():
        if not isinstance(param, Tensor):
            raise InvalidArgument(f"Expected params[{name!r}] to be a tensor, got {type(param).__name__}.")
        if not param.is_floating_point():
            raise InvalidArgument(
                f"Expected params[{name!r}] to have a floating dtype, got {param.dtype}. "
                "Leave it out of params: it cannot be trained by gradients."
            )


def refuse_narrow_range(params: Params) -> None:
    """Refuse trained parameters of a type with few exponents: float16, or 8 bits.

    A gradient beyond 65504 is infinite in float16, so its record would count as zero, and nobody would see it.

    Raises:
        InvalidArgument: naming the parameter.

    >>> refuse_narrow_range({"w": torch.zeros(1, dtype=torch.bfloat16)})
    """
    for name, param in params.items():
        if param.dtype not in _TRAINED:
            raise InvalidArgument(
                f"Expected trained parameters in float32, bfloat16 or float64, got {name!r} in {param.dtype}. Large "
                "gradients are infinite there, and their records would count as zero, unnoticed; small ones, and the "
                "squares that Adam keeps, round to 0. Convert them with .float(), or load the model with "
                "from_pretrained(..., dtype=torch.float32): Transformers takes the type that the folder was saved in. "
                "Frozen parameters may stay as they are."
            )


def suspicious(params: Params) -> Tensor:
    """A mark (0-d, bool) that is set if a number is not finite, or a sum overflows: then look closely.

    >>> suspicious({"w": torch.tensor([1.0, float("nan")])})
    tensor(True)
    """
    sums = [to_accumulation_dtype(local(param).detach().sum()) for param in params.values()]
    return ~torch.isfinite(torch.stack([each.to(sums[0].device) for each in sums])).all()


def refuse_not_finite(params: Params) -> None:
    """Refuse parameters with a number that is not finite.

    Raises:
        InvalidArgument: naming the parameters that have NaN or inf.
    """
    bad = not_finite(params)
    if bad:
        raise InvalidArgument(
            f"Expected finite parameters, got NaN or inf in {shorten(bad)}. The run has diverged: lower the learning "
            "rate and restart from the last checkpoint."
        )


def refuse_sums(names: Sequence[str]) -> NoReturn:
    """Refuse sums with a number that is not finite, which noise does not hide.

    Each sample has a bounded part in them, but a factor above 1 (of automatic rules) on very large numbers, before
    they meet very small ones, can overflow.

    Args:
        names: of the parameters; none where another process has the part.
    """
    where = shorten(names) or "the part of another process"
    raise InvalidArgument(
        f"Expected finite sums of clipped gradients, got NaN or inf in {where}. "
        "A sample has numbers so large, beside others so small, that their products cannot be computed in float32. "
        "Bring inputs and losses to ordinary sizes in the data set, with numbers that are public (a value such as 1e30 "
        "often stands for a missing one). Nothing was released and nothing was spent."
    )


def not_finite(values: Params) -> list[str]:
    """Names of the tensors that have NaN or inf in the part of this process."""
    return [name for name, value in values.items() if not bool(torch.isfinite(local(value).detach()).all())]


def check_finite(params: Params) -> None:
    """Check that all numbers are finite. Reads one mark from the device.

    Raises:
        InvalidArgument: naming the parameters that are not.
    """
    if bool(suspicious(params)):
        refuse_not_finite(params)


def check_params(params: Params) -> None:
    """Check that params are a non-empty mapping of finite, floating tensors.

    Raises:
        InvalidArgument: naming the parameter.
    """
    check_named(params)
    check_finite(params)
