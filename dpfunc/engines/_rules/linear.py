"""Matrices, `grad_i = sum_t g_t x_t^T`, bias `sum_t g_t`: linear, addmm (Hugging Face Conv1D), matmul. And tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._numerics import Costs, matrix, summed, table, to_accumulation_dtype
from dpfunc.engines._per_sample import Dense, Gather, Outer, PerSampleGrad
from dpfunc.engines._rules.table import REQUIRED, Bound, Form, Grads, Rule, Use


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


@dataclass(frozen=True)
class _Product:
    """`y = x W^T + b` or `y = x W + b`: names of x, W and b among the arguments of an operation."""

    x: str
    matrix: str
    bias: str = ""
    turned: bool = False  # x W^T; W may have more axes after the first one

    def _grads(self, use: Use, grad: Tensor, **tensors: Any) -> Grads:
        found: dict[str, PerSampleGrad] = {}
        if self.matrix in use.wanted:
            x, g, shape = use.positions(tensors[self.x]), use.positions(grad), tuple(use.shapes[self.matrix])
            found[self.matrix] = Outer(g, x, shape) if self.turned else Outer(x, g, shape)
        if self.bias in use.wanted:
            found[self.bias] = column_sum(use, grad)
        return found

    def input_grad(self, bound: Bound, grad: Tensor, left: Any) -> Tensor:
        weight = bound[self.matrix].to(grad.dtype)
        found: Tensor = grad @ (weight.flatten(1) if self.turned else weight.T)
        return found

    def rule(
        self, ops: tuple[Callable[..., Any], ...], arguments: Mapping[str, Any], run: Callable[[Bound], Tensor],
        takes: Callable[[Bound], bool],
    ) -> Rule:  # fmt: skip
        needs: dict[str, tuple[str, ...]] = {self.matrix: (self.x,), **({self.bias: ()} if self.bias else {})}
        form = Form(self.x, lambda bound: (run(bound), None), self.input_grad, takes, positions=True)
        return Rule(ops, arguments, self._grads, needs, _costs, form)


def _run_addmm(bound: Bound) -> Tensor:
    x: Tensor = bound["mat1"]
    return torch.unflatten(torch.addmm(bound["input"], x.flatten(0, -2), bound["mat2"]), 0, x.shape[:-1])


def _embedding(use: Use, grad: Tensor, input: Tensor, padding_idx: int | None, **_: Any) -> Grads:
    """Table: `grad_i = sum_t e_{id_t} g_t^T`; the padding row gets nothing. `sparse` gives the same gradient, dense."""
    ids_BT, g_BTd = input.reshape(use.num_samples, -1).long(), use.positions(grad)
    if padding_idx is not None:
        padding = padding_idx % use.shapes["weight"][0]
        g_BTd = torch.where((ids_BT == padding)[:, :, None], torch.zeros_like(g_BTd), g_BTd)
    return {"weight": Gather(ids_BT, g_BTd, tuple(use.shapes["weight"]))}


MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_EMBEDDING = {
    "input": REQUIRED, "weight": REQUIRED, "padding_idx": None, "max_norm": None, "norm_type": 2.0,
    "scale_grad_by_freq": False, "sparse": False,
}  # fmt: skip
RULES: Sequence[Rule] = (
    _Product("input", "weight", "bias", turned=True).rule(
        (F.linear,),
        {"input": REQUIRED, "weight": REQUIRED, "bias": None},
        lambda bound: F.linear(bound["input"], bound["weight"].flatten(1), bound["bias"]),
        lambda bound: bound["weight"].ndim > 1,
    ),
    _Product("mat1", "mat2", "input").rule(
        (torch.addmm, Tensor.addmm),
        {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED, "beta": 1, "alpha": 1},
        _run_addmm,
        lambda bound: _is_matrix(bound["mat2"]) and bound["input"].ndim == 1 and bound["beta"] == bound["alpha"] == 1,
    ),
    _Product("input", "other").rule(
        MATMULS,
        {"input": REQUIRED, "other": REQUIRED},
        lambda bound: bound["input"] @ bound["other"],
        lambda bound: _is_matrix(bound["other"]),
    ),
    Rule(
        (F.embedding,),
        _EMBEDDING,
        _embedding,
        {"weight": ("input",)},
        lambda use: table(use.output.numel() // max(1, use.num_samples * use.output[-1]), *use.shapes["weight"]),
        Form(
            "input",
            lambda bound: (F.embedding(bound["input"], bound["weight"], bound["padding_idx"]), None),
            None,
            lambda bound: bound["max_norm"] is None and not bound["scale_grad_by_freq"],
        ),
    ),
)
