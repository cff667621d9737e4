"""Tensors that are divided over processes (DTensor): the part that is held here, and how they are divided.

May import: its folder, errors. Privacy depends on it: yes.

torch.distributed.tensor is not imported where it is not used.
"""

import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from dpfunc.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Window(NamedTuple):
    """The part of a tensor that is held here, with the tensor treated as a matrix (shape[0], everything else)."""

    num_rows: int
    num_cols: int
    rows: tuple[int, int]  # (start, stop) of the part
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of the part."""
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


def is_dtensor(tensor: object) -> TypeGuard["DTensor"]:
    """True for a DTensor. Does not import the module of DTensor: if a DTensor exists, it was imported before."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def fsdp_class(name: str) -> type | None:
    """Class of torch.distributed.fsdp, if that was imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def any_fully_sharded(parts: Iterable[object]) -> bool:
    """True if `fully_shard` was called on one of these parts of a module."""
    kind = fsdp_class("FSDPModule")
    return kind is not None and any(isinstance(part, kind) for part in parts)


def local(tensor: Tensor) -> Tensor:
    """Part of a tensor that this process holds, without history; a tensor that is no DTensor is returned itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Any = tensor.to_local()
        return cast(Tensor, part.wait() if hasattr(part, "wait") else part)  # for the communication that makes it


def local_like(tensor: Tensor, param: Tensor) -> Tensor:
    """The part of a gradient of `param` that this rank holds of `param`. May communicate."""
    if not is_dtensor(tensor):
        return tensor
    placements = param.placements if is_dtensor(param) else ()
    with torch.no_grad():
        return local(tensor if tuple(tensor.placements) == placements else tensor.redistribute(placements=placements))


def shard_like(full: Tensor, param: Tensor) -> Tensor:
    """Shard a tensor that every rank holds in full like `param`. Does not communicate."""
    if not is_dtensor(param):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def distributed(part: Tensor, like: Tensor, placements: Any = None) -> Tensor:
    """A local part as the tensor that it is a part of: a DTensor that is divided as `like`, or itself."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    spec: Any = like
    form: Any = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, spec.device_mesh, placements or spec.placements, run_check=False, **form)


def shard_dims(tensor: Tensor) -> dict[int, int]:
    """Mesh dimension -> the dimension of the tensor that it divides. Empty for tensors that are whole."""
    placements = tensor.placements if is_dtensor(tensor) else ()
    return {axis: int(p.dim) for axis, p in enumerate(placements) if hasattr(p, "dim") and not p.is_partial()}


def window(tensor: Tensor, name: str) -> Window:
    """Part of a tensor that this process holds, as rows and columns of a matrix."""
    shape = tuple(tensor.shape)
    num_rows, num_cols = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if not is_dtensor(tensor):
        return Window(num_rows, num_cols, (0, num_rows), (0, num_cols))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec: Any = tensor
    if any(p.is_partial() for p in spec.placements) or any(dim > 1 for dim in shard_dims(tensor).values()):
        raise UnsupportedModel(
            f"Expected {name} to be whole or sharded along its first or second dimension, got placements "
            f"{spec.placements} of shape {shape}."
        )
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, spec.device_mesh, spec.placements)
    sizes, offsets = (*sizes, *[1] * (2 - len(sizes))), (*offsets, *[0] * (2 - len(offsets)))
    inner = math.prod(shape[2:])
    rows = (offsets[0], offsets[0] + sizes[0])
    cols = (offsets[1] * inner, (offsets[1] + sizes[1]) * inner)
    return Window(num_rows, num_cols, rows if rows[0] < num_rows else (num_rows, num_rows), cols)
