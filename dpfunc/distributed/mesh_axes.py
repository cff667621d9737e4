"""Dimensions of a parameter's mesh, by kind: over processes with other records (data) or with the same (tensor)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.dtensor import is_dtensor, shard_dims
from dpfunc.distributed.ranks import Ranks


def axes_over(param: Tensor, ranks: Ranks, *, tensor: bool = False) -> tuple[int, ...]:
    """The dimensions of a DTensor's mesh whose processes belong to the data group, or to the tensor group.

    Args:
        param: any tensor; one that is no DTensor has none. ranks: of the run. tensor: those of the tensor group.
    """
    group = ranks.tensor_group if tensor else ranks.group
    if group is None or not is_dtensor(param):
        return ()
    mesh: Any = param.device_mesh
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    members = set(dist.get_process_group_ranks(group))

    def belongs(axis: int) -> bool:
        processes = set(dist.get_process_group_ranks(mesh.get_group(axis)))
        if len(processes) == 1:  # this process alone is in both groups: the name of the dimension decides
            return (names[axis] in ranks.tensor_axes) == tensor
        return processes <= members

    return tuple(axis for axis in range(mesh.ndim) if belongs(axis))


def is_sharded_over(param: Tensor, ranks: Ranks, *, tensor: bool = False) -> bool:
    """True if a parameter is sharded over the data group, or with `tensor` over the tensor group."""
    return bool(set(axes_over(param, ranks, tensor=tensor)) & shard_dims(param).keys())
