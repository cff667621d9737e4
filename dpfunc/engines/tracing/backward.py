"""Backward passes that need not be followed: they consist of torch's own derivatives of what was followed forward.

Where each number of the forward pass that can carry a gradient depends on one sample at most, as its type says, the
derivative of the loss of a sample by a number of another sample is zero. torch computes that derivative, row by row, in
the nodes of `_DERIVATIVES`. Anything else that runs Python in a backward pass is detected: custom functions and
checkpoints are other nodes; hooks on tensors and nodes are noted when they are registered (`torch_functions.HOOKING`),
hooks on saved tensors while they are active. With any of them the backward pass is followed operation by operation.
"""

from __future__ import annotations

import functools
from contextlib import suppress

import torch
from torch import Tensor

from dpfunc.engines.guards.loss import nodes_behind
from dpfunc.engines.uses.gradient_taps import GradientTap

_DERIVATIVES = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Abs", "Acos", "AdaptiveAvgPool2D", "Add", "Addcdiv", "Addcmul", "Addmm", "Alias", "Asin", "Atan", "Atan2",
        "AvgPool2D", "AvgPool3D", "Baddbmm", "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy", "Bmm", "Cat", "Celu",
        "Clamp", "ClampMax", "ClampMin", "Clone", "ConstantPadNd", "Convolution", "Cos", "Cosh", "Cumsum", "Detach",
        "Diagonal", "Div", "Dot", "Elu", "Erf", "Exp", "Expand", "Expm1", "Flip", "FusedRmsNorm", "Gather", "Gelu",
        "Glu", "Hardsigmoid", "Hardswish", "Hardtanh", "HuberLoss", "IndexSelect", "Index", "LeakyRelu", "Lerp",
        "LinalgVectorNorm", "Log", "Log10", "Log1P", "Log2", "LogSigmoid", "LogSoftmax", "Logaddexp", "Logsumexp",
        "MaskedFill", "MaxPool2DWithIndices", "Maximum", "Mean", "Minimum", "Mish", "Mm", "MseLoss", "Mul", "Mv",
        "NativeBatchNorm", "NativeDropout", "NativeGroupNorm", "NativeLayerNorm", "Neg", "NllLoss", "NllLoss2D", "Norm",
        "Permute", "Pow", "Prod", "Reciprocal", "ReflectionPad1D", "ReflectionPad2D", "Relu", "Repeat",
        "ReplicationPad1D", "ReplicationPad2D", "Roll", "Rsqrt", "Rsub", "SafeSoftmax",
        "ScaledDotProductCudnnAttention", "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttention",
        "ScaledDotProductFlashAttentionForCpu", "Scatter", "ScatterAdd", "Select", "Sigmoid", "Silu", "Sin", "Sinh",
        "Slice", "SmoothL1Loss", "Softmax", "Softplus", "Split", "SplitWithSizes", "Sqrt", "Squeeze", "Stack",
        "Std", "StdMean", "Sub", "Sum", "T", "Tan", "Tanh", "Threshold", "ToCopy", "Topk", "Transpose", "Tril", "Triu",
        "Unbind", "UnsafeSplit", "UnsafeView", "Unsqueeze", "UpsampleBicubic2D", "UpsampleBilinear2D",
        "UpsampleNearest2D", "Var", "VarMean", "View", "Where",
    )
    for number in range(7)
)  # fmt: skip
"""Nodes of torch whose gradients of a row are made of the gradients and saved numbers of that row, and of constants."""


class Unsettled(Exception):
    """The backward pass must be followed, and the forward pass was followed in part; never leaves the engines."""


_REVIEWED: set[type] = {GradientTap._backward_cls}


def reviewed(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Decorate a Function of an engine: the gradients of a row are made of the gradients and saved numbers of that row.

    The forward pass must type the numbers that it joins: where rows of different samples meet there, no backward pass
    is proven by it.
    """
    _REVIEWED.add(function._backward_cls)
    return function


def is_plain(losses_B: Tensor) -> bool:
    """True if there is a graph behind the losses, and it has only nodes of `_DERIVATIVES`, and those of engines."""
    kinds = {type(node) for node in nodes_behind(losses_B)}
    return bool(kinds) and all(map(_is_plain, kinds))


@functools.cache
def _is_plain(kind: type) -> bool:
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return kind in _REVIEWED
    return kind.__name__ in _DERIVATIVES or kind.__name__ == "AccumulateGrad"


def saving_hooked() -> bool:
    """True where hooks take the tensors that the graph saves."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return _refuses_to_disable_hooks() if top is None else top(True) is not None


def _refuses_to_disable_hooks() -> bool:
    """The same without that function of torch, which 2.6 lacks: hooks cannot be forbidden where there are some."""
    autograd = torch._C._autograd
    before = autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        autograd._saved_tensors_hooks_disable("for a moment")  # forbids them even where it raises
        return False
    except RuntimeError:
        return True
    finally:
        autograd._saved_tensors_hooks_enable()
        if before is not None:
            with suppress(RuntimeError):  # it raises where there are hooks, and forbids further ones all the same
                autograd._saved_tensors_hooks_disable(before)
