"""Communication between ranks inside of a loss, which would mix the records of ranks: refused.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

What torch's own wrappers communicate (DTensor, FSDP2), parts of parameters or of one record's activations, is allowed.
Ranks that hold parts of the same layers have the same records, and must agree in losses and gradients of what all hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpfunc._utils.parts import is_dtensor
from dpfunc._utils.processes import initialized
from dpfunc._utils.validation import shorten
from dpfunc.engines._numerics import COARSE, TOLERANCES, lengths
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Params

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Of the largest gradient: what lies below is rounding.
_NEGLIGIBLE = 1e-6
_NAMESPACES = ("_c10d_functional", "c10d")
# These only wait for, or wrap, the result of another one.
_WAITING = ("wait_tensor", "_wrap_tensor_autograd")
# Code between the one that wants to communicate and the operation.
_PLUMBING = (
    "torch._ops", "torch._library", "torch._compile", "torch._dynamo", "torch._functorch", "torch._tensor",
    "torch.autograd", "torch.overrides", "torch.utils", "torch.distributed._functional_collectives",
    "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.distributed.nn",
    "deepspeed.comm", "deepspeed.utils", "contextlib", "functools", "typing_extensions", "warnings",
    "dpfunc.engines", "dpfunc._utils.processes",
)  # fmt: skip
_TORCH_WRAPPERS = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed._tensor",
    "deepspeed.runtime.zero",
)
# Parts of torch that split a record over ranks in a way that no rule follows.
_SPLITTING = {
    "torch.distributed.tensor.experimental": "context parallelism splits the positions of a record",
    "torch.distributed.pipelining": "pipeline parallelism splits the layers",
}


def _within(module: str, prefixes: Sequence[str]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _caller() -> tuple[str, int]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _within(str(frame.f_globals.get("__name__", "?")), _PLUMBING):
        frame = frame.f_back
    return ("?", 0) if frame is None else (str(frame.f_globals.get("__name__", "?")), frame.f_lineno)


def _refusal(name: str, module: str, line: int) -> UnsupportedModel:
    for prefix, what in _SPLITTING.items():
        if _within(module, (prefix,)):
            return UnsupportedModel(
                f"The loss communicates between ranks ({name}, called in {module}): {what} over ranks, and "
                "per-sample gradients are not put together again. Use data parallelism, FSDP2 or tensor parallelism "
                "(parallelize_module with ColwiseParallel and RowwiseParallel)."
            )
    return UnsupportedModel(
        f"The loss communicates between ranks ({name}, called in {module}, line {line}): the loss of a record would "
        "depend on records of other ranks, which breaks the privacy proof. Compute the loss of each record from its "
        "own row; what is summed over ranks is summed after clipping (ranks=... of dpfunc.make_dp_step). Tensor "
        "parallel layers go through torch's parallelize_module."
    )


def _check_own(func: object) -> None:
    """Check that an operation that communicates was called by torch's own wrappers, not by the loss."""
    namespace, _, name = str(func).partition(".")
    of_torch = isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    if of_torch and namespace.startswith(_NAMESPACES) and not name.startswith(_WAITING):
        module, line = _caller()
        if _within(module, tuple(_SPLITTING)) or not _within(module, _TORCH_WRAPPERS):
            raise _refusal(f"{namespace}.{name}", module, line)


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "embedding", "convolution")
)


@dataclass(eq=False)
class CollectiveRecorder(TorchDispatchMode):
    """Refuses collectives that are not torch's own, and notes on which meshes layers are split."""

    meshes: list[DeviceMesh] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, to leave this mode out of what the loop does not compile anyway."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        _check_own(func)
        if getattr(func, "overloadpacket", None) in _PRODUCTS:  # an operation of a layer
            for value in args:
                if is_dtensor(value) and value.device_mesh not in self.meshes:
                    self.meshes.append(value.device_mesh)
        return func(*args, **(kwargs or {}))


def own_only(recorder: CollectiveRecorder | None = None) -> AbstractContextManager[Any]:
    """Context in which a loss that communicates by itself is an error. It has no effect without ranks."""
    return (recorder or CollectiveRecorder()) if initialized() else nullcontext()


def check_replicated(
    losses_B: Tensor, grads: Mapping[str, Tensor], params: Params, meshes: Sequence[DeviceMesh]
) -> None:
    """Compare, over the ranks of each mesh, the losses and the gradients of parameters that every rank holds.

    A parameter that is not split, but is applied to a part of the activations (a norm over this rank's own heads), has
    a part of its gradient on each rank: its norm would be wrong, and the ranks would drift apart.
    """
    if not meshes or not len(losses_B):
        return
    tolerance = max(TOLERANCES.get(dtype, COARSE) for dtype in (losses_B.dtype, *(p.dtype for p in params.values())))
    scale = max(float(_size(grad)) for grad in grads.values())
    for mesh in meshes:
        for dim in range(mesh.ndim):
            replicated = {name: grad for name, grad in grads.items() if not _split(params[name], mesh, dim)}
            _refuse_differing(_differing({"": losses_B, **replicated}, mesh.get_group(dim), tolerance, scale))


def _refuse_differing(names: Sequence[str]) -> None:
    """Refuse values that differ between ranks: gradients by parameter name; the empty name stands for the losses."""
    if "" in names:
        raise UnsupportedModel(
            "The loss of a record differs between ranks that hold parts of the same layers: they have "
            "different records, or parts of one (context parallelism). Give all of them the same records."
        )
    if names:
        raise UnsupportedModel(
            f"The parameters {shorten(names)} are on every rank, but their gradients differ: each rank "
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
