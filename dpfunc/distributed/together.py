"""Parts of a step that are collective: all processes take them, or none does.

A process that fails must still inform the others, or they would wait for it: each function takes part in the exchange
before it lets the error of its caller pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc.distributed.handshake import Card, agree
from dpfunc.distributed.ranks import Ranks, any_rank
from dpfunc.distributed.reduce import sum_over
from dpfunc.engines.lockstep import in_company
from dpfunc.engines.sums import accumulation_dtype
from dpfunc.errors import InvalidArgument, StepAborted
from dpfunc.sharding import local
from dpfunc.tree import batch_size, pad_rows, signature, tree_map
from dpfunc.types import Batch, ClippedSum, Params, Unreleased


def checked(check: Callable[[], Card], step: int, ranks: Ranks) -> int:
    """The handshake: all processes pass their own check and agree with each other.

    Args:
        check: raises, or says what this process will do. step: for the others, should it raise. ranks: of the run.

    Returns:
        The largest number of records that a process has.

    Raises:
        StepAborted, RankMismatch: see `handshake.agree`. Whatever `check` raises.
    """
    own, largest = Card(step, 0, 1, 0, 0, 0, 0, 0), 0
    try:
        own = check()
    finally:
        largest = agree(own, ranks)
    return largest


def padded(batch: Batch, mask_B: Tensor, size: int, ranks: Ranks) -> tuple[Batch, Tensor]:
    """The batch with rows of weight zero up to the size that all processes run.

    The rows repeat the first one; a process without records runs the public dummy row.
    """
    missing = size - batch_size(batch)
    if missing <= 0:
        return batch, mask_B
    if not batch_size(batch):
        batch = dummy_of(batch, ranks)
    return pad_rows(batch, size), torch.cat([mask_B, mask_B.new_zeros(missing)])


def dummy_of(batch: Batch, ranks: Ranks) -> Batch:
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


def summed(
    compute: Callable[[], tuple[ClippedSum, Unreleased]], params: Params, ranks: Ranks
) -> tuple[ClippedSum, Unreleased]:
    """Clipped sum of all processes, and the unreleased values of this one.

    Where the loss communicates, a process that failed cannot tell the others, who wait for it inside of the model:
    their timeout ends the job.

    Args:
        compute: the clipped sum of this process. params: as the caller holds them. ranks: of the run.

    Raises:
        StepAborted: another process failed. Whatever `compute` raises.
    """
    done = None
    try:
        with in_company(ranks.group, independent=ranks.independent):
            done = compute()
    finally:
        if done is None and ranks.independent:
            nothing = {n: torch.zeros_like(local(p), dtype=accumulation_dtype(p.dtype)) for n, p in params.items()}
            sum_over(ranks, nothing, params, failed=True)
    clipped, unreleased = done
    return ClippedSum(sum_over(ranks, clipped.sums, params), clipped.group_of, clipped.sensitivities), unreleased


def confirmed(write: Callable[[], None], ranks: Ranks) -> None:
    """Run an action on each process, and continue only after all processes have finished it.

    Raises:
        StepAborted: another process failed. Whatever `write` raises.
    """
    written, failed = False, True
    try:
        write()
        written = True
    finally:
        failed = any_rank(not written, ranks)
    if failed:
        raise StepAborted(
            "Another process could not write this step into its journal, or may not repeat it; its own error says why. "
            "Nothing was released."
        )
