"""Products with weights in 4 bits, of bitsandbytes: frozen layers of a base on which adapters are trained (QLoRA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dpfunc.engines.levels import Below, Levels, is_row, of_rows
from dpfunc.errors import UnsupportedModel

_PRODUCTS = ("gemm_4bit", "gemv_4bit")


def product(levels: Levels, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`(x (..., i), weight, ...)`: `x W^T + b` with any leading axes, of all rows; NotImplemented for other operations.

    Raises:
        UnsupportedModel: x has a gradient, which would be lost. On CPUs with bfloat16, bitsandbytes packs the weights
            at the first forward pass in evaluation mode, and keeps them so: what is trained below would then have a
            gradient of zero, with a warning of torch alone.
    """
    run: Callable[..., Any] = func
    if func.__name__.split(".")[0] not in _PRODUCTS or any(map(is_row, pytree.tree_leaves((args[1:], dict(kwargs))))):
        return NotImplemented
    if torch.is_grad_enabled() and args[0].requires_grad:
        raise UnsupportedModel(
            "Expected weights in 4 bits that gradients pass through, got weights that bitsandbytes has packed for "
            "inference: on this CPU it does so when the model runs in evaluation mode. Load the model again, and "
            "evaluate only after training; or train on an accelerator, where nothing is packed."
        )
    values_B = of_rows(args[0])
    with Below():
        out = run(values_B, *args[1:], **kwargs)
    return levels.row(out)
