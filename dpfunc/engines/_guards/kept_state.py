"""Values that a loss reaches, and may keep from call to call (`python_state`).

All that Python's garbage collector sees from the loss is walked, but for what this file names as left out. What this
cannot see is listed in docs/isolation.md.
"""

from __future__ import annotations

import builtins
import functools
import gc
import itertools
import logging
import pickle
import random
import sys
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
    Set,
)
from contextvars import ContextVar
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodDescriptorType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from dpfunc.engines._guards.loss import is_earlier, keeping, plain_memory, refuse_kept
from dpfunc.engines._levels import inside

_MAX_OBJECTS = 100_000
_MANY, _SAMPLE = 65_536, 4_096  # of more numbers or entries than so many, so many at equal distances are compared
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))

# What is left out, and why.

# Classes and modules of these, and of packages that are installed, keep nothing of a loss but what it has put there,
# under a name that it uses.
_LIBRARIES = frozenset(("dpfunc", *sys.stdlib_module_names))
_INSTALLED = frozenset(("site-packages", "dist-packages"))  # also those of a user, or of another environment
# The calls that run now, and what handles messages.
_RUNNING = (FrameType, TracebackType, logging.Handler)
# All modules: a library may import others when it is used for the first time.
_IMPORTED = id(sys.modules)
# Tables of Arrow cannot be written, and may be larger than the memory.
_UNWRITABLE = ("pyarrow",)
# What models of Transformers keep of a batch for the next token of the same one; no loss reads it, and one that did
# would be refused, since it is a tensor of an earlier call.
_OF_GENERATION = frozenset(("rope_deltas", "recurrent_states", "conv1d_state"))
_LEFT_OUT: tuple[tuple[type, frozenset[str]], ...] = (
    # What recurrent layers of torch keep of their parameters, and replace in each call.
    (torch.nn.RNNBase, frozenset(("_flat_weights", "_flat_weight_refs"))),
    # What `torch.autocast` notes when it is entered, to go back to it.
    (torch.autocast, frozenset(("prev", "prev_cache_enabled", "prev_fastdtype"))),
    # What functions of torch that are never compiled (`torch.utils.checkpoint`) keep of themselves at their first call.
    (FunctionType, frozenset(("__dynamo_disable",))),
    # Which messages are wanted, and other loggers.
    (logging.Logger, frozenset(("_cache", "manager", "parent", "root", "handlers"))),
    # What Python notes of a class when it is asked: by `isinstance`, for annotations, for a copy.
    (type, frozenset(("_abc_impl", "__annotations__", "__annotations_cache__", "__slotnames__"))),
)

# Functions by which code reaches values whose names it makes: of its own module, and of any object.
_BY_TEXT = frozenset(("globals", "eval", "exec", "vars"))
_OF_ANY = _BY_TEXT | {"getattr", "setattr", "delattr", "__dict__"}
_UNREADABLE = (
    TypeError, AttributeError, ValueError, LookupError, RuntimeError, ReferenceError, BufferError, OSError,
    pickle.PickleError,
)  # fmt: skip
_never_equal = itertools.count()


def python_state(loss_fn: object) -> tuple[object, ...]:
    """Values that change when what a function keeps changes: types, sizes and bits of all that it reaches."""
    number_of: dict[int, int] = {}
    values, todo = list[object](), deque[Any]([loss_fn, torch.initial_seed()])
    alive = list[Any]()  # so that identities stay
    names, modules = set[str](), list[ModuleType]()
    while todo and len(alive) < _MAX_OBJECTS:
        value = todo.popleft()
        kind = type(value)
        if kind in _PLAIN:
            values += (kind, repr(value) if kind is float or kind is complex else value)
        elif id(value) in number_of:
            values.append(number_of[id(value)])
        else:
            number_of[id(value)] = len(alive)
            alive.append(value)
            parts = _parts(value, kind)
            values += (kind, value if parts is None else len(parts))
            todo += (parts or ())[:: max(1, len(parts or ()) // _MANY)]
            names.update(_names(value.__code__) if kind is FunctionType and not _of_library(value) else ())
            modules += [value] if issubclass(kind, ModuleType) and not _of_library(value) else []
        if not todo:  # a module in a closure or an attribute: any function may use its values by their names
            found = [value for module in modules for value in _within(names, vars(module), _OF_ANY)]
            todo += [value for value in found if type(value) not in _PLAIN and id(value) not in number_of]
            values += [] if todo else [(type(value), repr(value)) for value in found if type(value) in _PLAIN]
    return tuple(values)


def _parts(value: Any, kind: Any) -> Sequence[Any] | None:
    """Values that an object refers to: elements, attributes, slots, its class, and what that alone knows of it.

    None for what is not looked into, and is compared as it is.
    """
    if issubclass(kind, (ModuleType, CodeType)) or (issubclass(kind, type) and _of_library(value)):
        return None
    left_out, inner = _of_class(kind)
    if issubclass(kind, _RUNNING) or id(value) == _IMPORTED:
        return ()
    try:
        own = getattr(value, "__dict__", None) or {}
        hidden = {n for n in left_out.intersection(own) if n not in _OF_GENERATION or _of_generation(own[n])}
        kept = {name: part for name, part in own.items() if name not in hidden}
        parts = [*((" ".join(kept), *kept.values()) if own else ()), *inner(value)]
        if not issubclass(kind, (type, FunctionType)):
            out = {id(own), *(id(own[name]) for name in hidden)}
            parts += [part for part in gc.get_referents(value) if id(part) not in out]
    except _UNREADABLE:  # of code of the object's own class
        return ()
    return parts


@functools.lru_cache(4096)
def _of_class(kind: type) -> tuple[frozenset[str], Callable[[Any], Iterable[Any]]]:
    """Names of attributes that are left out, and what a class alone knows of its objects."""
    left_out = (names for concerns, names in _LEFT_OUT if issubclass(kind, concerns))
    known = (inner for kinds, inner in _INSIDE if issubclass(kind, kinds))
    return _OF_GENERATION.union(*left_out), next(known, _memory if _hides(kind) else lambda value: ())


def _of_generation(value: object) -> bool:
    """True for tensors only: numbers of Python would reach the next call unseen."""
    return value is None or isinstance(value, Tensor)


def _of_library(value: Any) -> bool:
    """True for a module, or what is defined in one, that belongs to a library."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    name = value.__globals__.get("__name__") if isinstance(value, FunctionType) else name
    return _is_library(str(name or "builtins").partition(".")[0])


@functools.cache
def _is_library(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in _LIBRARIES or not _INSTALLED.isdisjoint(Path(file).parts)


# Values of functions, by name.


@functools.lru_cache(4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Names that a function uses, also as text, and those in functions inside of it."""
    within = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    texts = (text for const in code.co_consts for text in (const if isinstance(const, tuple) else (const,)))
    return tuple(
        sorted({*code.co_names, *itertools.chain.from_iterable(within), *(t for t in texts if isinstance(t, str))})
    )


def _reached(function: Any) -> Iterable[Any]:
    """Values that a function reaches: in its closure, among global names that it uses, and its defaults."""
    yield from (function.__closure__, function.__defaults__, function.__kwdefaults__)
    if not _of_library(function):  # tools that measure which lines run exchange the code of a library while it runs
        yield function.__code__
        yield from _named(_names(function.__code__), function.__globals__)


def _named(names: Collection[str], scope: Mapping[str, Any]) -> Iterable[Any]:
    """Values of global names and of modules that are imported inside; and what a loss has put into libraries."""
    package = scope.get("__package__")
    found = [sys.modules.get(n) or sys.modules.get(f"{package}.{n}") or vars(builtins).get(n) for n in names]
    found += _within(names, scope, _BY_TEXT)
    spaces = [value for value in found if isinstance(value, _SPACES)]
    for space in spaces:
        own = _within(names, vars(space), frozenset()) if _of_library(space) and space is not sys else []
        spaces += [value for value in own if isinstance(value, _SPACES) and value not in spaces]
        found += [value for value in own if type(value) in _PLAIN or isinstance(value, _DATA)]
    return found


def _within(names: Collection[str], scope: Mapping[str, Any], by_text: Set[str]) -> list[Any]:
    """Values of these names; where some may be made as text, all but code."""
    if by_text.isdisjoint(names):
        return [scope[name] for name in sorted(names) if name in scope]
    return [value for name, value in scope.items() if name in names or not isinstance(value, _SPACES)]


_SPACES = (ModuleType, type, FunctionType)
_DATA = (Tensor, deque, MutableMapping, MutableSequence, MutableSet)


# What classes alone know of their objects.


def _of_tensor(tensor: Tensor) -> Iterable[Any]:
    """Number of writes into a tensor, and its numbers, since some operations write without saying so."""
    tensor = inside(tensor)  # `self.table = self.table.to(device)` gives the same one at a level
    with torch._C.DisableTorchFunction():
        own = None if functorch.is_functorch_wrapped_tensor(tensor) else plain_memory(tensor)
        if functorch.is_functorch_wrapped_tensor(tensor) or (own is not None and is_earlier(own)):
            return ()
        about = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.grad if tensor.is_leaf else None)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return (*about, *_copied(tensor))
        empty = own is None or own.is_meta or not own.untyped_storage().size()  # FSDP frees what it has gathered
        version = None if own is None or own.is_inference() else own._version
        return (*about, version, None if own is None or empty else _bits(own.detach()))


def _bits(tensor: Tensor) -> int:
    """A digest of the bits of a tensor: of all numbers, or of many at equal distances."""
    if tensor.numel() > _MANY:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        step = -(-span // _SAMPLE)
        tensor = tensor.as_strided((-(-span // step),), (step,))
    flat = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return hash(flat.view(torch.uint8).cpu().numpy().tobytes())


def _hides(kind: Any) -> bool:
    """True for classes of C, or of libraries, that say what a copy of their objects needs."""
    own = [each for name in _COPYING if (each := getattr(kind, name, None)) is not getattr(object, name, None)]
    known = issubclass(kind, _SEEN) or str(kind.__module__).startswith(_UNWRITABLE)
    return not known and any(not isinstance(each, FunctionType) or _of_library(each) for each in own)


_COPYING = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs__")
_SEEN = (dict, list, tuple, set, frozenset, deque, functools.partial)


def _memory(value: Any) -> Iterable[Any]:
    """What an object of C keeps: its memory, or what a copy of it needs."""
    array = hasattr(value, "dtype") and hasattr(value, "tobytes")
    if array and not value.dtype.hasobject:
        some = value if value.size <= _MANY else value.flat[:: value.size // _SAMPLE]
        return (value.shape, str(value.dtype), hash(some.tobytes()))
    try:
        view = memoryview(b"" if array else value).cast("B")
    except _UNREADABLE:
        view = None
    return _copied(value) if not view else (len(view), hash(view[:: -(-len(view) // _MANY) or 1].tobytes()))


def _copied(value: Any) -> Iterable[Any]:
    """State of an object, as `pickle` keeps it: generators of random numbers, iterators, text in memory."""
    try:
        with warnings.catch_warnings(action="ignore"):
            found = value.__reduce_ex__(2)
    except _UNREADABLE:
        return (next(_never_equal),) if isinstance(value, Iterator) else ()
    return found if isinstance(found, tuple) else (found,)


_INSIDE: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (weakref.ProxyTypes, lambda value: (value.__repr__.__self__,)),
    (Tensor, _of_tensor),
    (OrderedDict, lambda value: OrderedDict.keys(value)),
    (dict, lambda value: dict.keys(value)),
    (FunctionType, _reached),
    (type, lambda value: (type(value), *value.__bases__)),
    ((BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType), lambda value: (value.__qualname__,)),
    (functools._lru_cache_wrapper, lambda value: value.cache_info()[1:]),
    (GeneratorType, lambda value: (value.gi_frame.f_lasti, value.gi_frame.f_locals) if value.gi_frame else ()),
    (weakref.ReferenceType, lambda value: (value(),)),
    (torch.jit.ScriptModule, lambda value: (value._c.dump_to_str(False, True, False),)),
    (random.Random, lambda value: (value.getstate(),)),
    (torch.Generator, lambda value: (value.get_state().numpy().tobytes(),)),
    (ContextVar, lambda value: (value.get(None),)),
)


def note_changed(loss_fn: object, before: object, told: str = "") -> None:
    """Note a loss that has changed what it keeps: what it has kept stays."""
    if loss_fn not in keeping and python_state(loss_fn) != before:
        keeping[loss_fn] = told or "is called once for each row or part of a batch, whose number tells of other rows"


def refuse_counting(loss_fn: object, before: object) -> None:
    """Refuse a loss that changes what it keeps where it is called several times for one batch, or one row a call."""
    note_changed(loss_fn, before)
    refuse_kept(loss_fn)
