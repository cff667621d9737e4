"""Python values that a loss keeps from call to call: what it reaches by closures, attributes and global names.

Only compared where a loss gives numbers of its batch to Python: if such a loss changes what it keeps, records of one
row or step may reach the gradients of another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc.errors import UnsupportedModel

_MAX_OBJECTS = 100_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = (type, ModuleType, BuiltinFunctionType)


def python_state(loss_fn: object) -> int:
    """A number that changes when what a function keeps changes: sizes and plain values of all that it reaches.

    >>> kept = [0.0]
    >>> before = python_state(lambda: kept)
    >>> before == python_state(lambda: kept)
    True
    >>> kept[0] = 1.0
    >>> before == python_state(lambda: kept)
    False
    """
    visited: set[int] = set()
    values: list[object] = []
    todo: list[Any] = [loss_fn]
    while todo and len(visited) < _MAX_OBJECTS:
        value = todo.pop()
        if id(value) in visited or isinstance(value, _OPAQUE):
            continue
        visited.add(id(value))
        if isinstance(value, functools._lru_cache_wrapper):
            values.append(value.cache_info()[3])
            todo.append(value.__wrapped__)
            continue
        for item in _inside(value):
            if isinstance(item, _PLAIN):
                values.append(item)
            elif isinstance(item, Tensor):  # the trace refuses those that depend on a batch where they are used
                values.append("tensor")
            else:
                todo.append(item)
        values.append(type(value).__name__)
    return hash(tuple(values))


def _inside(value: object) -> Iterable[Any]:
    """Values that an object refers to: elements, attributes, and what a function reaches."""
    for kinds, inside in _INSIDE:
        if isinstance(value, kinds):
            return inside(value)
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _elements(value: Any) -> Iterable[Any]:
    """The elements of a set, in an order that is the same each time."""
    return sorted(value, key=repr) if len(value) < _MAX_OBJECTS else ()


def _reached(function: Any) -> Iterable[Any]:
    """Values that a function reaches: in its closure, among global names that it uses, and its defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    used = [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    return (*cells, *used, *(function.__defaults__ or ()))


_INSIDE: tuple[tuple[tuple[type, ...], Callable[[Any], Iterable[Any]]], ...] = (
    ((dict,), lambda value: (*value.keys(), *value.values())),
    ((list, tuple), lambda value: value),
    ((set, frozenset), _elements),
    ((functools.partial,), lambda value: (value.func, *value.args, *value.keywords.values())),
    ((MethodType,), lambda value: (value.__self__, value.__func__)),
    ((FunctionType,), _reached),
)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None or True
    except ValueError:
        return False


# Losses that have kept something; no result depends on it.
_keeping: MutableMapping[object, str] = WeakIdKeyDictionary()


def refuse_kept(loss_fn: object, before: int, read: str) -> None:
    """Refuse a loss that gives numbers of its rows to Python and keeps something from call to call.

    Raises:
        UnsupportedModel: what it keeps is not what it was `before`.
    """
    if loss_fn not in _keeping and python_state(loss_fn) != before:
        _keeping[loss_fn] = read
    if loss_fn in _keeping:
        raise UnsupportedModel(
            f"The loss gives numbers of its rows to Python ({_keeping[loss_fn]}), and what it keeps from call to call "
            "has changed (a list, an attribute, a cache): records of one row or step would reach the gradients of "
            "another. Keep nothing, or compute without Python numbers."
        )


def was_kept(loss_fn: object) -> bool:
    """True if a loss has kept numbers of its rows."""
    return loss_fn in _keeping
