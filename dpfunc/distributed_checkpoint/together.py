"""The small exchanges of a save or a load. One process alone (`ranks=None`) has nobody to ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc.distributed.handshake import checksum, digest
from dpfunc.distributed.ranks import Ranks, any_rank
from dpfunc.distributed.reduce import axes_over
from dpfunc.errors import CheckpointError, InvalidArgument, RankMismatch
from dpfunc.sharding import shard_dims

T = TypeVar("T")


def all_or_none(action: Callable[[], T], ranks: Ranks | None, what: str) -> T:
    """What `action` gives, once it went well on all processes.

    Args:
        action: must not communicate. ranks: of the run. what: "The checkpoint was not ...", for the others' error.

    Raises:
        CheckpointError: it failed on another process. Whatever `action` raises.
    """
    failed, anywhere = True, False
    try:
        result = action()
        failed = False
    finally:
        anywhere = ranks is not None and any_rank(failed, ranks)
    if anywhere:
        raise CheckpointError(f"{what}: another process failed; its own error says why.")
    return result


def shared(value: bytes, ranks: Ranks | None) -> bytes:
    """The bytes of the process that writes, on all of them."""
    if ranks is None:
        return value
    mine = value if ranks.writes else b""
    size = _summed(torch.tensor([len(mine)], device=ranks.device), ranks)
    values = torch.zeros(int(size.item()), dtype=torch.int64, device=ranks.device)
    if ranks.writes:
        values.copy_(torch.tensor(list(mine), dtype=torch.int64))
    return bytes(_summed(values, ranks).tolist())


def _summed(values: Tensor, ranks: Ranks) -> Tensor:
    for group in ranks.groups:
        dist.all_reduce(values, group=group)
    return values


def agreed(said: Mapping[str, str], tensors: Mapping[str, Tensor], ranks: Ranks | None) -> None:
    """All processes say the same, and hold alike what they do not hold parts of.

    Args:
        said: what must agree, by name. ranks: of the run.
        tensors: compared where no two processes hold different parts.

    Raises:
        RankMismatch: on all processes.
    """
    if ranks is None:
        return
    differing: list[str] = []
    for group in ranks.groups:
        alike = [(name, t) for name, t in tensors.items() if not set(axes_over(t, group)) & shard_dims(t).keys()]
        names = [*said, "tensors"]
        table = _gathered([*(digest(text) for text in said.values()), checksum(alike)], ranks, group)
        differing += [name for name, column in zip(names, zip(*table, strict=True), strict=True) if len({*column}) > 1]
    if any_rank(bool(differing), ranks):
        named = ", ".join(dict.fromkeys(differing)) or "something that others name"
        raise RankMismatch(
            f"The processes of this run disagree about {named}; no checkpoint was made. Each must pass the same "
            "directory, plan, state, data, parameters and optimizer state; a state is that after the last step, which "
            "all have taken. Tensors that are not DTensors must be equal in every bit."
        )


def _gathered(row: list[int], ranks: Ranks, group: dist.ProcessGroup) -> list[list[int]]:
    own = torch.tensor(row, dtype=torch.int64, device=ranks.device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    table: list[list[int]] = torch.stack(rows).tolist()
    return table


def everyone(said: str, ranks: Ranks | None) -> str:
    """A short digest of what all processes say, in the order of their ranks; the same on all."""
    value = digest(said)
    if ranks is not None:
        for group in ranks.groups:
            value = digest(str(_gathered([value], ranks, group)))
    return f"{value:016x}"


def place(ranks: Ranks | None) -> tuple[int, int]:
    """The number of this process among all of the run, and how many they are."""
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
    if place(ranks)[1] != dist.get_world_size():
        raise InvalidArgument(
            f"Expected the run to have all {dist.get_world_size()} processes of torch.distributed, got "
            f"{place(ranks)[1]}. Start the processes of a run in a job of their own."
        )
    world = dist.group.WORLD
    return world if world is not None else ranks.group
