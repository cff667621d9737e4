"""Layout of a run, on which the rounding of its sums depends: number of processes, shards and machine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dpfunc._utils.dtensor import is_dtensor
from dpfunc.distributed.object_collectives import digest_over_ranks, rank_and_size
from dpfunc.distributed.ranks import Ranks
from dpfunc.types import Params

DIGESTS = ("all machines", "parts of parameters")
"""Entries of a layout that a reader cannot understand: others come first in messages."""


def layout(params: Params, ranks: Ranks | None) -> dict[str, Any]:
    """The layout of a run as JSON values; runs of equal layouts repeat their steps bit for bit.

    Args:
        params: as the step gets them. ranks: as the step gets them.

    It does not contain what the caller must keep the same when resuming: engine, microbatch size.

    >>> layout({"w": torch.zeros(2)}, None)["data processes"]
    1
    """
    alone = rank_and_size(ranks)[1] == 1
    return {
        "data processes": 1 if ranks is None else ranks.size,
        "tensor processes": rank_and_size(ranks)[1] // (1 if ranks is None else ranks.size),
        "backend": None if ranks is None or alone else str(dist.get_backend(ranks.group)),
        DIGESTS[1]: digest_over_ranks(str([_layout(p) for p in params.values()]), None),
        "machine": _machine(params),
        DIGESTS[0]: digest_over_ranks(_machine(params), None if alone else ranks),
    }


def _layout(param: torch.Tensor) -> str:
    if not is_dtensor(param):
        return "whole"
    spec: Any = param
    return f"{spec.placements} on {tuple(spec.device_mesh.shape)}"


def _machine(params: Params) -> str:
    kinds = sorted({p.device.type for p in params.values()})
    words = [f"torch {torch.__version__}"]
    if "cpu" in kinds:
        words.append(f"cpu {torch.backends.cpu.get_cpu_capability()} with {torch.get_num_threads()} threads")
    if "cuda" in kinds:
        words.append(torch.cuda.get_device_name())
    return ", ".join([*words, *(kind for kind in kinds if kind not in ("cpu", "cuda"))])
