"""Fused attention: types of its results, forward and backward."""

from __future__ import annotations

from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Handler, Type, broadcast, combined, leading


def _attention(call: Call) -> list[Type]:
    """`(query, key, value, ...)` of (B, H, T, d): all positions of one sample and head are combined."""
    query = call.args[0]
    masks = [v for v in (*call.args[3:], *call.kwargs.values()) if isinstance(v, Tensor)]
    operands = [leading(tensor) for tensor in call.args[:3]] + [broadcast(mask, query.ndim) for mask in masks]
    kind = combined(call, operands, (query.ndim - 2, query.ndim - 1))
    return [kind if isinstance(value, Tensor) and value.ndim >= 3 else None for value in call.out]


def _attention_backward(call: Call) -> list[Type]:
    """`(grad, query, key, value, out, logsumexp, ...)` of the fused kernels."""
    query = call.args[1]
    tensors = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor) and v.ndim >= 2]
    operands = [_beside(query, tensor) for tensor in tensors]
    return [combined(call, operands, (query.ndim - 2, query.ndim - 1))] * len(call.out)


def _beside(query: Tensor, tensor: Tensor) -> Aligned:
    """A tensor with the leading axes of the query, as a gradient or statistics; others, as masks, are broadcast."""
    own = tensor.ndim in (query.ndim, query.ndim - 1) and tensor.shape[0] == query.shape[0]
    return leading(tensor) if own else broadcast(tensor, query.ndim)


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys((f"{name}_backward" for name in _ATTENTION), _attention_backward),
}  # fmt: skip
