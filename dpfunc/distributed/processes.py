"""The processes that take a step: what a step asks of them, and the answers of a single one.

Several processes are in `distributed.collective_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from dpfunc.distributed.agreement import checksum, in_hex
from dpfunc.engines.guards.lockstep import process_context
from dpfunc.types import Batch, ClippedSum, Params, Unreleased

Clip = Callable[[Params, Batch, Tensor], tuple[ClippedSum, Unreleased]]
"""Parameters, rows and which of them are real -> the clipped sum of these rows."""


class Rows(NamedTuple):
    """The rows of this process, which of them are real, and how many the process with the most rows has."""

    batch: Batch
    mask_B: Tensor
    size: int


class Processes(Protocol):
    """The processes of a step."""

    @property
    def rank(self) -> int:
        """Place of this process among those with other records, from 0."""
        ...

    @property
    def writes(self) -> bool:
        """True on the one process that writes the journal."""
        ...

    def check(
        self, check: Callable[[], Tensor], run: Callable[[], str], step: int | None, params: Params, batch: Batch
    ) -> Rows:
        """Check that each process can take the step, and that all mean the same one.

        Args:
            check: the checks of this process; returns the mask of real rows. run: description of everything that must
                be equal in all processes. step: its number; None for a call without a state.
            params, batch: of this process.
        """
        ...

    def sum(self, clip: Clip, params: Params, rows: Rows) -> tuple[ClippedSum, Unreleased]:
        """The clipped sum over the rows of all processes."""
        ...

    def digest(self, released: Params) -> str:
        """A digest of all that the step releases."""
        ...

    def confirm(self, write: Callable[[], None]) -> None:
        """Run an action; go on after it has succeeded in each process."""
        ...


class OneProcess:
    """A step that this process takes alone."""

    rank = 0
    writes = True

    def check(
        self, check: Callable[[], Tensor], run: Callable[[], str], step: int | None, params: Params, batch: Batch
    ) -> Rows:
        mask_B = check()
        return Rows(batch, mask_B, len(mask_B))

    def sum(self, clip: Clip, params: Params, rows: Rows) -> tuple[ClippedSum, Unreleased]:
        with process_context(None, independent=True):
            return clip(params, rows.batch, rows.mask_B)

    def digest(self, released: Params) -> str:
        return in_hex(checksum(released.items()))

    def confirm(self, write: Callable[[], None]) -> None:
        write()
