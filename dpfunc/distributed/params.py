"""Trained parameters of which each process holds a part, and with them gradients and the state of the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.validation import integer as whole_number
from dpfunc._utils.versions import check_sharding
from dpfunc.errors import InvalidArgument
from dpfunc.types import Params

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(params: Params, mesh: DeviceMesh, *, min_size: int = 1024) -> dict[str, Tensor]:
    """Parameters as DTensors: rows sharded over the processes of a mesh. A step's gradients are sharded replicated.

    At rest a process holds 1 / size of weights, of released gradients, and of the optimizer's state (a torch optimizer
    steps on DTensors). While a step lasts, `make_dp_step` gathers all of them once, and each sum once.

    Args:
        params: name -> full tensor, the same on all processes; those that are DTensors already stay as they are.
        mesh: of the processes that share the parameters, as for `fully_shard`: with one dimension rows are sharded over
            it; with two they are sharded over the second and replicated over the first (HSDP).
        min_size: numbers; smaller parameters, and those without dimensions, are replicated. They are DTensors too,
            since optimizers do not mix the two.

    Returns:
        name -> DTensor. Rows need not divide evenly.

    Raises:
        InvalidArgument: a mesh with more dimensions.

    Guarantees:
        the released gradients are those of one process (tests/distributed/test_params.py).
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    check_sharding()
    if mesh.ndim > 2:
        raise InvalidArgument(
            f"Expected a mesh with one dimension, or two (replicas, parts), got {mesh}. Take a part of it: mesh['dp']."
        )
    limit = whole_number("min_size", min_size, minimum=0)
    replicated: list[Any] = [Replicate()] * mesh.ndim
    sharded: list[Any] = [*replicated[1:], Shard(0)]

    def distribute(param: Tensor) -> Tensor:
        if is_dtensor(param):
            return param
        divisible = param.ndim > 0 and param.numel() >= limit
        return distribute_tensor(param.detach(), mesh, sharded if divisible else replicated, src_data_rank=None)

    return {name: distribute(param) for name, param in params.items()}


def unshard(params: Params) -> dict[str, Tensor]:
    """Parameters gathered on every process: to evaluate, to save, or for `dpfunc.with_params`. All must call it.

    Args:
        params: name -> tensor, DTensors or not.

    >>> import torch
    >>> unshard({"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """
    detached: dict[str, Any] = {name: param.detach() for name, param in params.items()}
    return {name: param.full_tensor() if is_dtensor(param) else param for name, param in detached.items()}
