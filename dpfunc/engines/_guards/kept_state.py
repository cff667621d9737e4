"""State that a loss can reach and keep between calls (`python_state`).

May import: its folder, batches, rng and below. Privacy depends on it: yes.

All that Python's garbage collector sees from the loss is walked, but for what this file names as left out. What this
cannot see is listed in docs/isolation.md.
"""

import builtins
import functools
import gc
import io
import itertools
import logging
import operator
import pickle
import random
import re
import secrets
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
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    MappingProxyType,
    MethodDescriptorType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from dpfunc.engines._guards.loss import is_earlier, kept_by_loss, plain_memory, refuse_kept
from dpfunc.engines._levels import inside

_MAX_OBJECTS = 100_000
_MANY, _SAMPLE = 65_536, 4_096  # of more numbers or entries than so many, so many at equal distances are compared
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
# Seen only by their elements; `Mapping[str, int]`, too, answers with attributes of its class, which is one of them.
_CONTAINERS = frozenset((dict, list, tuple, set, frozenset, GenericAlias))

# What is left out, and why.

# Classes and modules of these, and of packages that are installed, keep nothing of a loss but what it has put there,
# under a name that it uses.
_LIBRARIES = frozenset(("dpfunc", *sys.stdlib_module_names))
_INSTALLED = frozenset(("site-packages", "dist-packages"))  # also those of a user, or of another environment
# The calls that run now, and what handles messages.
_RUNNING = (FrameType, TracebackType, logging.Handler)
# What other threads and processes change at any time. And what libraries have for `with` notes how to go back, or
# belongs to others, too: files, pools, locks, profiles, progress bars, `torch.no_grad()`.
_OF_OTHERS = frozenset(("asyncio", "concurrent", "multiprocessing", "queue", "threading"))
_MEMORY = (io.StringIO, io.BytesIO, memoryview)  # for `with`, and no more than their numbers
# What never changes; of a path, but for texts that it makes of itself when it is asked.
_AS_THEY_ARE = (ModuleType, CodeType, PurePath)
_WEAK: tuple[Any, ...] = (weakref.ReferenceType, *weakref.ProxyTypes)
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
    # What functions of torch that are never compiled (`torch.utils.checkpoint`) keep of themselves at their first call.
    (FunctionType, frozenset(("__dynamo_disable",))),
    # Which messages are wanted, and other loggers.
    (logging.Logger, frozenset(("_cache", "manager", "parent", "root", "handlers"))),
    # What Python notes of a class when it is asked: by `isinstance`, for annotations, for a copy, for several flags.
    (type, frozenset(("_abc_impl", "__annotations__", "__annotations_cache__", "__slotnames__", "_value2member_map_"))),
)

# Functions by which code reaches values whose names it makes: of its own module, and of any object.
_BY_TEXT = frozenset(("globals", "eval", "exec", "vars"))
_OF_ANY = _BY_TEXT | {"getattr", "setattr", "delattr", "__dict__"}
_UNREADABLE = (
    TypeError, AttributeError, ValueError, LookupError, RuntimeError, ReferenceError, BufferError, OSError,
    pickle.PickleError,
)  # fmt: skip


def python_state(loss_fn: object) -> tuple[object, ...]:
    """Fingerprint of the state that a function reaches: types, sizes and bits. It changes when the state changes."""
    return _after_collection(loss_fn).values


def quick_state(loss_fn: object) -> tuple[object, ...]:
    """The same, with what may be garbage: it can change by itself, if seldom."""
    return _walk(loss_fn).values


def is_changed(loss_fn: object, before: tuple[object, ...]) -> bool:
    """True if the state of a function has changed. Garbage, which takes long to collect, is collected only if so."""
    return _walk(loss_fn).values != before and python_state(loss_fn) != before


class Reached:
    """Notices that what a loss reaches in Python has changed: numbers, flags, texts, and which tensors.

    Most times it only compares what the objects hold with what they held, by identity, in a small part of the time of a
    walk, which follows where that is another. It does not see numbers of tensors, memory of other libraries (NumPy),
    or values whose names code makes as text.
    """

    def __init__(self) -> None:
        self._holders, self._scopes, self._tensors = list[Any](), list[tuple[Any, Sequence[str]]](), list[Tensor]()
        self._held, self._values = list[Any](), list[object]()

    def changed(self, loss_fn: object) -> str:
        """The first thing that has changed since the last call, by names as in messages; empty if nothing has."""
        now, before = self._holds(loss_fn), self._values
        if len(now) == len(self._held) and all(map(operator.is_, now, self._held)):
            return ""
        walk, places = self._look(loss_fn)
        return _where(before, self._values, walk, places) if before and before != self._values else ""

    def _holds(self, loss_fn: object) -> list[Any]:
        """Elements, attributes, and values of names."""
        named = (scope.get(name) for scope, names in self._scopes for name in names)
        return [*gc.get_referents(loss_fn, *self._holders), *named, *(each.requires_grad for each in self._tensors)]

    def _look(self, loss_fn: object) -> tuple["_Walk", Sequence[int]]:
        """Walk, and note what was found; the places of `_values` in it."""
        walk = _walk(loss_fn)
        found = range(2, len(walk.values))  # without the seed of the step
        places = [place for place in found if not _is_tensor(walk.objects[walk.parents[place]])]
        own = [(walk.objects[place], walk.values[place]) for place in places]
        self._values = [(id(part), part.requires_grad) if _is_tensor(part) else value for part, value in own]
        parts = {id(part): part for part, _ in own if type(part) not in _PLAIN}.values()
        self._tensors = [part for part in parts if _is_tensor(part)]
        holders = [part for part in parts if _is_holder(part)]
        tables = [getattr(part, "__dict__", None) for part in (loss_fn, *holders) if type(part) is not OrderedDict]
        functions = [part for part in (loss_fn, *parts) if type(part) is FunctionType]
        cells = itertools.chain.from_iterable(part.__closure__ or () for part in functions)
        self._holders = [*holders, *cells, *(table for table in tables if isinstance(table, dict))]
        functions = [part for part in functions if not _of_library(part)]
        names = tuple({name for part in functions for name in _names(part.__code__)})
        spaces = [vars(part) for part in parts if isinstance(part, ModuleType) and not _of_library(part)]
        self._scopes = [
            *((table, tuple(table)) for table in tables if isinstance(table, MappingProxyType)),
            *((part.__globals__, _names(part.__code__)) for part in functions),
            *((space, names) for space in spaces),
        ]
        self._held = self._holds(loss_fn)
        return walk, places


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), Tensor)


def _is_holder(value: Any) -> bool:
    """True for what can be given other parts; not for classes of libraries."""
    kind: Any = type(value)
    fixed = issubclass(kind, (Tensor, *_AS_THEY_ARE, *_WEAK)) or (issubclass(kind, type) and _of_library(value))
    return not fixed and kind not in (tuple, frozenset) and _how_to_read(kind)[1] is not None


class _Walk(NamedTuple):
    """Objects that a loss reaches; for each, the compared values and the index of the object that refers to it."""

    objects: list[Any]
    values: tuple[Any, ...]
    parents: list[int]


def _after_collection(loss_fn: object) -> _Walk:
    """A walk without garbage, which vanishes from weak containers at any time."""
    found = _walk(loss_fn, weak=False)
    if not found.objects:
        gc.collect()
        found = _walk(loss_fn)
    return found


def _walk(loss_fn: object, weak: bool = True) -> _Walk:
    """All objects that a loss reaches; none if there are weak references and `weak` is false."""
    objects: list[Any] = [loss_fn, torch.initial_seed()]
    parents, values = [0, 0], list[object]()
    number_of: dict[int, int] = {}
    names, modules = set[str](), list[ModuleType]()
    for place, value in enumerate(objects):  # to which its parts are added
        kind = type(value)
        if kind in _PLAIN:
            values.append((kind, repr(value) if kind is float or kind is complex else value))
        elif (known := number_of.get(id(value))) is not None:
            values.append(known)
        elif len(number_of) == _MAX_OBJECTS:
            break
        elif not weak and issubclass(kind, _WEAK):
            return _Walk([], (), [])
        else:
            number_of[id(value)] = place
            parts = _parts(value, kind)
            values.append((kind, value if parts is None else len(parts)))
            if parts:
                objects += parts if len(parts) <= _MANY else parts[:: len(parts) // _MANY]
                parents += [place] * (len(objects) - len(parents))
            if kind is FunctionType and not _of_library(value):
                names.update(_names(value.__code__))
            elif issubclass(kind, ModuleType) and not _of_library(value):
                modules.append(value)
        if modules and place + 1 == len(objects):  # in a closure or an attribute: any function may use their values
            found = [each for module in modules for each in _values_named(sorted(names), vars(module), _OF_ANY)]
            new = [each for each in found if type(each) not in _PLAIN and id(each) not in number_of]
            objects += new or [each for each in found if type(each) in _PLAIN]
            modules = modules if new else []
            parents += [0] * (len(objects) - len(parents))
    return _Walk(objects, tuple(values), parents)


def _parts(value: Any, kind: Any) -> Sequence[Any] | None:
    """Values that an object refers to: elements, attributes, slots, its class, and state that only the class reads.

    None for what is not looked into, and is compared as it is.
    """
    if kind in _CONTAINERS and id(value) != _IMPORTED:  # quick: most objects, which have no attributes
        return [*(value if kind is dict else ()), *gc.get_referents(value)]
    if kind is OrderedDict and not value.__dict__:  # quick: each module of torch has eight of them
        none = value.__dict__
        return [*value, *(part for part in gc.get_referents(value) if part is not none)]
    if issubclass(kind, _AS_THEY_ARE) or (issubclass(kind, type) and _of_library(value)):
        return None
    left_out, inner = _how_to_read(kind)
    if inner is None or id(value) == _IMPORTED or (kind is functools._lru_cache_wrapper and _is_named(value)):
        return ()
    try:
        own = getattr(value, "__dict__", None) or {}
        hidden = [n for n in left_out if n in own and (n not in _OF_GENERATION or _of_generation(own[n]))]
        kept = {name: part for name, part in own.items() if name not in hidden} if hidden else own
        parts = [*((" ".join(kept), *kept.values()) if own else ()), *inner(value)]
        if not issubclass(kind, (type, FunctionType)):
            found, out = gc.get_referents(value), {id(own), *(id(own[name]) for name in hidden)}
            parts += [part for part in found if id(part) not in out] if own else found
    except _UNREADABLE:  # of code of the object's own class
        return ()
    return parts


@functools.lru_cache(4096)
def _how_to_read(kind: type) -> tuple[frozenset[str], Callable[[Any], Iterable[Any]] | None]:
    """Attributes to skip, and a function that reads the rest of an object's state; None: skip the whole object."""
    entered = hasattr(kind, "__enter__") and _of_library(kind) and not issubclass(kind, _MEMORY)
    packages = {str(each.__module__).partition(".")[0] for each in kind.__mro__}
    if entered or issubclass(kind, _RUNNING) or not _OF_OTHERS.isdisjoint(packages):
        return frozenset(), None
    left_out = (names for concerns, names in _LEFT_OUT if issubclass(kind, concerns))
    known = (inner for kinds, inner in _STATE_OF_KINDS if issubclass(kind, kinds))
    return _OF_GENERATION.union(*left_out), next(known, _digest_of_memory if _hides_state(kind) else lambda value: ())


def _of_generation(value: object) -> bool:
    """True for tensors only: numbers of Python would reach the next call unseen."""
    return value is None or isinstance(value, Tensor)


def _is_named(value: Any) -> bool:
    """True for a function that a library defines by name; its cache holds only what a call would return."""
    return _of_library(value) and getattr(sys.modules.get(value.__module__), value.__name__, None) is value


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
    yield from (*gc.get_referents(*(function.__closure__ or ())), function.__defaults__, function.__kwdefaults__)
    if not _of_library(function):  # tools that measure which lines run exchange code, and have constants of their own
        yield tuple(each for each in function.__code__.co_consts if type(each) in _PLAIN)
        yield from _named(_names(function.__code__), function.__globals__)


def _named(names: Collection[str], scope: Mapping[str, Any]) -> Iterable[Any]:
    """Values of global names and of modules that are imported inside; and what a loss has put into libraries."""
    package = scope.get("__package__")
    found = [sys.modules.get(n) or sys.modules.get(f"{package}.{n}") or vars(builtins).get(n) for n in names]
    found += _values_named(names, scope, _BY_TEXT)
    spaces = [value for value in found if isinstance(value, _SPACES)]
    found = [None if isinstance(value, ModuleType) and _of_library(value) else value for value in found]
    for space in spaces:  # of which some may be imported later
        own = _values_named(names, vars(space), frozenset()) if _of_library(space) and space is not sys else []
        spaces += [value for value in own if isinstance(value, _SPACES) and value not in spaces]
        found += [value for value in own if type(value) in _PLAIN or isinstance(value, _DATA)]
    return found


def _values_named(names: Collection[str], scope: Mapping[str, Any], by_text: Set[str]) -> list[Any]:
    """Values of these names; where some may be made as text, all but code."""
    if by_text.isdisjoint(names):
        return [scope[name] for name in names if name in scope]
    others = (value for name, value in scope.items() if name in names or not isinstance(value, _SPACES))
    said = scope.get("__warningregistry__", others)  # warnings that were said once
    return [value for value in others if value is not said]


_SPACES = (ModuleType, type, FunctionType)
_DATA = (Tensor, deque, MutableMapping, MutableSequence, MutableSet)


# What only classes know of their objects.


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


def _hides_state(kind: Any) -> bool:
    """True for classes of C or of libraries that define how their objects are copied."""
    own = [each for name in _COPYING if (each := getattr(kind, name, None)) is not getattr(object, name, None)]
    known = issubclass(kind, _SEEN) or str(kind.__module__).startswith(_UNWRITABLE)
    return not known and any(not isinstance(each, FunctionType) or _of_library(each) for each in own)


_COPYING = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs__")
_SEEN = (dict, list, tuple, set, frozenset, deque, functools.partial)


def _digest_of_memory(value: Any) -> Iterable[Any]:
    """Digest the memory of an object of C; without such memory, return the state that a copy of it needs."""
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
        return (secrets.token_hex(),) if isinstance(value, Iterator) and not hasattr(value, "__dict__") else ()
    return found if isinstance(found, tuple) else (found,)


_STATE_OF_KINDS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
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


def note_changed(loss_fn: object, before: tuple[object, ...], reason: str = "") -> None:
    """Mark a loss whose state has changed: it stays marked, since the state stays."""
    if loss_fn in kept_by_loss or not is_changed(loss_fn, before):
        return
    after = _after_collection(loss_fn)
    why = reason or "is called several times for a batch, so a counter would reveal the number of other rows"
    place = _where(before, after.values, after)
    kept_by_loss[loss_fn] = f"{why}, and what it keeps from call to call has changed: {place}"


def _where(before: Sequence[Any], now: Sequence[Any], after: _Walk, places: Sequence[int] | None = None) -> str:
    """Path of names to the changed object, and the type of its owner; no values and no keys.

    `places` are those of the values in the walk, in which all are compared otherwise.
    """
    pairs = enumerate(itertools.zip_longest(before, now))
    number = min(next(number for number, (one, other) in pairs if one != other), len(now) - 1)
    place = number if places is None else places[number]
    way, found, named = [place], "torch.initial_seed()" if place == 1 else "loss", place
    while way[0] > 1:
        way.insert(0, after.parents[way[0]])
    for owner, part in itertools.pairwise(way):
        name = _name(after, owner, part, found)
        found, named = (f"{found}{name}", part) if name else (found, named)
    return f"{_OF_MODULE.sub('.', found.removeprefix('loss, '))} ({type(after.objects[named]).__name__})"


_OF_MODULE = re.compile(r"\._(modules|buffers|parameters)\.")


def _name(walk: _Walk, owner: int, part: int, way: str) -> str:
    """The name of a part of an object; empty where it has none."""
    value, first, scope = walk.objects[owner], walk.parents.index(owner, 2), dict[str, Any]()
    own = getattr(value, "__dict__", None)  # of which the names are the first part
    names = ["", *(f".{name}" for name in walk.objects[first].split())] if own else []
    if type(value) is FunctionType:
        names += [f", closure {name!r}" for name in value.__code__.co_freevars]
        scope = {f", global {name!r}": value.__globals__.get(name) for name in _names(value.__code__)}
    elif isinstance(value, dict) and _OF_MODULE.search(f"{way}."):
        scope = {f".{name}": each for name, each in value.items()}
    same = (name for name, each in scope.items() if each is walk.objects[part])
    return names[part - first] if part - first < len(names) else next(same, "")


def refuse_counting(loss_fn: object, before: tuple[object, ...]) -> None:
    """Refuse a loss that changes what it keeps where it is called several times for one batch, or one row a call."""
    note_changed(loss_fn, before)
    refuse_kept(loss_fn)
