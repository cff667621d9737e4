"""Functions of torch that are written in Python, with their parts seen by the mode that they are called in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpfunc.engines.rules.composite import without_dispatch

_DISPATCHES: dict[Any, bool] = {}


def opened(func: Any) -> Callable[..., Any] | None:
    """The same function that does not ask modes, so that its parts do; None for those that are one operation.

    >>> import torch
    >>> opened(torch.nn.functional.dropout) is None, opened(torch.add) is None
    (False, True)
    """
    if type(func) is not type(opened) or not (func.__module__ or "").startswith("torch.") or not _dispatches(func):
        return None
    return without_dispatch(func)


def _dispatches(func: Any) -> bool:
    found = _DISPATCHES.get(func)
    if found is None:
        code = func.__code__  # a method that calls `super()` comes back as itself
        asks = any(name.startswith("has_torch_function") for name in code.co_names)
        found = _DISPATCHES[func] = asks and "__class__" not in code.co_freevars
    return found
