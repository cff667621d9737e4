"""Checks that ranks with the same records agree: in losses, and in gradients of what all hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.validation import shorten
from dpfunc.engines.numerics import COARSE, TOLERANCES, lengths
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Params

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Of the largest gradient: what lies below is rounding.
_NEGLIGIBLE = 1e-6


def check_replicated(
    losses_B: Tensor, grads: Mapping[str, Tensor], params: Params, meshes: Sequence[DeviceMesh]
) -> None:
    """Compare, over the ranks of each mesh, the losses and the gradients of what all of its ranks hold.

    A parameter that is not split, but is applied to a part of the activations (a norm over this rank's own heads), has
    a part of its gradient on each rank: its norm would be wrong, and the ranks would drift apart.

    Args:
        losses_B, grads: of single samples; grads (B, *shape) are local. meshes: on which layers are split.

    Raises:
        UnsupportedModel: they differ; on all ranks.
    """
    if not meshes or not len(losses_B):
        return
    tolerance = max(TOLERANCES.get(dtype, COARSE) for dtype in (losses_B.dtype, *(p.dtype for p in params.values())))
    scale = max(float(_size(grad)) for grad in grads.values())
    for mesh, dim in _axes(meshes):
        replicated = {name: grad for name, grad in grads.items() if not _split(params[name], mesh, dim)}
        _refuse(_differing({"": losses_B, **replicated}, mesh.get_group(dim), tolerance, scale))


def _axes(meshes: Sequence[DeviceMesh]) -> list[tuple[DeviceMesh, int]]:
    """Each axis of each mesh."""
    return [(mesh, dim) for mesh in meshes for dim in range(mesh.ndim)]


def _refuse(differing: Sequence[str]) -> None:
    """Refuse a step in which ranks differ in the losses (named "") or in gradients of these parameters."""
    if "" in differing:
        raise UnsupportedModel(
            "The loss of a record differs between ranks that hold parts of the same layers: they have "
            "different records, or parts of one (context parallelism). Give all of them the same records."
        )
    if differing:
        raise UnsupportedModel(
            f"The parameters {shorten(differing)} are on every rank, but their gradients differ: each rank "
            "applies them to a part of the activations, so each has a part of the gradient. Apply them where "
            "activations are whole, split them with parallelize_module, or leave them out."
        )


def _split(param: Tensor, mesh: DeviceMesh, dim: int) -> bool:
    if not is_dtensor(param):
        return False
    if param.device_mesh == mesh:
        return not param.placements[dim].is_replicate()
    return any(not placement.is_replicate() for placement in param.placements)


def _size(grads_B: Tensor) -> Tensor:
    return torch.nan_to_num(lengths(grads_B.reshape(1, -1), 1))[0]


def _differing(tensors: Mapping[str, Tensor], group: dist.ProcessGroup, tolerance: float, scale: float) -> list[str]:
    flags = []
    for tensor in tensors.values():
        mean = tensor.clone()
        dist.all_reduce(mean, group=group)
        mean = mean / dist.get_world_size(group)
        flags.append(_size(tensor - mean) > tolerance * _size(mean) + _NEGLIGIBLE * scale)
    counts = torch.stack(flags).to(torch.float32)
    dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
    return [name for name, count in zip(tensors, counts.tolist(), strict=True) if count]
