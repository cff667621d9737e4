"""Matrices: linear, addmm (Hugging Face Conv1D), matmul. `grad_i = sum_t g_t x_t^T`, bias `sum_t g_t`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.cost import Costs, matrix, summed
from dpfunc.engines.numerics import to_accumulation_dtype
from dpfunc.engines.per_sample import Dense, Outer, PerSampleGrad
from dpfunc.engines.rules.table import REQUIRED, Grads, Rule, Use


def _costs(use: Use) -> Costs:
    """Costs of the matrix; the gradient of a bias is formed."""
    shape = max(use.shapes.values(), key=len)
    positions = use.output.numel() // max(1, use.num_samples * use.output[-1])
    return matrix(positions, shape[0], shape[1:].numel()) if len(shape) > 1 else summed(shape.numel(), positions)


def column_sum(use: Use, grad: Tensor) -> Dense:
    """The sum over the positions of each sample: the gradient of a bias."""
    return Dense(to_accumulation_dtype(use.positions(grad)).sum(1))


def _linear(use: Use, grad: Tensor, input: Tensor, **_: Any) -> Grads:
    """`y = x W^T + b`, of a matrix that may have more axes after the first one."""
    grads: dict[str, PerSampleGrad] = {}
    if "weight" in use.wanted:
        grads["weight"] = Outer(use.positions(grad), use.positions(input), tuple(use.shapes["weight"]))
    if "bias" in use.wanted:
        grads["bias"] = column_sum(use, grad)
    return grads


def _addmm(use: Use, grad: Tensor, mat1: Tensor, **_: Any) -> Grads:
    """`y = b + x W`."""
    grads: dict[str, PerSampleGrad] = {}
    if "mat2" in use.wanted:
        grads["mat2"] = Outer(use.positions(mat1), use.positions(grad), tuple(use.shapes["mat2"]))
    if "input" in use.wanted:
        grads["input"] = column_sum(use, grad)
    return grads


def _matmul(use: Use, grad: Tensor, input: Tensor, **_: Any) -> Grads:
    """`y = x W`."""
    return {"other": Outer(use.positions(input), use.positions(grad), tuple(use.shapes["other"]))}


MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_LINEAR = {"input": REQUIRED, "weight": REQUIRED, "bias": None}
_ADDMM = {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED, "beta": 1, "alpha": 1}
_MATMUL = {"input": REQUIRED, "other": REQUIRED}
RULES: Sequence[Rule] = (
    Rule((F.linear,), _LINEAR, _linear, {"weight": ("input",), "bias": ()}, _costs),
    Rule((torch.addmm, Tensor.addmm), _ADDMM, _addmm, {"mat2": ("mat1",), "input": ()}, _costs),
    Rule(MATMULS, _MATMUL, _matmul, {"other": ("input",)}, _costs),
)
