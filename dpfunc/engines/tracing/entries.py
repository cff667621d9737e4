"""Entries of memories: what a trace notes of each, and by which key."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from dpfunc._utils.dtensor import is_dtensor
from dpfunc.engines.guards.modes import unseen
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, Stored


class Constant(Enum):
    """Memory made in this step that does not depend on the batch."""

    EQUAL = "all numbers are the same"
    RANDOM = "random numbers, each with the same law"
    SIZES = "how many samples have each time of a packed sequence"
    SORTED = "the same, of samples that were sorted by their lengths"
    ANY = "anything else"


Entry = Stored | Mixed | Constant

COARSE_DTYPES = frozenset((torch.bfloat16, torch.float16))
"""Of numbers of 16 bits."""

# Memory that depends on batches of earlier steps and is still in use; weak references, no result depends on them.
EARLIER_MEMORY: dict[int, StorageWeakRef] = {}
_FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"


def forget_freed() -> None:
    """Drop memory of earlier steps that was freed."""
    freed = [key for key, reference in EARLIER_MEMORY.items() if reference.expired()]
    for key in freed:
        del EARLIER_MEMORY[key]


def part(tensor: Tensor) -> Tensor:
    """The tensor itself; this process's part of one that is split; the memory of one that is still on its way."""
    kind = type(tensor)
    if kind is Tensor or kind is Parameter or not has_own_dispatch(kind):
        return tensor
    if is_dtensor(tensor):
        return part(tensor._local_tensor)
    if kind.__module__ == _FUNCTIONAL_COLLECTIVES:
        return part(tensor.elem)  # type: ignore[attr-defined]  # of AsyncCollectiveTensor
    return tensor


def has_own_dispatch(kind: type) -> bool:
    """True if tensors of a class have operations of their own, and perhaps no memory that can be followed."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]  # of tensors


def parts(values: Any) -> Any:
    """Arguments or results with this process's part of each tensor that is split."""
    return pytree.tree_map_only(Tensor, part, values)


def key_of(tensor: Tensor) -> int:
    """The key of the memory of a tensor, 0 where it has no single one."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def pieces_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The indices and the values of a sparse tensor, which have memory; any other tensor itself."""
    if tensor.layout is not torch.sparse_coo:
        return (tensor,)
    with unseen():
        plain = tensor.detach()
        return plain._indices(), plain._values()


def fits(kind: Rows, tensor: Tensor) -> bool:
    """True if a tensor has the shape that its rows imply."""
    if kind.axis == ONE_SAMPLE:
        return True
    return kind.axis < tensor.ndim and tensor.shape[kind.axis] == kind.pre * kind.count * kind.post


def doubted(entry: Stored, reason: str) -> Stored:
    """The same rows, assumed and not proven for this reason; unchanged if it is empty."""
    return replace(entry, doubt=reason) if reason and not entry.doubt else entry


def carries_gradients(tensor: Tensor) -> bool:
    """True if a tensor has numbers through which autograd can differentiate."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_doubtful(entry: Entry) -> bool:
    """True of memory whose numbers depend on several samples, or may do so."""
    if isinstance(entry, Stored):
        return bool(entry.doubt) or entry.ragged or entry.slots is not None
    return isinstance(entry, Mixed)
