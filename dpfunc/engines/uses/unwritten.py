"""Values that are read from tensors later than they are made, and into which nothing may write in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dpfunc.engines.rules.table import Use
from dpfunc.engines.tracing.trace import Trace
from dpfunc.engines.uses.tracked import version

T = TypeVar("T")


@dataclass(frozen=True)
class Unwritten(Generic[T]):
    """A value of one use, kept by reference in a backward pass: a later part of it may write into the same memory.

    Such a write, by a hook or a backward function of the user's own, comes after the check that the gradient has the
    rows of its use, and may mix samples. torch counts writes, and the trace sees those that it does not count
    (`tensor.data`), where they change what is known about the rows.
    """

    use: Use
    _value: T
    _tensors: Sequence[Tensor] = field(repr=False)
    _trace: Trace = field(repr=False)
    _known: tuple[object, ...] = field(repr=False)

    @staticmethod
    def of(use: Use, value: T, tensors: Sequence[Tensor], trace: Trace) -> Unwritten[T]:
        """A value that is read from these tensors, as they are now in the backward pass that this trace follows."""
        return Unwritten(use, value, tensors, trace, _known(tensors, trace))

    def read(self) -> T:
        """The value.

        Raises:
            UnsupportedModel: a tensor was written into since.
        """
        if self._known != _known(self._tensors, self._trace):
            raise self.use.refuse(
                "a later part of the backward pass writes into its gradient or its input, as a hook or a backward "
                "function of your own does that computes in place. Let it return a new tensor."
            )
        return self._value


def _known(tensors: Sequence[Tensor], trace: Trace) -> tuple[object, ...]:
    """Number of writes into each tensor, and what the trace knows about its memory."""
    with torch._C.DisableTorchFunction():
        return tuple((version(tensor), trace.entry_of(tensor)) for tensor in tensors)
