"""The processes that take a step: the interface that a step uses (`Processes`), and a single process (`OneProcess`).

Several processes are in `distributed.collective_step`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dpfunc._utils.digests import checksum_and_marks, in_hex
from dpfunc.batches import batch_size
from dpfunc.distributed.launch import check_alone
from dpfunc.engines.guards.lockstep import process_context
from dpfunc.engines.guards.parameters import not_finite, refuse_not_finite, refuse_sums, suspicious
from dpfunc.noise import Mechanism
from dpfunc.rng import Key
from dpfunc.types import Batch, ClippedSum, Params, Unreleased

FullNorms = Callable[[Params, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Parameters and squared norms of their parts -> squared norms of the whole."""

Clip = Callable[[Params, Batch, Tensor | None], tuple[ClippedSum, Unreleased]]
"""Parameters, rows and the mask of real rows (None: all) -> the clipped sum of these rows."""


class Rows(NamedTuple):
    """The rows of this process, the mask of the real ones (None: all), the largest number of rows of any process."""

    batch: Batch
    mask_B: Tensor | None
    size: int


class StepCall(NamedTuple):
    """A call of a step in this process, before it is checked.

    Args:
        check: the checks of this process; returns the mask of real rows, None for all.
        settings: returns a description of everything that must be equal in all processes.
        step: its number; None for a call without a state. params, batch: of this process.
    """

    check: Callable[[], Tensor | None]
    settings: Callable[[], str]
    step: int | None
    params: Params
    batch: Batch


class Processes(Protocol):
    """Interface of a step to the processes that take it: `OneProcess`, or several (`collective_step`)."""

    @property
    def rank(self) -> int:
        """Rank of this process among those with other records, from 0."""

    @property
    def size(self) -> int:
        """Number of processes with other records."""

    @property
    def writes(self) -> bool:
        """True on the one process that writes the journal."""

    @property
    def full_norms(self) -> FullNorms | None:
        """Squared norms of whole gradients from those of the parts of this process; None where it has whole ones."""

    def check_settings(self, microbatch_size: int | str | None) -> None:
        """Check that the processes can take steps with this `microbatch_size` of `make_dp_step`."""

    def check(self, call: StepCall) -> Rows:
        """Check that each process can take the step, and that all mean the same one."""

    def clip(self, clip: Clip, params: Params, rows: Rows) -> tuple[ClippedSum, Unreleased]:
        """The clipped sum over the rows of this process."""

    def release(
        self, mechanism: Mechanism, clipped: ClippedSum, params: Params, noise_state: Any, key: Key
    ) -> tuple[dict[str, Tensor], Any]:
        """The clipped sum over the rows of all processes with noise, and the next state of the mechanism.

        Args:
            mechanism: of the step. clipped: of this process. params: of the step. noise_state: of the mechanism.
            key: of the release.
        """

    def digest(self, released: Params, params: Params, mark: Tensor) -> tuple[str, bool]:
        """A digest of all that the step releases, before anybody gets it; and a mark of this process, read with it.

        Args:
            released: name -> noisy sum. params: of the step. mark: 0-d, bool.

        Raises:
            InvalidArgument: sums with NaN or inf; parameters with them, if `check` did not look at their numbers.
        """

    def confirm(self, write: Callable[[], None]) -> None:
        """Run an action, and return after it has succeeded in each process."""


class OneProcess:
    """A step that this process takes alone."""

    rank = 0
    size = 1
    writes = True
    full_norms = None

    def check_settings(self, microbatch_size: int | str | None) -> None:
        return None

    def check(self, call: StepCall) -> Rows:
        check_alone(os.environ)  # others may have joined since the step was made
        return Rows(call.batch, call.check(), batch_size(call.batch))

    def clip(self, clip: Clip, params: Params, rows: Rows) -> tuple[ClippedSum, Unreleased]:
        with process_context(None, independent=True):
            return clip(params, rows.batch, rows.mask_B)

    def release(
        self, mechanism: Mechanism, clipped: ClippedSum, params: Params, noise_state: Any, key: Key
    ) -> tuple[dict[str, Tensor], Any]:
        return mechanism.add(clipped, noise_state, key)

    def digest(self, released: Params, params: Params, mark: Tensor) -> tuple[str, bool]:
        marks = [suspicious(params), suspicious(released), mark]
        checksum, (look, spoiled, marked) = checksum_and_marks(released.items(), marks)
        if look:
            refuse_not_finite(params)
        if spoiled and (names := not_finite(released)):
            refuse_sums(names)
        return in_hex(checksum), marked

    def confirm(self, write: Callable[[], None]) -> None:
        write()
