"""Normalisations: `y = w * norm(x) + b`; norm(x) is computed again from x, which autograd keeps anyway.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._numerics import to_accumulation_dtype
from dpfunc.engines._per_sample import Dense
from dpfunc.engines._rules.table import (
    LEFT,
    REQUIRED,
    Bound,
    Form,
    Grads,
    ParameterUse,
    Rule,
    Takes,
    anything,
    over_positions,
    shaped,
)


def _layer_norm(
    use: ParameterUse, grad: Tensor, input: Tensor, normalized_shape: Sequence[int], eps: float, **_: Any
) -> Grads:
    """Gradients of weight and bias of a norm over the last axes."""
    values = {"bias": to_accumulation_dtype(grad)}
    if "weight" in use.wanted:
        normed = F.layer_norm(to_accumulation_dtype(input), list(normalized_shape), None, None, eps)
        values["weight"] = values["bias"] * normed
    return {name: Dense(over_positions(use.positions(values[name], len(normalized_shape)))) for name in use.wanted}


def _group_norm(
    use: ParameterUse, grad: Tensor, input: Tensor, num_groups: int, eps: float, weight: Tensor, left: list[Tensor],
    **_: Any,
) -> Grads:  # fmt: skip
    """Gradients of weight and bias of a norm over groups of channels.

    The same operation gives the gradient of its input, which is left there with mean and inverse deviation. The
    channels of all samples are those of one sample for it, so that torch adds up no gradients of two samples.
    """
    rows, channels, positions = *grad.shape[:2], math.prod(grad.shape[2:])
    g_NCT = to_accumulation_dtype(grad).reshape(rows, channels, positions).contiguous()
    if "weight" not in use.wanted or not grad.numel():
        return {name: Dense(use.split(g_NCT.sum(2)).sum(1)) for name in use.wanted}
    x_NCT = to_accumulation_dtype(input).reshape(g_NCT.shape).contiguous()
    statistics: Sequence[Tensor] = left[:2]
    same = input.dtype == grad.dtype == left[0].dtype == g_NCT.dtype
    if not same:  # statistics with the digits of sums
        statistics = torch.native_group_norm(x_NCT, None, None, rows, channels, positions, num_groups, eps)[1:]
    sizes = (1, rows * channels, positions, rows * num_groups)
    input_grad, of_weight, of_bias = torch.ops.aten.native_group_norm_backward(
        *(g_NCT.reshape(sizes[:3]), x_NCT.reshape(sizes[:3]), *(value.reshape(1, -1) for value in statistics)),
        *(weight.to(g_NCT.dtype).repeat(rows), *sizes, [same, True, True]),
    )
    left[2:] = [input_grad] if same else []
    summed = {"weight": of_weight, "bias": of_bias}
    return {name: Dense(use.split(summed[name].reshape(rows, channels)).sum(1)) for name in use.wanted}


def _run_layer_norm(bound: Bound) -> tuple[Tensor, Any]:
    shape = list(bound["normalized_shape"])
    out, *statistics = torch.native_layer_norm(bound["input"], shape, bound["weight"], bound["bias"], bound["eps"])
    return out, (shape, *statistics)


def _layer_norm_input(bound: Bound, grad: Tensor, left: Any) -> Tensor:
    arguments = (bound["weight"], bound["bias"], [True, False, False])
    found: Tensor = torch.ops.aten.native_layer_norm_backward(grad, bound["input"], *left, *arguments)[0]
    return found


def _sizes(bound: Bound) -> tuple[int, int, int, int]:
    x = bound["input"]
    return len(x), x.shape[1], x[0, 0].numel(), bound["num_groups"]


def _run_group_norm(bound: Bound) -> tuple[Tensor, Any]:
    bound["input"] = bound["input"].contiguous()
    out, *statistics = torch.native_group_norm(
        bound["input"], bound["weight"], bound["bias"], *_sizes(bound), bound["eps"]
    )
    return out, statistics


def _group_norm_input(bound: Bound, grad: Tensor, left: list[Tensor]) -> Tensor:
    if left[2:]:
        return left.pop()
    found: Tensor = torch.ops.aten.native_group_norm_backward(
        grad.contiguous(), bound["input"].contiguous(), *left, bound["weight"], *_sizes(bound), [True, False, False]
    )[0]
    return found


def _scale(shape: Callable[[Bound], Sequence[int]]) -> Mapping[str, Takes]:
    """Weight and bias of this shape and of the dtype of the input, and the other arguments."""
    fits = shaped(shape)
    own = dict.fromkeys(
        ("weight", "bias"), lambda value, bound: fits(value, bound) and value.dtype == bound["input"].dtype
    )
    return {**dict.fromkeys(("input", "normalized_shape", "num_groups", "eps"), anything), **own}


_NEEDS: dict[str, tuple[str, ...]] = {"weight": ("input",), "bias": ()}
_OPTIONS = {"weight": None, "bias": None, "eps": 1e-5}
RULES = (
    Rule(
        (F.layer_norm,),
        {"input": REQUIRED, "normalized_shape": REQUIRED, **_OPTIONS},
        _layer_norm,
        _NEEDS,
        form=Form(
            "input",
            _run_layer_norm,
            _layer_norm_input,
            _scale(lambda bound: bound["normalized_shape"]),
            reads_input=True,
        ),
    ),
    Rule(
        (F.group_norm,),
        {"input": REQUIRED, "num_groups": REQUIRED, **_OPTIONS},
        _group_norm,
        dict.fromkeys(("weight", "bias"), ("input", "weight", LEFT)),
        form=Form(
            "input",
            _run_group_norm,
            _group_norm_input,
            _scale(lambda bound: bound["input"].shape[1:2]),
            lambda bound: bound["input"].ndim - 1,
            reads_input=True,
        ),
    ),
)
