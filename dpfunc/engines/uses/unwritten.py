"""Values that are read from tensors later than they are made, and into which nothing may write in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from dpfunc.engines.rules.table import Use
from dpfunc.engines.uses.tracked import version

T = TypeVar("T")


@dataclass(frozen=True)
class Unwritten(Generic[T]):
    """What a backward pass gives for one use, kept by reference: a later part of it may write into the same memory.

    Such a write, by a hook or a backward function of the user's own, comes after the check that the gradient has the
    rows of its use, and may mix samples.
    """

    use: Use
    _value: T
    _tensors: Sequence[Tensor] = field(repr=False)
    _versions: tuple[int, ...] = field(repr=False)

    @staticmethod
    def of(use: Use, value: T, tensors: Sequence[Tensor]) -> Unwritten[T]:
        """A value that is read from these tensors, as they are now."""
        return Unwritten(use, value, tensors, tuple(version(tensor) for tensor in tensors))

    def read(self) -> T:
        """The value.

        Raises:
            UnsupportedModel: a tensor was written into since.
        """
        if self._versions != tuple(version(tensor) for tensor in self._tensors):
            raise self.use.refuse(
                "a later part of the backward pass writes into its gradient or its input, as a hook or a backward "
                "function of your own does that computes in place. Let it return a new tensor."
            )
        return self._value
