"""Tensors of rows of an earlier call: the loss may keep them, and must not use them.

Under levels, torch itself marks them (`levels.is_gone`). Rows that are computed alone have plain tensors: the memory of
what functions of torch compute from a row is noted. What is computed otherwise is seen by what the loss keeps
(`python_state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from dpfunc._utils.dtensor import is_dtensor
from dpfunc.engines.levels import is_dead, is_gone
from dpfunc.errors import UnsupportedModel

# Memory of rows of calls that have ended, which is still in use. Weak references; no result depends on them.
_earlier: dict[int, StorageWeakRef] = {}
_WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__", "__ixor__")
# Operations that write into tensors of a module without saying so, on devices that a test may not have.
UNDECLARED = frozenset(
    function
    for name in (
        "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats", "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts", "native_batch_norm", "_native_batch_norm_legit",
        "_batch_norm_with_update",
    )
    for packet in (getattr(torch.ops.aten, name),)
    for function in (getattr(torch, name, packet), packet, *(getattr(packet, each) for each in packet.overloads()))
)  # fmt: skip


_CONTROL_FLOW = ("cond", "while_loop", "scan", "map", "map_impl", "associative_scan")


def refuse_undeclared(func: Callable[..., Any]) -> None:
    """Refuse an operation that writes statistics without saying so, and control flow of torch, which runs unseen.

    Raises:
        UnsupportedModel: it is one.
    """
    if isinstance(func, HigherOrderOperator) and func.name() in _CONTROL_FLOW:
        raise UnsupportedModel(
            "The loss has control flow of torch (torch.cond, while_loop, scan), whose operations a step cannot follow. "
            "Use torch.where where a condition is each row's own, and if or for in Python where it is the same for all."
        )
    if func in UNDECLARED:
        name = getattr(func, "__name__", str(func))
        raise UnsupportedModel(
            f"The loss writes values of the batch ({name}) into tensors that were made outside of it (a buffer of a "
            "module): records of one step would reach the gradients of the next. Use model.eval(), or replace the "
            "layer."
        )


def forget_gone() -> None:
    """Forget memory that nobody uses any more: what nobody keeps need not be looked for."""
    for key in [key for key, reference in _earlier.items() if reference.expired()]:
        del _earlier[key]


def refuse_earlier(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse to compute with a tensor of a row of an earlier call.

    Raises:
        UnsupportedModel: there is one among the arguments.
    """
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if is_dead(value) or _earlier:
                _refuse(value)
        elif isinstance(value, (list, tuple)):
            for part in value:
                if isinstance(part, Tensor) and (is_dead(part) or _earlier):
                    _refuse(part)


def _refuse(tensor: Tensor) -> None:
    if is_gone(tensor) or is_earlier(tensor):
        raise UnsupportedModel(
            "The loss uses a tensor that it has kept from an earlier call: numbers of other rows would reach this one. "
            "Compute each loss from its own row and the parameters alone."
        )


def is_earlier(tensor: Tensor) -> bool:
    """True for a plain tensor that was computed from a row of an earlier call."""
    reference = _earlier.get(_memory(tensor))
    return reference is not None and not reference.expired()


def plain_memory(tensor: Tensor) -> Tensor | None:
    """The tensor with the memory; None where there is no single one."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    own_dispatch = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return None if own_dispatch or tensor.layout is not torch.strided else tensor


def _memory(tensor: Tensor) -> int:
    plain = plain_memory(tensor)
    return 0 if plain is None else plain.untyped_storage()._cdata


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


@dataclass
class RowMemory:
    """Memory that depends on the row of the present call."""

    _own: dict[int, StorageWeakRef] = field(default_factory=dict)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note that these tensors depend on the row."""
        for tensor in tensors:
            plain = plain_memory(tensor)
            if plain is not None:
                storage = plain.untyped_storage()
                self._own[storage._cdata] = StorageWeakRef(storage)

    def depends(self, tensor: Tensor) -> bool:
        """True for a tensor that depends on the row."""
        reference = self._own.get(_memory(tensor))
        return reference is not None and not reference.expired()

    def follow(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note results of a function that was given a tensor of the row, and what it has written into."""
        given = list(_tensors((args, kwargs)))
        of_row = [self.depends(tensor) for tensor in given]
        if not any(of_row):
            return
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name in _WRITING:
            self.note(given[:1])
        self.note(_tensors(kwargs.get("out")))
        views_of = {_memory(tensor) for tensor, own in zip(given, of_row, strict=True) if not own}
        self.note(tensor for tensor in _tensors(result) if _memory(tensor) not in views_of)

    def end(self) -> None:
        """Note what is still in use: a later call must not use it."""
        forget_gone()
        _earlier.update({key: reference for key, reference in self._own.items() if not reference.expired()})
