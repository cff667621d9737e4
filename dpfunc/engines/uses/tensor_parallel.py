"""Parameters that are DTensors: the part on this rank, and the placements that its gradient needs.

Tensor parallel layers run as torch runs them. Where a rule takes a layer's input and the gradient of its output, it
gets this rank's parts as plain tensors: a column-parallel matrix (its rows are split) sees the full input and its part
of the gradient, a row-parallel one (its columns are split) its part of the input and the full gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc._utils.dtensor import is_dtensor, waited
from dpfunc.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ADVICE = (
    "Train linear layers that parallelize_module has split with ColwiseParallel or RowwiseParallel, and plain "
    "parameters that see whole activations; leave this one out, or do not split it."
)


def is_sharded(param: Tensor) -> bool:
    """True if ranks hold different parts: their squared norms add up. Otherwise every rank has all of it.

    >>> is_sharded(torch.ones(2))
    False
    """
    return is_dtensor(param) and any(not placement.is_replicate() for placement in param.placements)


def full_tensor_of(tensor: Tensor) -> Tensor:
    """Collect all of a tensor on every rank; a plain tensor is returned itself. Communicates."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return waited(tensor.full_tensor())


def local_like(tensor: Tensor, param: Tensor) -> Tensor:
    """The part of a gradient of `param` that this rank holds of `param`. May communicate."""
    if not is_dtensor(tensor):
        return tensor
    return local_part(tensor, param.placements if is_dtensor(param) else ())


def shard_like(full: Tensor, param: Tensor) -> Tensor:
    """Shard a tensor that every rank holds in full like `param`. Does not communicate."""
    if not is_dtensor(param):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def local_part(tensor: Tensor, placements: Sequence[Any]) -> Tensor:
    """This rank's part of a tensor with these placements."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        if tuple(tensor.placements) != tuple(placements):
            tensor = tensor.redistribute(placements=placements)
        return waited(tensor.to_local())


def gradient_placements(output: DTensor) -> tuple[Any, ...]:
    """Placements for the gradient of a result: those of the result; replicated where it is a sum over ranks."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if placement.is_partial() else placement for placement in output.placements)


def check_use(func: object, name: str, bound: Mapping[str, Any], wanted: Mapping[str, str], output: Tensor) -> None:
    """Check that this rank's parts, and nothing else, make this rank's gradients.

    Args:
        func, name: the operation. bound: its arguments. wanted: argument -> parameter. output: its result.

    Raises:
        UnsupportedModel: they do not; it names the parameter, the operation, and the placements of its tensors.
    """
    tensors = {argument: value for argument, value in bound.items() if isinstance(value, Tensor)}
    if not is_dtensor(output) and not any(is_dtensor(value) for value in tensors.values()):
        return
    placements = [value.placements for value in (*tensors.values(), output) if is_dtensor(value)]
    if func is not F.linear or len(placements) <= len(tensors):
        raise unsupported(name, tensors, wanted, output)
    for here in zip(*placements, strict=True):
        if not _local_linear(dict(zip(tensors, here, strict=False)), here[-1], tensors, output):
            raise unsupported(name, tensors, wanted, output)


def _local_linear(here: Mapping[str, Any], out: Any, tensors: Mapping[str, Tensor], output: Tensor) -> bool:
    """True if, on one dimension of the mesh, a linear layer is split by rows, by columns, or not at all."""
    weight, input, bias = here["weight"], here["input"], here.get("bias")
    if weight.is_shard(0):
        return bool(input.is_replicate() and out.is_shard(output.ndim - 1) and (bias is None or bias.is_shard(0)))
    if bias is not None and not bias.is_replicate():
        return False
    if weight.is_shard(1):
        summed = out.is_replicate() or (out.is_partial() and out.reduce_op == "sum")
        return bool(input.is_shard(tensors["input"].ndim - 1) and summed)
    return bool(weight.is_replicate() and input.is_replicate() and out.is_replicate())


def unsupported(
    name: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, str], output: object = None
) -> UnsupportedModel:
    """An error that names the parameter, the operation and the placements of its tensors."""
    names = ", ".join(f"{wanted[argument]!r}" for argument in tensors if argument in wanted)
    placements = ", ".join(f"{argument} {_placement_of(tensor)}" for argument, tensor in tensors.items())
    result = f", result {_placement_of(output)}" if isinstance(output, Tensor) else ""
    return UnsupportedModel(
        f"{name} of parameter {names} over several ranks has no rule for these placements: {placements}{result}. "
        f"{_ADVICE}"
    )


def _placement_of(tensor: Tensor) -> str:
    if not is_dtensor(tensor):
        return f"{tuple(tensor.shape)} plain"
    axes = tensor.device_mesh.mesh_dim_names or range(tensor.device_mesh.ndim)
    by_axis = ", ".join(f"{axis}: {placement}" for axis, placement in zip(axes, tensor.placements, strict=True))
    return f"{tuple(tensor.shape)} {{{by_axis}}}"
