"""Products of matrices and what is made of them: each is an einsum, whose letters name the axes that are combined."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Handler, Type, broadcast, combined, lettered
from dpfunc.engines.tracing.families.aligning import beside_matrices
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Rows


def _product(*letters: str, out: str, first: int = 0) -> Handler:
    """An einsum of the tensors from argument `first` on; a tensor before them is added."""

    def handler(call: Call) -> Type:
        operands = [
            lettered(tensor, own, out)
            for tensor, own in zip(call.args[first : first + len(letters)], letters, strict=True)
        ]
        if first:
            operands.append(broadcast(call.args[0], len(out)))
        return combined(call, operands)

    return handler


def _grouped(call: Call) -> Type:
    """`(rows (S, d), matrices (E, d, n), offs (E,))`: segments of rows, each with its own matrix.

    The number of a row's matrix must be of its own sample: an integer that the trace has kept, such as its expert.
    """
    rows, matrices, offs = call.args[0], call.args[1], call.arg(2, "offs")
    kind = call.type_of(rows)
    if rows.ndim != 2 or matrices.ndim != 3 or not isinstance(offs, Tensor) or call.type_of(matrices) is not None:
        return call.mixed("gradient of weights" if matrices.ndim == 2 else "")
    if not isinstance(kind, Rows):
        return kind
    if kind.axis != 0:
        return call.mixed()
    segments = torch.searchsorted(offs.long(), torch.arange(len(rows), device=offs.device), right=True)
    if int(offs[-1]) != len(rows) or not call.types.are_own_integers(segments, kind):
        return kind.doubted(f"{call.name} with segments that are not each row's own")
    return kind


def _linear(call: Call) -> Type:
    """`y = x W^T + b` with any leading axes."""
    input: Tensor = call.args[0]
    lead = "abcdefgh"[: input.ndim - 1]
    operands = [lettered(input, lead + "i", lead + "o"), lettered(call.args[1], "oi", lead + "o")]
    bias = call.arg(2, "bias")
    return combined(call, operands + ([lettered(bias, "o", lead + "o")] if bias is not None else []))


def _position(axes: list[int], axis: int) -> int:
    return axes.index(axis) if axis in axes else -1


def _trilinear(call: Call) -> Type:
    """`(i1, i2, i3, expand1, expand2, expand3, sumdim)`: axes are added, all three multiplied, axes summed."""
    operands, summed = [], call.args[6]
    for tensor, added in zip(call.args[:3], call.args[3:6], strict=True):
        axes = [axis for axis in range(tensor.ndim + len(added)) if axis not in added]
        operands.append(Aligned(tensor, axes.__getitem__, partial(_position, axes)))
    kind = combined(call, operands, summed)
    if not isinstance(kind, Rows) or kind.axis == ONE_SAMPLE:
        return kind
    return kind.moved(kind.axis - sum(axis < kind.axis for axis in summed))


def _cdist(call: Call) -> Type:
    """Distances of the rows of two matrices; the backward pass has the gradient, both matrices and the distances."""
    lead = "abcdefgh"[: call.out.ndim - 2]  # broadcast from the right, as all leading axes
    own = [lead[call.out.ndim - tensor.ndim :] for tensor in call.args[:2]]
    return combined(
        call,
        [
            lettered(tensor, before + axes, lead + "pr")
            for tensor, before, axes in zip(call.args[:2], own, ("pm", "rm"), strict=True)
        ],
    )


def _cdist_backward(call: Call) -> Type:
    """`(grad (..., P, R), x1 (..., P, M), x2 (..., R, M), p, distances)`: the gradient of x1."""
    one: Tensor = call.args[1]
    if any(tensor.ndim != one.ndim for tensor in (call.args[0], call.args[2])):
        return call.mixed("of matrices that were broadcast")
    lead = "abcdefgh"[: one.ndim - 2]
    out = lead + "pm"
    return combined(
        call,
        [
            lettered(call.args[0], lead + "pr", out), lettered(one, out, out),
            lettered(call.args[2], lead + "rm", out), lettered(call.args[4], lead + "pr", out),
        ],
    )  # fmt: skip


def _cross(call: Call) -> Type:
    """Product of vectors of three numbers along one axis, `(a, b, *, dim)`; its backward pass is made of the same."""
    ndim = max(tensor.ndim for tensor in call.inputs)
    return combined(call, [broadcast(tensor, ndim) for tensor in call.inputs], (call.arg(2, "dim", -1) % ndim,))


def _solve(call: Call) -> Type:
    """`_solve(A (..., n, n), B (..., n, k))` and triangular ones: the last two axes are combined."""
    tensors = [tensor for tensor in call.inputs if tensor.ndim >= 2]
    if any(call.type_of(tensor) is not None for tensor in call.inputs if tensor.ndim < 2):
        return call.mixed("of a vector")
    ndim = max(tensor.ndim for tensor in tensors)
    return combined(call, [beside_matrices(tensor, tensors[0], ndim) for tensor in tensors], (ndim - 2, ndim - 1))


FAMILY: dict[str, Callable[[Call], object]] = {
    "mm": _product("nk", "km", out="nm"),
    "bmm": _product("bnk", "bkm", out="bnm"),
    "addmm": _product("nk", "km", out="nm", first=1),
    "baddbmm": _product("bnk", "bkm", out="bnm", first=1),
    "addbmm": _product("bnk", "bkm", out="nm", first=1),
    "mv": _product("nk", "k", out="n"),
    "addmv": _product("nk", "k", out="n", first=1),
    "addr": _product("n", "m", out="nm", first=1),
    "dot": _product("k", "k", out=""),
    "vdot": _product("k", "k", out=""),
    "ger": _product("n", "m", out="nm"),
    "linear": _linear,
    "linalg_cross": _cross,
    "_trilinear": _trilinear,
    "_grouped_mm": _grouped,
    "_cdist_forward": _cdist,
    "_euclidean_dist": _cdist,
    "_cdist_backward": _cdist_backward,
    **dict.fromkeys(("_linalg_solve_ex", "linalg_solve_triangular", "triangular_solve", "linalg_lu_solve"), _solve),
}
