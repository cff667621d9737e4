"""Count what a function launches, below all levels: operations, bytes, products, reads by the host, calls by Python."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from benchmarks.measure import MIB, Contestant
from dpfunc.engines.microbatches import Audits

# operations after which the host waits for a number; and methods of tensors that run none on a CPU
READING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
READING_METHODS = ("tolist", "numpy", "cpu")
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# these read as many numbers of their first argument as they write
LOOKS_UP = ("embedding", "index", "index_select", "gather")


def recurrent_flop(x: Tensor, weight: Tensor, state_weight: Tensor, *_: object, **__: object) -> int:
    """Products of a recurrent layer: each position of each sample with both matrices."""
    return 2 * x[..., 0].numel() * (weight.numel() + state_weight.numel())


# what torch does not count: kernels of a CPU
ATTENTION, RECURRENT = "_scaled_dot_product_flash_attention_for_cpu", "mkldnn_rnn_layer"
FLOPS: dict[str, Callable[..., int]] = {
    ATTENTION: sdpa_flop, f"{ATTENTION}_backward": sdpa_backward_flop,
    RECURRENT: recurrent_flop, f"{RECURRENT}_backward": lambda *args, **_: 2 * recurrent_flop(*args),
}  # fmt: skip


def size_of(tensor: Tensor) -> int:
    """Bytes of the numbers of a tensor; along an axis that is expanded there is one."""
    lengths = (length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(lengths) * tensor.itemsize


def is_view(operation: Any) -> bool:
    aliases = [each.alias_info for each in operation._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


class Launches(TorchDispatchMode):
    """Count what runs below all levels.

    `trace` has an entry for each operation that is no view: its name, and the shapes of its tensors.
    """

    __module__ = "torch"  # a step refuses modes of others, which could mix rows

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple[str, tuple[torch.Size, ...]]] = []
        self.read = self.written = self.flops = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_view(func):
            return result
        name = func._schema.name.partition("::")[2]
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.trace.append((name, tuple(tensor.shape for tensor in given)))
        masks = name.startswith("index") and any(tensor.dtype == torch.bool for tensor in given[1:])
        self.reads += name in READING or masks
        if name not in ALLOCATES:
            sizes, written = [size_of(tensor) for tensor in given], sum(size_of(tensor) for tensor in made)
            if name in LOOKS_UP:
                sizes[0] = min(sizes[0], written)
            self.read, self.written = self.read + sum(sizes), self.written + written
        formula = FLOPS.get(name) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    def counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of tensors by which the host reads, with its call counted."""

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.reads += tensor.dtype != torch.uint8  # the state of a generator is never on a device
            return method(tensor, *args, **kwargs)

        return call


@contextmanager
def no_rows_alone() -> Iterator[None]:
    """No step in here compares rows with what is computed of them alone, which some steps do by chance."""
    with mock.patch.object(Audits, "due", return_value=0):
        yield


def calls_of(step: Callable[[], object]) -> int:
    """Calls by Python, of its own functions and of built-in ones."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what a collection calls comes by chance
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def launches_of(step: Callable[[], object]) -> Launches:
    """What one call launches."""
    found = Launches()
    methods = {name: found.counting(getattr(Tensor, name)) for name in READING_METHODS}
    with mock.patch.multiple(Tensor, **methods), found:
        step()
    return found


def counts_of(contestant: Contestant) -> dict[str, float]:
    """All counts of a step of a contestant that has taken some."""
    with no_rows_alone():
        contestant.clear()
        found = launches_of(contestant.step)
        contestant.clear()
        calls = calls_of(contestant.step)
    numbers = {"operations": len(found.trace), "reads": found.reads, "calls": calls}
    return {**numbers, "read_mib": found.read / MIB, "written_mib": found.written / MIB, "mflop": found.flops / 1e6}
