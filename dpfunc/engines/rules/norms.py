"""Normalisations: `y = w * norm(x) + b`. The weight gets `sum_t g_t * norm(x)_t`, the bias `sum_t g_t`.

norm(x) is computed again from x, which autograd keeps anyway: less memory than a second activation. A group norm needs
mean and standard deviation only: torch's own gradients of weight and bias, with the channels of all samples as
channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.numerics import to_accumulation_dtype
from dpfunc.engines.per_sample import Dense
from dpfunc.engines.rules.table import Grads, Rule, Use


def _last_axes(use: Use, grad: Tensor, normed: Tensor | None) -> Grads:
    features = len(next(iter(use.shapes.values())))
    grads = {}
    if "weight" in use.wanted and normed is not None:
        grads["weight"] = Dense(use.positions(to_accumulation_dtype(grad) * normed, features).sum(1))
    if "bias" in use.wanted:
        grads["bias"] = Dense(use.positions(to_accumulation_dtype(grad), features).sum(1))
    return grads


def _channels(use: Use, grad: Tensor, normed: Tensor | None) -> Grads:
    grads = {}
    if "weight" in use.wanted and normed is not None:
        grads["weight"] = _per_channel(use, to_accumulation_dtype(grad) * normed)
    if "bias" in use.wanted:
        grads["bias"] = _per_channel(use, to_accumulation_dtype(grad))
    return grads


def _per_channel(use: Use, values: Tensor) -> Dense:  # (B, m, C, ...) -> (B, C)
    if use.sample_axis.axis != 0:
        raise use.refuse("the samples are not on axis 0 of (N, C, ...).")
    rows_B = use.split(values)
    return Dense(rows_B.sum([axis for axis in range(1, rows_B.ndim) if axis != 2]))


def _layer_norm(
    use: Use,
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Grads:
    """Gradients of weight and bias of a norm over the last axes."""
    normed = (
        F.layer_norm(to_accumulation_dtype(input), list(normalized_shape), None, None, eps)
        if "weight" in use.wanted
        else None
    )
    return _last_axes(use, grad, normed)


def _rms_norm(
    use: Use,
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Grads:
    """Gradient of the weight of a norm over the last axes, without centring."""
    return _last_axes(use, grad, F.rms_norm(to_accumulation_dtype(input), list(normalized_shape), None, eps))


def _group_norm(
    use: Use,
    grad: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Grads:
    """Gradients of weight and bias of a norm over groups of channels."""
    if "weight" not in use.wanted:
        return _channels(use, grad, None)
    if use.sample_axis.axis != 0 or not input.numel():
        return _channels(use, grad, F.group_norm(to_accumulation_dtype(input), num_groups, None, None, eps))
    rows, channels, positions = *input.shape[:2], math.prod(input.shape[2:])
    x_NCT, g_NCT = (
        to_accumulation_dtype(side).reshape(rows, channels, positions).contiguous() for side in (input, grad)
    )
    _, mean, rstd = torch.ops.aten.native_group_norm(x_NCT, None, None, rows, channels, positions, num_groups, eps)
    sizes = (1, rows * channels, positions, rows * num_groups)
    _, of_weight, of_bias = torch.ops.aten.native_group_norm_backward(
        *(g_NCT.reshape(sizes[:3]), x_NCT.reshape(sizes[:3]), mean.reshape(1, -1), rstd.reshape(1, -1)),
        *(x_NCT.new_ones(sizes[1]), *sizes, [False, True, True]),
    )
    summed = {"weight": of_weight, "bias": of_bias}
    return {name: Dense(use.split(summed[name].reshape(rows, channels)).sum(1)) for name in use.wanted}


def _instance_norm(
    use: Use,
    grad: Tensor,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Grads:
    """Gradients of weight and bias of a norm over each channel of each sample."""
    if not use_input_stats:
        return _batch_norm(use, grad, input, running_mean, running_var, weight, bias, False, momentum, eps)
    normed = F.instance_norm(to_accumulation_dtype(input), eps=eps) if "weight" in use.wanted else None
    return _channels(use, grad, normed)


def _batch_norm(
    use: Use,
    grad: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Grads:
    """Gradients of weight and bias, with fixed statistics only: those of a batch mix its samples."""
    if training or running_mean is None or running_var is None:
        raise use.refuse("the statistics of a batch mix its samples. Use dpfunc.replace_batchnorm(model).")
    if "weight" not in use.wanted:
        return _channels(use, grad, None)
    return _channels(
        use,
        grad,
        F.batch_norm(
            to_accumulation_dtype(input),
            to_accumulation_dtype(running_mean),
            to_accumulation_dtype(running_var),
            eps=eps,
        ),
    )


def _prelu(use: Use, grad: Tensor, input: Tensor, weight: Tensor) -> Grads:
    """`y = max(x, 0) + w min(x, 0)`, with one weight, or one a channel."""
    product = to_accumulation_dtype(grad) * to_accumulation_dtype(input).clamp(max=0)
    if use.shapes["weight"].numel() == 1:
        return {"weight": Dense(use.split(product).flatten(1).sum(1).reshape(-1, *use.shapes["weight"]))}
    return {"weight": _per_channel(use, product)}


_INPUT: tuple[str, ...] = ("input",)
_STATISTICS = ("running_mean", "running_var")
RULES = (
    Rule((F.layer_norm,), _layer_norm, {"weight": _INPUT, "bias": ()}),
    Rule((F.rms_norm, torch.rms_norm), _rms_norm, {"weight": _INPUT}),
    Rule((F.group_norm,), _group_norm, {"weight": _INPUT, "bias": ()}),
    Rule((F.instance_norm,), _instance_norm, {"weight": ("input", "running_mean", "running_var"), "bias": ()}),
    Rule((F.batch_norm,), _batch_norm, {"weight": ("input", *_STATISTICS), "bias": _STATISTICS}),
    Rule((F.prelu, torch.prelu), _prelu, {"weight": _INPUT}),
)
