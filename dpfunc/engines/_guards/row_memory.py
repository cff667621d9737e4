"""Memory that holds numbers of the row of a call, where the loss runs without levels; and memory that is shared.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpfunc.batches import tree_leaves
from dpfunc.engines._guards.loss import memory_of, memory_of_earlier, plain_memory

WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__", "__ixor__")


def overlaps(tensor: Tensor) -> bool:
    """True if several places of a tensor may share memory: windows (`unfold`), repeats (`expand`)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


@dataclass
class RowMemory:
    """Memory that depends on the row of the present call."""

    _own: dict[int, StorageWeakRef] = field(default_factory=dict)

    def note(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            plain = plain_memory(tensor)
            if plain is not None:
                storage = plain.untyped_storage()
                self._own[storage._cdata] = StorageWeakRef(storage)

    def depends(self, tensor: Tensor) -> bool:
        reference = self._own.get(memory_of(tensor))
        return reference is not None and not reference.expired()

    def follow(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the results of a function that got a tensor of the row, and the tensors it has written into."""
        given = list(_tensors((args, kwargs)))
        of_row = [self.depends(tensor) for tensor in given]
        if not any(of_row):
            return
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name in WRITING:
            self.note(given[:1])
        self.note(_tensors(kwargs.get("out")))
        views_of = {memory_of(tensor) for tensor, own in zip(given, of_row, strict=True) if not own}
        self.note(tensor for tensor in _tensors(result) if memory_of(tensor) not in views_of)

    def end(self) -> None:
        """Record the memory that is still in use: a later call must not use it."""
        memory_of_earlier.update({key: reference for key, reference in self._own.items() if not reference.expired()})
