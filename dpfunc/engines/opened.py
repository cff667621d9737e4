"""Functions of torch that are written in Python, with their parts seen by the mode that they are called in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


@functools.cache
def without_dispatch(function: Any) -> Callable[..., Any]:
    """A private copy of a function written in Python that does not dispatch, so that modes get its parts.

    The function itself is not touched.
    """
    quiet = {
        name: (lambda *args, **kwargs: False) for name in function.__globals__ if name.startswith("has_torch_function")
    }
    inside = {**function.__globals__, **quiet}
    copy = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    return functools.partial(copy, **(function.__kwdefaults__ or {}))


def opened(func: Any) -> Callable[..., Any] | None:
    """The same function that does not ask modes, so that its parts do; None for those that are one operation.

    >>> import torch
    >>> opened(torch.nn.functional.dropout) is None, opened(torch.add) is None
    (False, True)
    """
    of_torch = type(func) is FunctionType and (func.__module__ or "").startswith("torch.")
    return without_dispatch(func) if of_torch and _asks_modes(func) else None


@functools.cache
def _asks_modes(func: FunctionType) -> bool:
    asks = any(name.startswith("has_torch_function") for name in func.__code__.co_names)
    return asks and "__class__" not in func.__code__.co_freevars  # a method that calls `super()` comes back as itself
