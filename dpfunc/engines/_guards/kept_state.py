"""Values that a loss reaches, and may keep from call to call (`python_state`)."""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from dpfunc.engines._guards.loss import is_earlier, keeping, plain_memory, refuse_kept
from dpfunc.engines._levels import inside

_MAX_OBJECTS = 100_000
_SMALL = 64
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = (ModuleType, logging.Logger, logging.Handler)
# Classes and functions of these, and of packages that are installed, keep nothing of a loss by themselves; what their
# objects hold is looked at.
_LIBRARIES = frozenset(("dpfunc", *sys.stdlib_module_names))
_INSTALLED = frozenset(("site-packages", "dist-packages"))  # also those of a user, or of another environment
# What models of Transformers keep of a batch for the next token of the same one; no loss reads it, and one that did
# would be refused, since it is a tensor of an earlier call.
_OF_GENERATION = frozenset(("rope_deltas", "recurrent_states", "conv1d_state"))
# What recurrent layers of torch keep of their parameters, and replace in each call.
_OF_RECURRENT = frozenset(("_flat_weights", "_flat_weight_refs"))
# What functions of torch that are never compiled (`torch.utils.checkpoint`) keep of themselves at their first call.
_OF_COMPILER = frozenset(("__dynamo_disable",))
# What `torch.autocast` notes when it is entered, to go back to it.
_OF_AUTOCAST = frozenset(("prev", "prev_cache_enabled", "prev_fastdtype"))
_never_equal = itertools.count()


def python_state(loss_fn: object) -> tuple[object, ...]:
    """Values that change when what a function keeps changes: sizes and plain values of all that it reaches."""
    visited: dict[int, object] = {}  # what is kept alive keeps its identity
    values: list[object] = [torch.initial_seed()]
    todo: list[Any] = [loss_fn]
    while todo and len(visited) < _MAX_OBJECTS:
        value = todo.pop()
        if id(value) in visited or isinstance(value, _OPAQUE) or (isinstance(value, type) and _of_library(value)):
            continue
        visited[id(value)] = value
        for item in _parts(value):
            if isinstance(item, _PLAIN):
                values.append(item)
            elif isinstance(item, Tensor):
                values += _numbers(item)
            else:
                todo.append(item)
        values.append(type(value).__name__)
    return tuple(values)


def _numbers(tensor: Tensor) -> tuple[object, ...]:
    """Number of writes into a tensor, and some of its numbers: all if they are few.

    Tensors of earlier rows are refused where they are used. Numbers are compared as well, since some operations write
    without saying so (batch norm), and since a tensor may be another one of the same shape.
    """
    tensor = inside(tensor)  # `self.table = self.table.to(device)` gives the same one at a level
    own = None if functorch.is_functorch_wrapped_tensor(tensor) else plain_memory(tensor)
    if own is None or own.is_inference() or own.is_meta or is_earlier(own):
        return ("tensor",)
    if not own.untyped_storage().size():  # FSDP frees what it has gathered
        return ("tensor",)
    return own._version, tuple(own.shape), str(own.dtype), repr(_some(own.detach()).tolist())


def _some(tensor: Tensor) -> Tensor:
    """Numbers of a tensor at equal distances: all of them if they are few."""
    if tensor.numel() <= _SMALL:
        return tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    step = -(-span // _SMALL)
    return tensor.as_strided((-(-span // step),), (step,))


def _parts(value: object) -> Iterable[Any]:
    """Values that an object refers to: elements, attributes, its class, and what a function reaches."""
    own = vars(value) if hasattr(value, "__dict__") else None
    left_out = () if own is None else next((names for concerns, names in _LEFT_OUT if concerns(value)), ())
    attributes = None if own is None else [i for n, i in own.items() if n not in left_out and not _of_generation(n, i)]
    for kinds, parts in _INSIDE:
        if isinstance(value, kinds):
            return (*parts(value), *(attributes or ()), type(value))
    return (*(_reduced(value) if attributes is None else attributes), type(value))


# Attributes that torch keeps for itself.
_LEFT_OUT: tuple[tuple[Callable[[Any], bool], frozenset[str]], ...] = (
    (lambda value: isinstance(value, torch.nn.RNNBase), _OF_RECURRENT),
    (lambda value: type(value) is torch.autocast, _OF_AUTOCAST),
    (lambda value: isinstance(value, FunctionType) and f"{value.__module__}.".startswith("torch."), _OF_COMPILER),
)


def _of_generation(name: str, value: object) -> bool:
    """True for tensors only: numbers of Python would reach the next call unseen."""
    return name in _OF_GENERATION and (value is None or isinstance(value, Tensor))


def _of_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return _is_library(str(name or "builtins").partition(".")[0])


@functools.cache
def _is_library(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in _LIBRARIES or not _INSTALLED.isdisjoint(Path(file).parts)


def _reduced(value: Any) -> Iterable[Any]:
    """State of an object without attributes, as `pickle` keeps it: generators of random numbers, iterators, slots."""
    if hasattr(value, "tobytes"):  # arrays
        return (value.tobytes(),)
    try:
        with warnings.catch_warnings(action="ignore"):
            found = value.__reduce_ex__(2)
        return found[1:] if isinstance(found, tuple) else ()
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PickleError):
        return (next(_never_equal),) if isinstance(value, Iterator) else ()


@functools.lru_cache(4096)
def _names(code: CodeType) -> frozenset[str]:
    """Global names and names of attributes that a function uses, and those in functions inside of it."""
    within = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*within)


def _reached(function: Any) -> Iterable[Any]:
    """Values that a function reaches: in its closure, among global names that it uses, and its defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    named = () if _of_library(function) else _named(sorted(_names(function.__code__)), function.__globals__)
    return (*cells, *named, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _named(names: Sequence[str], scope: Mapping[str, Any]) -> Iterable[Any]:
    """Values of global names, and of the same names in modules among them."""
    found, todo = list[Any](), [scope]
    for each in todo:
        here = [each[name] for name in names if name in each]
        found += here
        own = [vars(value) for value in here if isinstance(value, ModuleType) and not _of_library(value)]
        todo += [other for other in own if not any(other is known for known in todo)]
    return found


_EMPTY = CellType()  # compared by being empty alone


def _frame(generator: Any) -> Iterable[Any]:
    frame = generator.gi_frame
    return () if frame is None else (frame.f_lasti, *frame.f_locals.values())


_INSIDE: tuple[tuple[tuple[type, ...], Callable[[Any], Iterable[Any]]], ...] = (
    ((dict,), lambda value: (*value.keys(), *value.values())),
    ((list, tuple, deque), lambda value: value),
    ((set, frozenset), lambda value: sorted(value, key=repr) if len(value) < _MAX_OBJECTS else ()),
    ((bytearray,), lambda value: (bytes(value),)),
    ((functools.partial,), lambda value: (value.func, *value.args, *value.keywords.values())),
    ((functools._lru_cache_wrapper,), lambda value: (value.__wrapped__, *value.cache_info()[1:])),
    ((MethodType,), lambda value: (value.__self__, value.__func__)),
    (
        (BuiltinFunctionType, MethodWrapperType),
        lambda value: () if isinstance(value.__self__, (type, ModuleType)) else (value.__self__,),
    ),
    ((FunctionType,), _reached),
    ((GeneratorType,), _frame),
    ((torch.jit.ScriptModule,), lambda value: (value._c.dump_to_str(False, True, False),)),
    ((property,), lambda value: (value.fget, value.fset)),
    ((random.Random,), lambda value: (value.getstate(),)),
    ((torch.Generator,), lambda value: (value.get_state().numpy().tobytes(),)),
    ((ContextVar,), lambda value: (value.get(None),)),
    ((type,), lambda value: value.__bases__),
)


def note_changed(loss_fn: object, before: object, told: str = "") -> None:
    """Note a loss that has changed what it keeps: what it has kept stays."""
    if loss_fn not in keeping and python_state(loss_fn) != before:
        keeping[loss_fn] = told or "is called once for each row or part of a batch, whose number tells of other rows"


def refuse_counting(loss_fn: object, before: object) -> None:
    """Refuse a loss that changes what it keeps where it is called several times for one batch, or one row a call."""
    note_changed(loss_fn, before)
    refuse_kept(loss_fn)
