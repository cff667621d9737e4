"""Processes compare step, plan and parameters before a step, and the release after it; if they differ, all raise.

May import: its folder, lora and below. Privacy depends on it: yes.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc._utils.digests import checksum, digest, in_hex
from dpfunc._utils.parts import is_dtensor, shard_dims, window
from dpfunc.batches import batch_size, check_finite, digest_and_mark, pad_rows, refuse_sums, signature, tree_map
from dpfunc.distributed._object_collectives import any_rank, gathered_rows
from dpfunc.distributed._reduce import check_placements, in_step
from dpfunc.distributed.ranks import Ranks, is_sharded_over
from dpfunc.errors import InvalidArgument, RankMismatch, StepAborted
from dpfunc.types import Batch, Params


class RankSummary(NamedTuple):
    """Description of a process, compared by all before a step, mostly digests. `num_samples` stays among them."""

    step: int = 0
    num_samples: int = 0
    failed: int = 0  # it cannot take the step
    run: int = 0  # plan, key, ledger and settings
    rows: int = 0  # shapes of a row
    data: int = 0  # the batch itself, and its mask
    params: int = 0  # equal on all processes of the data group
    shared_params: int = 0  # equal on all of the tensor group
    part: int = 0  # positions of this process's shards over the data group
    replica: int = 0  # their values
    prepared: int = 0  # what the engine has learnt of the loss, for these shapes of a row; 0 if nothing


UNABLE = RankSummary(failed=1)
_SPOILED, _DIFFERENT = -1, -2  # in place of a digest, which is not negative
_SAME_RECORDS = (
    "Processes that hold parts of the same parameters need the same records, plan.batches(state, ranks), and the same "
    "mask_B."
)
# Advice for the error message, for each field of `RankSummary` that must agree.
_ADVICE = {
    "step": "All processes take every step, also when they have no records.",
    "run": (
        "Plan, key, ledger, engine, microbatch_size, journal, versions of dpfunc or torch, or other settings differ "
        "(all pass a journal, one writes it). The usual mistake: each process made a key of its own. Use "
        "dpfunc.distributed.shared_key(ranks), and build the plan from the same numbers."
    ),
    "params": (
        "Parameters that all processes should hold alike differ in at least one bit. Start from the same "
        "initialisation, update every replica in the same way, and load the same checkpoint."
    ),
    "shared_params": (
        "Parameters that processes with the same records hold alike differ in at least one bit. Start from the same "
        "initialisation."
    ),
    "rows": (
        "Rows of different shapes run different communication inside of a sharded model. Pad to the same length on all "
        "processes."
    ),
    "prepared": (
        "The engine has learnt other facts of the loss from made-up rows of the same shape. Code of the loss differs, "
        "or asks where it runs (rank, host, environment, files). Give all processes the same loss."
    ),
    "data": _SAME_RECORDS,
    "num_samples": _SAME_RECORDS,
}
_EQUAL_OVER_DATA_GROUP = ("step", "run", "params")
_EQUAL_OVER_TENSOR_GROUP = ("step", "run", "shared_params", "rows", "data", "num_samples")


def summarize(*, step: int, rows: "Rows", params: Params, run: str, prepared: str, ranks: Ranks) -> RankSummary:
    """Summary of a process that is able to take the step; `run` describes all else that must be equal on all.

    `prepared` describes what the engine has learnt of the loss, which must be equal where rows have the same shape.
    """
    check_finite(params)
    check_placements(params, ranks)
    batch = rows.batch
    _dummy_of(batch, ranks)
    mask = "" if rows.mask_B is None else checksum([("mask_B", rows.mask_B)])  # on a device of its own
    data = {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(batch)}
    placements = [(name, tuple(p.shape), p.dtype, shard_dims(p)) for name, p in params.items()]
    replicated = _held_by_all(params, ranks)
    sharded = {name: p for name, p in params.items() if name not in replicated}
    tensor_parallel = ranks.tensor_group is not None
    return RankSummary(
        step=step,
        num_samples=batch_size(batch),
        run=digest(f"{run}{placements}"),
        rows=digest(str((list(data), signature(batch)))),
        data=digest(f"{checksum(data.items())}{mask}") if tensor_parallel else 0,
        params=checksum(replicated.items()),
        shared_params=checksum(_held_by_all(params, ranks, tensor=True).items()) if tensor_parallel else 0,
        part=digest(str([(name, window(p, name)) for name, p in sharded.items()])),
        replica=checksum(sharded.items()),
        prepared=digest(prepared) if prepared else 0,
    )


def _held_by_all(params: Params, ranks: Ranks, tensor: bool = False) -> Params:
    """Parameters that each process of the data group, or of the tensor group, holds alike."""
    return {name: p for name, p in params.items() if not is_sharded_over(p, ranks, tensor=tensor)}


def agree(own: RankSummary, ranks: Ranks) -> int:
    """Check that all processes can take this step and agree about it: the largest number of records that one has."""
    tables = [[RankSummary(*row) for row in gathered_rows(own, group, ranks.device)] for group in ranks.groups]
    failed = any(row.failed for table in tables for row in table)
    differing = _differing(tables, ranks)
    differs = bool(differing)
    if ranks.tensor_group is not None:  # all processes must know what one group found
        failed, differs = any_rank(failed, ranks), any_rank(differs, ranks)
    if own.failed:
        return 0  # the caller's own error is on its way
    if failed:
        raise StepAborted(_failure_message(tables[0], own.step))
    if differs:
        raise RankMismatch(_mismatch_message(differing, own.step))
    return max(row.num_samples for row in tables[0])


def _differing(tables: list[list[RankSummary]], ranks: Ranks) -> list[tuple[str, list[int]]]:
    """Fields that must agree in a group and do not, with the values of all its processes; the data group is first."""
    over_data = _EQUAL_OVER_DATA_GROUP if ranks.independent else (*_EQUAL_OVER_DATA_GROUP, "rows")
    groups = zip(tables, (over_data, _EQUAL_OVER_TENSOR_GROUP), strict=False)
    compared = [(name, [getattr(row, name) for row in table]) for table, names in groups for name in names]
    differing = [(name, values) for name, values in compared if len(set(values)) > 1]
    parts = [(row.part, row.replica) for row in tables[0]]
    prepared = [(row.rows, row.prepared) for row in tables[0] if row.prepared]
    for name, pairs in (("params", parts), ("prepared", prepared)):
        if len(set(pairs)) > len(dict(pairs)):
            differing.append((name, [value for _, value in pairs]))
    return differing


def _failure_message(data_group: list[RankSummary], step: int) -> str:
    failed_ranks = [rank for rank, row in enumerate(data_group) if row.failed]
    named = f"Process {failed_ranks} of the data group" if failed_ranks else "Another process"
    return (
        f"{named} could not take step {step}; its own error says why. No process took the step, nothing was "
        "released and nothing was spent."
    )


def _mismatch_message(differing: list[tuple[str, list[int]]], step: int) -> str:
    if not differing:
        return f"Other processes of this run disagree at step {step}; they say about what. Nothing was spent."
    name, values = differing[0]
    # Digests of parameters and settings say which process differs; numbers about records are not put into messages.
    shown = values if name == "step" else [in_hex(value) for value in values]
    listed = "" if name in ("rows", "data", "num_samples") else f": {shown}, in the order of their ranks"
    return f"The processes of this run disagree about {name} at step {step}{listed}. {_ADVICE[name]} Nothing was spent."


class Rows(NamedTuple):
    """The rows of this process, the mask of the real ones (None: all), the largest number of rows of any process."""

    batch: Batch
    mask_B: Tensor | None
    size: int


def padded(rows: Rows, ranks: Ranks) -> tuple[Batch, Tensor | None]:
    """Rows and their mask, with rows of weight zero, the first one or the dummy, up to the number that all run."""
    batch, mask_B, size = rows
    missing = size - batch_size(batch)
    if missing <= 0:
        return batch, mask_B
    if not batch_size(batch):
        batch = _dummy_of(batch, ranks)
    real_B = torch.ones(size - missing, dtype=torch.bool, device="cpu") if mask_B is None else mask_B
    return pad_rows(batch, size), torch.cat([real_B, real_B.new_zeros(missing)])


def _dummy_of(batch: Batch, ranks: Ranks) -> Batch:
    """The public row that a process without records runs, which must look like a row of the batch."""
    if ranks.dummy is None:
        return tree_map(lambda leaf: leaf.new_zeros((1, *leaf.shape[1:])), batch)
    if (
        pytree.tree_structure(ranks.dummy) != pytree.tree_structure(batch)
        or batch_size(ranks.dummy) != 1
        or signature(ranks.dummy) != signature(batch)
    ):
        raise InvalidArgument(
            f"Expected dummy to be a batch of one row like those of the data, {signature(batch)}, got "
            f"{batch_size(ranks.dummy)} rows of {signature(ranks.dummy)}."
        )
    return pytree.tree_map(lambda row, leaf: row.to(leaf.device), ranks.dummy, batch)


def digest_of_all(released: Params, ranks: Ranks, mark: Tensor, *, one_draw: bool) -> tuple[str, bool]:
    """Digest of what all processes release, and the mark (0-d, bool) of this one; NaN in the sums of one stops all.

    What the processes of a group hold alike must be equal there: other noise on each has a mean with less, and the same
    noise on other sums a difference with none. Whole sums with `one_draw` of noise by all together come to all of the
    data group in one message. An error is raised after the last message, and not on all: the caller shares it.
    """
    with in_step(ranks):
        own, names, marked = digest_and_mark(released, None, mark)
        own = _SPOILED if names else own
        parts = any(map(is_dtensor, released.values()))
        for group in ranks.groups[1:] if one_draw and not parts else ranks.groups:
            alike = _held_by_all(released, ranks, tensor=group is not ranks.group)
            rows = gathered_rows([own, checksum(alike.items()) if parts else own], group, ranks.device)
            digests = [number for number, _ in rows]
            own = min(digests)
            if own >= 0 and len({number for _, number in rows}) > 1:
                own = _DIFFERENT
            elif own >= 0 and len(set(digests)) > 1:
                own = digest(str(digests))
    if own == _SPOILED:
        refuse_sums(names)
    if own == _DIFFERENT:
        raise RankMismatch(
            "The processes of this run would release different values of what they hold alike: other noise on each, "
            "whose mean has less, or the same noise on other sums, whose difference has none. Noise of your own must "
            "be a function of turn.key; all machines need the same version of numpy; and parts of a model the same "
            "records, mask_B and loss. Nothing was released and nothing was spent."
        )
    return in_hex(own), marked
