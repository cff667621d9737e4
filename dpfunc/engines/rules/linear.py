"""Matrices, `grad_i = sum_t g_t x_t^T`, bias `sum_t g_t`: linear, addmm (Hugging Face Conv1D), matmul. And tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.cost import Costs, matrix, summed, table
from dpfunc.engines.numerics import to_accumulation_dtype
from dpfunc.engines.per_sample import Dense, Gather, Outer, PerSampleGrad
from dpfunc.engines.rules.table import REQUIRED, Bound, Form, Grads, Rule, Use


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2


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


def _run_linear(bound: Bound) -> tuple[Tensor, Any]:
    return F.linear(bound["input"], bound["weight"].flatten(1), bound["bias"]), None


def _linear_input(bound: Bound, grad: Tensor, left: Any) -> Tensor:
    found: Tensor = grad @ bound["weight"].to(grad.dtype).flatten(1)
    return found


def _addmm(use: Use, grad: Tensor, mat1: Tensor, **_: Any) -> Grads:
    """`y = b + x W`."""
    grads: dict[str, PerSampleGrad] = {}
    if "mat2" in use.wanted:
        grads["mat2"] = Outer(use.positions(mat1), use.positions(grad), tuple(use.shapes["mat2"]))
    if "input" in use.wanted:
        grads["input"] = column_sum(use, grad)
    return grads


def _run_addmm(bound: Bound) -> tuple[Tensor, Any]:
    x = bound["mat1"]
    return torch.addmm(bound["input"], x.flatten(0, -2), bound["mat2"]).unflatten(0, x.shape[:-1]), None


def _addmm_input(bound: Bound, grad: Tensor, left: Any) -> Tensor:
    found: Tensor = grad @ bound["mat2"].to(grad.dtype).T
    return found


def _plain_addmm(bound: Bound) -> bool:
    return _is_matrix(bound["mat2"]) and bound["input"].ndim == 1 and bound["beta"] == bound["alpha"] == 1


def _matmul(use: Use, grad: Tensor, input: Tensor, **_: Any) -> Grads:
    """`y = x W`."""
    return {"other": Outer(use.positions(input), use.positions(grad), tuple(use.shapes["other"]))}


def _run_matmul(bound: Bound) -> tuple[Tensor, Any]:
    return bound["input"] @ bound["other"], None


def _matmul_input(bound: Bound, grad: Tensor, left: Any) -> Tensor:
    found: Tensor = grad @ bound["other"].to(grad.dtype).T
    return found


def _embedding_costs(use: Use) -> Costs:
    rows, d = use.shapes["weight"]
    return table(use.output.numel() // max(1, use.num_samples * d), rows, d)


def _embedding(use: Use, grad: Tensor, input: Tensor, padding_idx: int | None, **_: Any) -> Grads:
    """Table: `grad_i = sum_t e_{id_t} g_t^T`; the padding row gets nothing. `sparse` gives the same gradient, dense."""
    ids_BT, g_BTd = input.reshape(use.num_samples, -1).long(), use.positions(grad)
    if padding_idx is not None:
        padding = padding_idx % use.shapes["weight"][0]
        g_BTd = torch.where((ids_BT == padding)[:, :, None], torch.zeros_like(g_BTd), g_BTd)
    return {"weight": Gather(ids_BT, g_BTd, tuple(use.shapes["weight"]))}


def _run_embedding(bound: Bound) -> tuple[Tensor, Any]:
    return F.embedding(bound["input"], bound["weight"], bound["padding_idx"]), None


MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_EMBEDDING = {
    "input": REQUIRED, "weight": REQUIRED, "padding_idx": None, "max_norm": None, "norm_type": 2.0,
    "scale_grad_by_freq": False, "sparse": False,
}  # fmt: skip
RULES: Sequence[Rule] = (
    Rule(
        (F.linear,),
        {"input": REQUIRED, "weight": REQUIRED, "bias": None},
        _linear,
        {"weight": ("input",), "bias": ()},
        _costs,
        Form("input", _run_linear, _linear_input, lambda bound: bound["weight"].ndim > 1, positions=True),
    ),
    Rule(
        (torch.addmm, Tensor.addmm),
        {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED, "beta": 1, "alpha": 1},
        _addmm,
        {"mat2": ("mat1",), "input": ()},
        _costs,
        Form("mat1", _run_addmm, _addmm_input, _plain_addmm, positions=True),
    ),
    Rule(
        MATMULS,
        {"input": REQUIRED, "other": REQUIRED},
        _matmul,
        {"other": ("input",)},
        _costs,
        Form("input", _run_matmul, _matmul_input, lambda bound: _is_matrix(bound["other"]), positions=True),
    ),
    Rule(
        (F.embedding,),
        _EMBEDDING,
        _embedding,
        {"weight": ("input",)},
        _embedding_costs,
        Form(
            "input", _run_embedding, None, lambda bound: bound["max_norm"] is None and not bound["scale_grad_by_freq"]
        ),
    ),
)
