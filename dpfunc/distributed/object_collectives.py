"""Small exchanges of a save or a load; without communication for a single process (`ranks=None`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.digests import checksum, digest
from dpfunc._utils.dtensor import shard_dims
from dpfunc._utils.validation import shorten
from dpfunc.distributed.agreement import gathered_rows
from dpfunc.distributed.ranks import Ranks, all_or_raise, any_rank
from dpfunc.errors import CheckpointError, InvalidArgument, RankMismatch

T = TypeVar("T")


def all_or_none(action: Callable[[], T], ranks: Ranks | None, what: str) -> T:
    """Run `action` on each process; return its result, or raise on all processes if it failed on any.

    Args:
        action: must not communicate. ranks: of the run. what: "The checkpoint was not ...", for the others' error.

    Raises:
        CheckpointError: it failed on another process. Whatever `action` raises.
    """
    return all_or_raise(action, ranks, CheckpointError(f"{what}: another process failed; its own error says why."))


def shared(value: bytes, ranks: Ranks | None) -> bytes:
    """The bytes of the process that writes, on all of them."""
    if ranks is None:
        return value
    own_bytes = value if ranks.writes else b""
    size = _summed(torch.tensor([len(own_bytes)], device=ranks.device), ranks)
    values = torch.zeros(int(size.item()), dtype=torch.int64, device=ranks.device)
    if ranks.writes:
        values.copy_(torch.tensor(list(own_bytes), dtype=torch.int64))
    return bytes(_summed(values, ranks).tolist())


def by_writer(action: Callable[[], object], ranks: Ranks | None, what: str) -> Any:
    """The JSON values that the process which writes gets from `action`, on all processes; or an error on all.

    Args:
        action: must not communicate. ranks: of the run. what: see `all_or_none`.
    """

    def own() -> bytes:
        return json.dumps(action()).encode() if ranks is None or ranks.writes else b""

    return json.loads(shared(all_or_none(own, ranks, what), ranks))


def _summed(values: Tensor, ranks: Ranks) -> Tensor:
    for group in ranks.groups:
        dist.all_reduce(values, group=group)
    return values


def check_agreement(texts: Mapping[str, str], tensors: Mapping[str, Tensor], ranks: Ranks | None) -> None:
    """Check that all processes agree, and that those with the same part of a tensor have the same numbers.

    Args:
        texts: name -> text that must agree. tensors: name -> tensor or DTensor. ranks: of the run.

    Raises:
        RankMismatch: on all processes.
    """
    if ranks is None:
        return
    shapes = str([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
    all_texts = {**texts, "names and shapes of tensors": shapes}
    _compare({name: (0, digest(text)) for name, text in all_texts.items()}, ranks)
    _compare({name: (_part(t), checksum([(name, t)])) for name, t in tensors.items()}, ranks)


def _part(tensor: Tensor) -> int:
    """Number that identifies this process's part of a tensor by its position in the mesh."""
    axes = shard_dims(tensor)
    coordinates = tensor.device_mesh.get_coordinate() if axes else []  # type: ignore[attr-defined]  # of a DTensor
    return digest(str([coordinates[axis] for axis in axes]))


def _compare(values: Mapping[str, tuple[int, int]], ranks: Ranks) -> None:
    differing: list[str] = []
    for group in ranks.groups:
        table = _gathered([number for pair in values.values() for number in pair], ranks, group)
        for index, name in enumerate(values):
            pairs = {(row[2 * index], row[2 * index + 1]) for row in table}
            if len(pairs) > len({part for part, _ in pairs}):
                differing.append(name)
    if any_rank(bool(differing), ranks):
        named = shorten(list(dict.fromkeys(differing))) or "something that others name"
        raise RankMismatch(
            f"The processes of this run disagree about {named}; no checkpoint was made. Each must pass the same "
            "directory, plan, state, data, parameters and optimizer state; a state is that after the last step, which "
            "all have taken. What is not sharded must be equal in every bit."
        )


def _gathered(row: list[int], ranks: Ranks, group: dist.ProcessGroup) -> list[list[int]]:
    return gathered_rows(torch.tensor(row, dtype=torch.int64, device=ranks.device), group)


def digest_over_ranks(text: str, ranks: Ranks | None) -> str:
    """Short digest of the texts of all processes, in the order of their ranks; the same on all."""
    value = digest(text)
    if ranks is not None:
        for group in ranks.groups:
            value = digest(str(_gathered([value], ranks, group)))
    return f"{value:016x}"


def rank_and_size(ranks: Ranks | None) -> tuple[int, int]:
    """Number of this process among all processes of the run, and how many there are."""
    if ranks is None:
        return 0, 1
    if ranks.tensor_group is None:
        return ranks.rank, ranks.size
    return (
        ranks.rank + ranks.size * dist.get_rank(ranks.tensor_group),
        ranks.size * dist.get_world_size(ranks.tensor_group),
    )


def joint_group(ranks: Ranks) -> dist.ProcessGroup:
    """One group of all processes of the run.

    Raises:
        InvalidArgument: with tensor parallelism, when other processes exist as well.
    """
    if ranks.tensor_group is None:
        return ranks.group
    if rank_and_size(ranks)[1] != dist.get_world_size():
        raise InvalidArgument(
            f"Expected the run to have all {dist.get_world_size()} processes of torch.distributed, got "
            f"{rank_and_size(ranks)[1]}. Start the processes of a run in a job of their own."
        )
    world = dist.group.WORLD
    return world if world is not None else ranks.group
