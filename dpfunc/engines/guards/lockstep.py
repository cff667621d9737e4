"""Rules for communication with the other processes of a run: none inside of the loss, or the same in all of them.

Where a model is sharded, its forward and backward passes are exchanges between all processes: each must run the same
ones, in the same order. What an engine decides by the values of its own rows must then be decided by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfunc._utils.dtensor import is_dtensor
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Params

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class _ProcessContext:
    """Other processes that take part in a step.

    Args:
        group: processes with other records; None for a step of one process. independent: nothing inside of the loss
            communicates.
    """

    group: ProcessGroup | None
    independent: bool


_context: ContextVar[_ProcessContext | None] = ContextVar("dpfunc_process_context", default=None)


@contextmanager
def process_context(group: ProcessGroup | None, *, independent: bool) -> Iterator[None]:
    """Inside, a step computes its gradients together with these processes, or independently of them."""
    token = _context.set(_ProcessContext(group, independent))
    try:
        yield
    finally:
        _context.reset(token)


def is_independent() -> bool:
    """True if nothing inside of the loss may communicate.

    >>> is_independent()
    False
    """
    context = _context.get()
    return context is not None and context.independent


def in_lockstep() -> bool:
    """True if all processes must run the same forward and backward passes.

    >>> in_lockstep()
    False
    """
    context = _context.get()
    return context is not None and not context.independent


def _any_process(flags: Tensor) -> Tensor:
    """Flags (bool) that are set on this process, or on one with other records that runs in lockstep with it.

    >>> _any_process(torch.tensor([True, False])).tolist()
    [True, False]
    """
    context = _context.get()
    if context is None or context.independent:
        return flags
    import torch.distributed as dist

    counts = flags.to(torch.float32, copy=True)
    if dist.get_backend(context.group) == "nccl":
        counts = counts.cuda()
    dist.all_reduce(counts, dist.ReduceOp.MAX, group=context.group)
    return (counts > 0).to(flags.device)


def on_any_process(flag: bool) -> bool:
    """The same for one flag of the host, which nothing reads from a device unless processes run in lockstep.

    >>> on_any_process(True)
    True
    """
    return bool(_any_process(torch.tensor([flag]))) if in_lockstep() else flag


def anywhere(flags: Tensor, params: Params) -> Tensor:
    """Flags (bool) that are set on this rank, or on one that holds other parts of these parameters or of the model."""
    import torch.distributed as dist

    counts = flags.to(torch.float32, copy=True)
    for mesh in dict.fromkeys(param.device_mesh for param in params.values() if is_dtensor(param)):
        for dim in range(mesh.ndim):
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return _any_process(counts > 0)


def on_any_rank(params: Params, *flags: bool) -> list[bool]:
    """The same for flags of the host, which nothing reads from a device unless a model is split or in lockstep.

    >>> on_any_rank({"w": torch.zeros(1)}, True, False)
    [True, False]
    """
    if not in_lockstep() and not any(is_dtensor(param) for param in params.values()):
        return list(flags)
    return [bool(flag) for flag in anywhere(torch.tensor(flags), params).tolist()]


@contextmanager
def refused_by_all() -> Iterator[None]:
    """Inside, a refusal by one process becomes a refusal by all. Nothing inside may communicate.

    Raises:
        UnsupportedModel: its own, or that of another process.
    """
    error: UnsupportedModel | None = None
    try:
        yield
    except UnsupportedModel as refused:
        error = refused
    elsewhere = on_any_process(error is not None)
    if error is not None:
        raise error
    if elsewhere:
        raise UnsupportedModel("Another process of this run refused the loss for its rows; its own error says why.")
