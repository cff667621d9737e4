"""Layers that act on each number, or on each sample on axis 0."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type, broadcast, combined
from dpfunc.engines.tracing.families.aligning import first_axis
from dpfunc.engines.tracing.rows import Rows


def _sampled(call: Call) -> Type:
    """`(input, grid, ...)`: samples on axis 0 of both; or positions of all samples in one constant image (a table)."""
    input, grid = call.args[:2]
    kind = call.type_of(grid)
    table = call.type_of(input) is None and isinstance(kind, Rows) and 0 < kind.axis < grid.ndim - 1
    return kind.moved(kind.axis + 1) if table and isinstance(kind, Rows) else first_axis(call)


def _ndim(call: Call) -> int:
    out = call.out if isinstance(call.out, Tensor) else call.out[0]
    return out.ndim if isinstance(out, torch.Tensor) else 0


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(
        ("im2col", "col2im", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "affine_grid_generator",
         "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
        first_axis,
    ),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), _sampled),
    "native_dropout": lambda call: [call.type_of(call.args[0])] * 2,  # the result and its mask
    **dict.fromkeys(
        ("_prelu_kernel", "_prelu_kernel_backward", "hardtanh_backward", "leaky_relu_backward", "softplus_backward",
         "log_sigmoid_forward", "log_sigmoid_backward", "elu_backward", "rrelu_with_noise", "masked_fill",
         "polar", "complex", "copy", "copysign", "fmax", "fmin", "heaviside", "hardsigmoid_backward",
         "hardswish_backward", "mish_backward", "hardshrink_backward", "softshrink_backward", "huber_loss_backward",
         "clamp_backward", "nan_to_num", "isclose", "xlogy", "special_entr", "floor_divide", "hardswish",
         "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"),
        lambda call: combined(call, [broadcast(t, _ndim(call)) for t in call.inputs]),
    ),
}  # fmt: skip
