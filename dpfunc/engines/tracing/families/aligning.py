"""Tensors beside the samples: on axis 0 of all, or on no axis."""

from __future__ import annotations

from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Type, broadcast, combined, leading


def first_axis(call: Call) -> Type:
    """Tensors whose samples are on axis 0; everything else is combined."""
    tensors = [tensor for tensor in call.inputs if tensor.ndim]
    return combined(call, [leading(tensor) for tensor in tensors], range(1, 16))


def beside_matrices(tensor: Tensor, matrices: Tensor, ndim: int) -> Aligned:
    """The right side of equations with these matrices (..., n, m): matrices too; or vectors (..., n), as torch says."""
    return leading(tensor) if tensor.shape == matrices.shape[:-1] else broadcast(tensor, ndim)


def nowhere(tensor: Tensor) -> Aligned:
    """A tensor that has no axis of samples."""
    return Aligned(tensor, lambda axis: -1, lambda axis: -1)
