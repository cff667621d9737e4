"""Communication between ranks inside of a loss: it would mix the records of different ranks.

Under vmap it is worse: a functional collective of a batched tensor returns its input, without an error. What torch's
own wrappers communicate (DTensor, FSDP2) are parts of parameters, or parts of one record's activations: allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpfunc._utils.dtensor import is_dtensor
from dpfunc.errors import UnsupportedModel

_NAMESPACES = ("_c10d_functional", "c10d")
# These only wait for, or wrap, the result of another one.
_WAITING = ("wait_tensor", "_wrap_tensor_autograd")
# Code between the one that wants to communicate and the operation.
_PLUMBING = (
    "torch._ops", "torch._library", "torch._compile", "torch._dynamo", "torch._functorch", "torch._tensor",
    "torch.autograd", "torch.overrides", "torch.utils", "torch.distributed._functional_collectives",
    "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.distributed.nn",
    "deepspeed.comm", "deepspeed.utils", "contextlib", "functools", "typing_extensions", "warnings",
    "dpfunc.engines",
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


def initialized() -> bool:
    """True if torch.distributed runs, so that there may be other ranks to communicate with."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _collective(func: object) -> str | None:
    """The name of a collective operation, or None."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    namespace, _, name = str(func).partition(".")
    communicates = namespace.startswith(_NAMESPACES) and not name.startswith(_WAITING)
    return f"{namespace}.{name}" if communicates else None


def _within(module: str, prefixes: Sequence[str]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _caller() -> tuple[str, int]:
    """Module and line of the code that calls a collective."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        if not _within(module, _PLUMBING):
            return module, frame.f_lineno
        frame = frame.f_back
    return "?", 0


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


def communicates(func: object) -> bool:
    """True if an operation is a collective: it exchanges data between ranks.

    >>> communicates(torch.ops.aten.add.Tensor)
    False
    """
    return _collective(func) is not None


def check_own(func: object) -> None:
    """Check that an operation that communicates was called by torch's own wrappers.

    Raises:
        UnsupportedModel: by the loss.
    """
    name = _collective(func)
    if name is not None:
        module, line = _caller()
        if _within(module, tuple(_SPLITTING)) or not _within(module, _TORCH_WRAPPERS):
            raise _refusal(name, module, line)


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "embedding", "convolution")
)


def note_meshes(func: object, args: Sequence[Any], meshes: list[Any]) -> None:
    """Note on which meshes a layer is split that an operation computes."""
    if getattr(func, "overloadpacket", None) in _PRODUCTS:
        for value in args:
            if is_dtensor(value) and value.device_mesh not in meshes:
                meshes.append(value.device_mesh)


@dataclass(eq=False)
class CollectiveRecorder(TorchDispatchMode):
    """Refuses collectives that are not torch's own, and notes on which meshes layers are split.

    Args:
        meshes: of the DTensors that are computed with.
    """

    meshes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, to leave this mode out of what rows alone do not compile anyway."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        check_own(func)
        note_meshes(func, args, self.meshes)
        return func(*args, **(kwargs or {}))


@contextmanager
def own_only(recorder: CollectiveRecorder | None = None) -> Iterator[None]:
    """Inside, a loss that communicates by itself is an error. No effect without ranks."""
    if not initialized():
        yield
        return
    with CollectiveRecorder() if recorder is None else recorder:
        yield
