"""Pools, interpolation and padding: operations over the last axes of images."""

from __future__ import annotations

import torch

from dpfunc.engines.tracing.call import Call, Handler, Type, broadcast, combined


def _spatial(count: int) -> Handler:
    """Operations over the last axes: pools, interpolation, padding by reflection, and their backward passes."""

    def handler(call: Call) -> Type:
        tensors = [tensor for tensor in call.inputs if tensor.ndim > count]
        ndim = tensors[0].ndim
        return combined(call, [broadcast(tensor, ndim) for tensor in tensors], range(ndim - count, ndim))

    return handler


_POOLS = (
    "max_pool{}_with_indices", "avg_pool{}", "_adaptive_avg_pool{}", "adaptive_avg_pool{}", "adaptive_max_pool{}",
    "fractional_max_pool{}", "max_unpool{}", "max_pool{}", "mkldnn_max_pool{}", "upsample_nearest{}",
    "upsample_linear{}", "upsample_bilinear{}", "upsample_bicubic{}", "upsample_trilinear{}", "_upsample_bilinear{}_aa",
    "_upsample_bicubic{}_aa", "_upsample_nearest_exact{}", "reflection_pad{}", "replication_pad{}",
)  # fmt: skip


def _pools() -> dict[str, Handler]:
    table: dict[str, Handler] = {}
    for pattern in _POOLS:
        for count in (1, 2, 3):
            name = pattern.format(f"{count}d")
            table[name] = table[f"{name}_backward"] = _spatial(count)
    return {name: handler for name, handler in table.items() if hasattr(torch.ops.aten, name)}


FAMILY: dict[str, Handler] = _pools()
