"""Matrices: linear, addmm (Hugging Face Conv1D), matmul, bilinear. `grad_i = sum_t g_t x_t^T`, bias `sum_t g_t`."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.cost import Costs, matrix, summed
from dpfunc.engines.numerics import to_accumulation_dtype
from dpfunc.engines.per_sample import Dense, Outer, PerSampleGrad
from dpfunc.engines.rules.table import Grads, Rule, Use


def _costs(use: Use) -> Costs:
    """Costs of the matrix; gradients of vectors and stacks are formed."""
    (shape, *_) = sorted(use.shapes.values(), key=len, reverse=True)
    positions = use.output.numel() // max(1, use.num_samples * use.output[-1])
    return matrix(positions, *shape) if len(shape) == 2 else summed(math.prod(shape), positions)


def column_sum(use: Use, grad: Tensor) -> Dense:
    """The sum over the positions of each sample: the gradient of a bias."""
    return Dense(to_accumulation_dtype(use.positions(grad)).sum(1))


def _linear(use: Use, grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Grads:
    """`y = x W^T + b`."""
    grads: dict[str, PerSampleGrad] = {}
    if "weight" in use.wanted:
        grads["weight"] = Outer(use.positions(grad), use.positions(input), tuple(use.shapes["weight"]))
    if "bias" in use.wanted:
        grads["bias"] = column_sum(use, grad)
    return grads


def _inner(use: Use, grad: Tensor, input: Tensor, other: Tensor) -> Grads:
    """`y = x W^T`, or `y = x . w`, by the last axis of both; the parameter is the second argument."""
    shape = tuple(use.shapes["other"])
    if len(shape) > 2 or input.ndim == 1:
        raise use.refuse("only a matrix or a vector on the right has a rule; use torch.einsum.")
    if len(shape) == 1:
        return {"other": Outer(use.positions(input), use.positions(grad[..., None]), shape)}
    return {"other": Outer(use.positions(grad), use.positions(input), shape)}


def _addmm(
    use: Use, grad: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Grads:
    """`y = beta b + alpha x W`."""
    grads: dict[str, PerSampleGrad] = {}
    if "mat2" in use.wanted:
        grads["mat2"] = Outer(_times(use.positions(mat1), alpha), use.positions(grad), tuple(use.shapes["mat2"]))
    if "input" in use.wanted:
        if len(use.shapes["input"]) != 1:
            raise use.refuse("the added parameter is not a vector.")
        grads["input"] = column_sum(use, _times(grad, beta))
    return grads


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _matmul(use: Use, grad: Tensor, input: Tensor, other: Tensor) -> Grads:
    """`y = x W` with a vector, a matrix or a stack of matrices W, `y = W x` with a matrix or a stack of them."""
    argument = next(iter(use.wanted))
    shape = tuple(use.shapes[argument])
    if argument == "other" and len(shape) == 2:
        return {"other": Outer(use.positions(input), use.positions(grad), shape)}
    if argument == "other" and len(shape) == 1:
        return {"other": Outer(use.positions(input), use.positions(grad[..., None]), shape)}
    if argument == "input" and len(shape) == 2 and len(use.output) > 2 and use.sample_axis.axis < len(use.output) - 2:
        return {"input": Outer(use.positions(grad.mT), use.positions(other.mT), shape)}
    if len(shape) > 2 and argument == "other" and input.ndim > 1:
        return {"other": _stack(use, shape, input, grad)}
    if len(shape) > 2 and argument == "input" and other.ndim > 1:
        return {"input": _stack(use, shape, grad, other)}
    raise use.refuse("only matrices, vectors on the right and stacks of matrices have a rule; use torch.einsum.")


def _stack(use: Use, shape: tuple[int, ...], first: Tensor, second: Tensor) -> Dense:
    """Stacked matrices, e.g. those of experts, `grad[e] = first[e]^T second[e]`; on the left `first[e] second[e]^T`.

    Args:
        first, second: with the axes of the result; axes that the parameter lacks are summed over.
    """
    ndim, axis, on_the_left = len(use.output), use.sample_axis.axis, "input" in use.wanted
    aligned = (1,) * (ndim - len(shape)) + shape
    if axis == (ndim - 2 if on_the_left else ndim - 1) or (axis < ndim - 2 and aligned[axis] != 1):
        raise use.refuse("the samples are on an axis of the parameter.")
    sides = [
        use.split(to_accumulation_dtype(side.reshape((1,) * (ndim - side.ndim) + tuple(side.shape))))
        for side in (first, second)
    ]
    letters = string.ascii_lowercase[: ndim - 2]
    kept = "".join(letter for letter, size in zip(letters, aligned, strict=False) if size != 1)
    of_sides = ("PT", "DT") if on_the_left else ("TP", "TD")
    equation = ",".join(f"Z{letters}{last}" for last in of_sides) + f"->Z{kept}PD"
    return Dense(torch.einsum(equation, *sides).reshape(-1, *shape))


def _bilinear(
    use: Use, grad: Tensor, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Grads:
    """`y_o = x1^T W_o x2 + b_o`."""
    grads: dict[str, PerSampleGrad] = {}
    if "weight" in use.wanted:
        products_BTq = (use.positions(input1)[..., :, None] * use.positions(input2)[..., None, :]).flatten(2)
        grads["weight"] = Outer(use.positions(grad), products_BTq, tuple(use.shapes["weight"]))
    if "bias" in use.wanted:
        grads["bias"] = column_sum(use, grad)
    return grads


def _grouped(
    use: Use, grad: Tensor, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Grads:  # fmt: skip
    """`y_s = x_s W_e` with the segment e of row s: matrices of experts."""
    shape = tuple(use.shapes["mat_b"])
    if offs is None or mat_a.ndim != 2 or len(shape) != 3:
        raise use.refuse("only rows in segments have a rule.")
    segments = torch.searchsorted(offs.long(), torch.arange(len(mat_a), device=offs.device), right=True)
    x_BTd, g_BTn = use.positions(mat_a), use.positions(grad)
    e_BT = use.positions(segments[:, None] + 1)[..., 0] - 1  # rows that fill up are of no segment
    formed = g_BTn.new_zeros(use.num_samples, *shape, dtype=to_accumulation_dtype(g_BTn).dtype)
    for expert in torch.unique(e_BT).tolist():
        if 0 <= expert < shape[0]:
            own_BT1 = (e_BT == expert)[..., None]
            formed[:, expert] = torch.einsum(
                "ZTD,ZTN->ZDN", to_accumulation_dtype(x_BTd * own_BT1), to_accumulation_dtype(g_BTn)
            )
    return {"mat_b": Dense(formed)}


_MATMULS = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.mm,
    Tensor.mm,
    torch.bmm,
    Tensor.bmm,
    torch.mv,
    Tensor.mv,
)
_GROUPED = tuple(  # newer versions of torch have them
    vars(space)[name] for space, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if name in vars(space)
)
RULES: Sequence[Rule] = (
    Rule((F.linear,), _linear, {"weight": ("input",), "bias": ()}, _costs),
    Rule((torch.inner, Tensor.inner), _inner, {"other": ("input",)}, _costs),
    Rule((torch.addmm, Tensor.addmm), _addmm, {"mat2": ("mat1",), "input": ()}, _costs),
    Rule(_MATMULS, _matmul, {"other": ("input",), "input": ("other",)}, _costs),
    Rule(_GROUPED, _grouped, {"mat_b": ("mat_a", "offs")}),
    Rule((F.bilinear, torch.bilinear), _bilinear, {"weight": ("input1", "input2"), "bias": ()}, _costs),
)
