"""Torch functions with special treatment: they give numbers to Python, check, convert, transpose or write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# They give numbers of tensors to Python without an operation that shows it.
READING = frozenset(
    (
        Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__, Tensor.untyped_storage,
        Tensor.storage, Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__,
    )
)  # fmt: skip
SIZES = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.__len__, Tensor.numel, Tensor.nelement))  # type: ignore[attr-defined]  # descriptors
NESTED = frozenset((torch.autograd.grad, torch.autograd.backward))
HOOKS = frozenset((Tensor.register_hook, Tensor.register_post_accumulate_grad_hook))
# They put a hook on a tensor or on a node of its graph, or give the node away.
_ACCESSORS: tuple[Any, ...] = (Tensor.grad_fn, Tensor._backward_hooks)
HOOKING = (
    HOOKS
    | {Tensor.retain_grad, Tensor._backward_hooks.__set__}  # type: ignore[union-attr]  # of the class, it is a descriptor
    | {accessor.__get__ for accessor in _ACCESSORS}
)
CHECKING = frozenset((F.one_hot,))
CONVERTING = frozenset((Tensor.to, Tensor.type_as))
WATCHED = CHECKING | READING | SIZES
# The gradient of what these give is that of their argument, in another order or shape.
TRANSPOSING = frozenset((Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__))  # type: ignore[attr-defined]  # descriptors
RESHAPING = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "to",
        "type",
        "float",
        "double",
        "half",
        "bfloat16",
    )
    if hasattr(owner, name)
)
# `x + b`, `b + x`, `x += b` and `torch.add` are one kind: compiled code calls them by other names.
_KINDS = {
    form.format(kind): kind
    for kind in ("add", "sub", "mul", "truediv", "matmul")
    for form in ("__{}__", "__r{}__", "__i{}__", "{}_")
}
_IN_PLACE = (
    frozenset(name for name in dir(Tensor) if name in _KINDS or (name.endswith("_") and not name.endswith("__")))
    - frozenset(f"__{kind}__" for kind in ("add", "sub", "mul", "truediv", "matmul"))
    - frozenset(f"__r{kind}__" for kind in ("add", "sub", "mul", "truediv", "matmul"))
    - {"requires_grad_"}
)


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function, for messages and tables."""
    return getattr(func, "__name__", str(func))


def kind_of(func: Callable[..., Any]) -> str:
    """Name of an operation, the same for all forms in which it can be called."""
    name = name_of(func)
    return _KINDS.get(name, name)


def writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a function writes into its first argument."""
    return name_of(func) in _IN_PLACE or kwargs.get("inplace") is True or func is Tensor.__setitem__


class _Reader(Protocol):
    """Receiver of notes about values that Python was given."""

    def note_read(self, what: str, value: Tensor, result: object) -> None:
        """Note that Python was given numbers of a tensor."""
        ...

    def note_shape_read(self, value: Tensor) -> None:
        """Note that Python was given the shape of a tensor."""
        ...


class PythonValues(TorchFunctionMode):
    """Mode that notes what Python is given, where no tracker is active."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__()
        self.reader = reader

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in READING and isinstance(args[0], Tensor):
            self.reader.note_read(func.__name__, args[0], result)
        return result
