"""Tables of torch functions with special treatment in a tracker: they read, check, convert, transpose or write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.tracing.python_values import READING, SIZES, name_of

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
        "view", "reshape", "flatten", "squeeze", "unsqueeze", "to", "type", "float", "double", "half", "bfloat16",
    )
    if hasattr(owner, name)
)  # fmt: skip
# `x + b`, `b + x`, `x += b` and `torch.add` are one kind: compiled code calls them by other names.
_KINDS = {
    form.format(kind): kind
    for kind in ("add", "sub", "mul", "truediv", "matmul")
    for form in ("__{}__", "__r{}__", "__i{}__", "{}_")
}
_IN_PLACE = frozenset(
    name
    for name in dir(Tensor)
    if (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name in _KINDS)
) - {"requires_grad_"}


def kind_of(func: Callable[..., Any]) -> str:
    """Name of an operation, the same for all forms in which it can be called."""
    name = name_of(func)
    return _KINDS.get(name, name)


def writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a function writes into its first argument."""
    return name_of(func) in _IN_PLACE or kwargs.get("inplace") is True or func is Tensor.__setitem__
