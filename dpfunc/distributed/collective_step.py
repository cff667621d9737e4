"""A step of several processes: all take it, or none does.

A process that fails must still inform the others, or they would wait for it: each part of a step takes part in its
exchange before it lets the error of its caller pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc._utils.dtensor import is_dtensor, local
from dpfunc._utils.validation import fail
from dpfunc.batches import batch_size, pad_rows, signature, tree_map
from dpfunc.distributed.agreement import RankSummary, agree, digest_of_all, summarize
from dpfunc.distributed.launch import check_alone
from dpfunc.distributed.noise_shares import noise_windows, num_bands
from dpfunc.distributed.processes import Clip, FullNorms, OneProcess, Processes, Rows, StepCall
from dpfunc.distributed.ranks import Ranks, all_or_raise
from dpfunc.distributed.reduce import check_placements, full_norms, gathered, sum_over
from dpfunc.engines.guards.lockstep import process_context
from dpfunc.engines.guards.parameters import check_finite
from dpfunc.engines.numerics import accumulation_dtype
from dpfunc.errors import InvalidArgument, StepAborted
from dpfunc.noise import Mechanism
from dpfunc.rng import Key
from dpfunc.types import Batch, ClippedSum, Params, Unreleased


def processes_of(ranks: Ranks | None) -> Processes:
    """The processes that take each step of a run together.

    Args:
        ranks: of the run; None is this process alone.

    Raises:
        InvalidArgument: not ranks; or a launcher started more processes than this one.
    """
    if ranks is None:
        check_alone(os.environ)
        return OneProcess()
    if not isinstance(ranks, Ranks):
        raise fail("ranks made by dpfunc.distributed.data_parallel() or sharded(mesh)", "ranks", ranks)
    return _ManyProcesses(ranks)


@dataclass(frozen=True)
class _ManyProcesses:
    """The processes of `ranks`, which take each step together; see `processes.Processes`."""

    ranks: Ranks

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    @property
    def writes(self) -> bool:
        return self.ranks.writes

    @property
    def full_norms(self) -> FullNorms:
        return partial(full_norms, ranks=self.ranks)

    def check_settings(self, microbatch_size: int | str | None) -> None:
        """Refuse what processes cannot agree on where the loss itself communicates."""
        if self.ranks.independent:
            return
        if microbatch_size == "auto":
            raise InvalidArgument(
                'Expected a number for microbatch_size with a sharded model, got "auto": what each process measures '
                "may differ, and all must run the same microbatches."
            )

    def check(self, call: StepCall) -> Rows:
        """All processes pass their own checks and agree with each other.

        Raises:
            StepAborted, RankMismatch: see `agreement.agree`. Whatever `check` raises.
        """
        if call.step is None:
            start = "Start with dp_step.init(params, shared_key(ranks))."
            raise fail("a state, which all processes share", "state", None, start)
        own, largest, mask_B = RankSummary(call.step, 0, 1, 0, 0, 0, 0, 0), 0, None
        try:
            mask_B = call.check()
            check_finite(call.params)
            check_placements(call.params, self.ranks)
            _dummy_of(call.batch, self.ranks)
            own = summarize(step=call.step, batch=call.batch, params=call.params, run=call.settings(), ranks=self.ranks)
        finally:
            largest = agree(own, self.ranks)
        return Rows(call.batch, mask_B, largest)

    def clip(self, clip: Clip, params: Params, rows: Rows) -> tuple[ClippedSum, Unreleased]:
        """Clipped sum and unreleased values of this process; `release` adds up those of all.

        Raises:
            Whatever `clip` raises. The other processes raise StepAborted, in `release` or where the loss communicates.
        """
        ranks, done = self.ranks, None
        try:
            with self._context():
                full = gathered(params, ranks)  # first: what could fail on one process comes after what is collective
                done = clip(full, *_padded(rows.batch, rows.mask_B, rows.size, ranks))
        finally:
            if done is None and ranks.independent:
                sum_over(ranks, _zeros(params), params, failed=True)
        return done

    def _context(self) -> Any:
        return process_context(self.ranks.group, independent=self.ranks.independent)

    def release(
        self, mechanism: Mechanism, clipped: ClippedSum, params: Params, noise_state: Any, key: Key
    ) -> tuple[dict[str, Tensor], Any]:
        """The sum over all processes with noise.

        Each process adds the noise of some rows to its own term, before the terms are added up: the noise is drawn
        once by all together, and nothing more is sent. Parts of sharded parameters get theirs after the sum.

        Raises:
            StepAborted: another process failed, here or before.
        """
        ranks, add_share = self.ranks, mechanism.add_share
        if add_share is None or any(is_dtensor(param) for param in params.values()):
            with self._context():
                return mechanism.add(replace(clipped, sums=sum_over(ranks, clipped.sums, params)), noise_state, key)

        def add_noise(terms: Params) -> int:
            windows = noise_windows({name: term.shape for name, term in terms.items()}, ranks.rank, ranks.size)
            add_share(replace(clipped, sums=terms), windows, key)
            return num_bands(windows)

        with self._context():
            return sum_over(ranks, clipped.sums, params, add_noise=add_noise), noise_state

    def digest(self, released: Params, params: Params, mark: Tensor) -> tuple[str, bool]:
        with self._context():
            return digest_of_all(released, self.ranks, mark)

    def confirm(self, write: Callable[[], None]) -> None:
        """Run an action on each process, and continue only after all processes have finished it.

        Raises:
            StepAborted: another process failed. Whatever `write` raises.
        """
        all_or_raise(write, self.ranks, StepAborted("Another process could not go on. Nothing was released."))


def _zeros(params: Params) -> dict[str, Tensor]:
    return {n: torch.zeros_like(local(param), dtype=accumulation_dtype(param.dtype)) for n, param in params.items()}


def _padded(batch: Batch, mask_B: Tensor | None, size: int, ranks: Ranks) -> tuple[Batch, Tensor | None]:
    """The batch with rows of weight zero up to the size that all processes run.

    The rows repeat the first one; a process without records runs the public dummy row.
    """
    missing = size - batch_size(batch)
    if missing <= 0:
        return batch, mask_B
    if not batch_size(batch):
        batch = _dummy_of(batch, ranks)
    real_B = torch.ones(size - missing, dtype=torch.bool) if mask_B is None else mask_B
    return pad_rows(batch, size), torch.cat([real_B, real_B.new_zeros(missing)])


def _dummy_of(batch: Batch, ranks: Ranks) -> Batch:
    """The public row that a process without records runs.

    Raises:
        InvalidArgument: it does not look like a row of the batch.
    """
    if ranks.dummy is None:
        return tree_map(lambda leaf: leaf.new_zeros((1, *leaf.shape[1:])), batch)
    same = pytree.tree_structure(ranks.dummy) == pytree.tree_structure(batch)
    if not same or batch_size(ranks.dummy) != 1 or signature(ranks.dummy) != signature(batch):
        raise InvalidArgument(
            f"Expected dummy to be a batch of one row like those of the data, {signature(batch)}, got "
            f"{batch_size(ranks.dummy)} rows of {signature(ranks.dummy)}."
        )
    return pytree.tree_map(lambda row, leaf: row.to(leaf.device), ranks.dummy, batch)
