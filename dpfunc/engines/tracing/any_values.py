"""A trace whose proof holds for other numbers of the same shapes, as compiled steps need it.

The trace of a step may read numbers: a condition that is true for all samples, positions on the axis of the samples.
What it proves with them holds for that step. A compiled step runs again with other numbers and without a trace, so that
a proof for it must need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines.guards.modes import DispatchMode
from dpfunc.engines.tracing.call import tensors_of
from dpfunc.engines.tracing.entries import Constant, key_of, part
from dpfunc.engines.tracing.operations import Known, known_operation
from dpfunc.engines.tracing.trace import Trace


class _Reads(DispatchMode):
    """Notes a doubt where an operation reads numbers that depend on the batch, or that come from outside."""

    def __init__(self, trace: Trace, name: str) -> None:
        super().__init__()
        self.trace = trace
        self.name = name

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not known_operation(func).shares:  # views read no numbers
            with torch._C.DisableTorchFunction():
                if any(self._changes(tensor) for tensor in tensors_of((*args, *(kwargs or {}).values()))):
                    self.trace.doubts.append(f"{self.name}, whose rows follow from numbers: other steps have others")
        return func(*args, **(kwargs or {}))

    def _changes(self, tensor: Tensor) -> bool:
        """True if the numbers of a tensor may be others in the next step."""
        key = key_of(part(tensor))
        if key in self.trace.entries:
            return not isinstance(self.trace.entries[key][1], Constant)
        return key in self.trace.untraced_memory


@dataclass(eq=False)
class AnyValuesTrace(Trace):
    """Trace that doubts each operation whose rows it finds by looking at numbers of this step."""

    def _type(
        self,
        known: Known,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        constants: Tensor | None,
        *,
        split: bool,
    ) -> None:
        with _Reads(self, known.name):
            super()._type(known, args, kwargs, result, constants, split=split)
