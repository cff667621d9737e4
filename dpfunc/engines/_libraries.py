"""Operations of other libraries that keep rows apart: weights in 4 bits, and experts of Transformers.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from dpfunc.engines._levels import OutsideTransforms, Pass, of_rows
from dpfunc.engines._reads import any_row
from dpfunc.errors import UnsupportedModel

# Products with weights in 4 bits, of bitsandbytes: frozen layers of a base on which adapters are trained (QLoRA).
_PRODUCTS = ("gemm_4bit", "gemv_4bit")


def _product_of_4_bits(owner: Pass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`x W^T + b` with any leading axes, of all rows; NotImplemented for other operations."""
    run: Callable[..., Any] = func
    if func.__name__.split(".")[0] not in _PRODUCTS or any_row((args[1:], dict(kwargs))):
        return NotImplemented
    if torch.is_grad_enabled() and args[0].requires_grad:
        raise UnsupportedModel(
            "Expected weights in 4 bits that gradients pass through, got weights that bitsandbytes has packed for "
            "inference: on this CPU it does so when the model runs in evaluation mode. Load the model again, and "
            "evaluate only after training; or train on an accelerator, where nothing is packed."
        )
    values_B = of_rows(args[0])
    with OutsideTransforms():
        out = run(values_B, *args[1:], **kwargs)
    return owner.levels.row(out)


def _experts(owner: Pass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The products of experts of Transformers where code is transformed, by torch's own operation."""
    if func.__name__.split(".")[0] != "grouped_mm_fallback":
        return NotImplemented
    bound = dict(zip(("input", "weight", "offs"), args, strict=False), **kwargs)
    return F.grouped_mm(bound["input"], bound["weight"], offs=bound["offs"])


OF_LIBRARIES = {"bitsandbytes": _product_of_4_bits, "transformers": _experts}
"""Operations of other libraries that keep rows apart, by namespace; NotImplemented for others."""
