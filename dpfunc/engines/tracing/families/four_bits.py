"""Products with weights in 4 bits, of bitsandbytes: frozen layers of a base on which adapters are trained (QLoRA)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpfunc.engines.tracing.call import Call, Type, combined, lettered
from dpfunc.errors import UnsupportedModel


def _product(call: Call) -> Type:
    """`(x (..., i), weight, ...)`: `x W^T + b` with any leading axes; all but x are constants of the base."""
    input: Tensor = call.args[0]
    if any(call.type_of(tensor) is not None for tensor in call.inputs if tensor is not input):
        return call.mixed()
    lead = "abcdefgh"[: input.ndim - 1]
    return combined(call, [lettered(input, lead + "i", lead + "o")])


def _vector_product(call: Call) -> Type:
    """The same for inference, without a gradient of x.

    On CPUs with bfloat16, bitsandbytes packs the weights for it at the first forward pass in evaluation mode, and keeps
    them so: what is trained below would then have a gradient of zero, with a warning of torch alone.

    Raises:
        UnsupportedModel: x has a gradient, which would be lost.
    """
    if call.args[0].requires_grad:
        raise UnsupportedModel(
            "Expected weights in 4 bits that gradients pass through, got weights that bitsandbytes has packed for "
            "inference: on this CPU it does so when the model runs in evaluation mode. Load the model again, and "
            "evaluate only after training; or train on an accelerator, where nothing is packed."
        )
    return _product(call)


FAMILY: dict[str, Callable[[Call], Type]] = {"gemm_4bit": _product, "gemv_4bit": _vector_product}
