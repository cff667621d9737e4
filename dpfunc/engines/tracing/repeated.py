"""Cache of the types of repeated calls: for the same operation, shapes and types, the result has the same type.

A transformer repeats a few hundred different calls in every layer and step. The rule of a family in `PURE` reads no
numbers, so that its answer is a function of the key; the answer of a rule that had to read numbers after all (of a
constant that may differ between samples) is not kept. Only answers without a doubt are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from dpfunc.engines.tracing.entries import COARSE_DTYPES, Constant, key_of
from dpfunc.engines.tracing.operations import Kind, Known
from dpfunc.engines.tracing.rows import Mixed, Stored

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace
    from dpfunc.engines.uses.tracked import Tracked

_KEPT = 1 << 14
"""Different calls that a cache keeps; a model has a few hundred."""

_Value = TypeVar("_Value")

_CONSTANTS = {Constant.EQUAL: -1, Constant.RANDOM: -2, Constant.ANY: -3}
_PLAIN = frozenset((int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str))


class Answer(NamedTuple):
    """Shape, strides and dtype of the result, the entry of its memory, and whether it has numbers of 16 bits."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    entry: Stored | Constant
    coarse: bool


_answers: dict[object, tuple[Answer, ...]] = {}


class _Unkeyed(Exception):
    """The call has an argument whose type is more than a few numbers; never leaves this file."""


def key_of_call(trace: Trace, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Key of a call: the operation, and all properties of its arguments that the rule of a pure family may read.

    Returns:
        None if the result also depends on something else, or an argument has too many properties.
    """
    if not known.pure:
        return None
    return key_of_values(trace, (known.number, *kwargs), (*args, *kwargs.values()) if kwargs else args)


def is_keyed_write(trace: Trace, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True of an elementwise write into its first argument, if the type of that follows from a key."""
    if known.kind is not Kind.POINTWISE or known.written != (0,) or known.random or known.exchange:
        return False
    return key_of_values(trace, (), (*args, *kwargs.values())) is not None


def key_of_values(
    trace: Trace, names: tuple[object, ...], values: tuple[Any, ...], tracked: Mapping[int, Tracked] | None = None
) -> object:
    """Key of these names and of all properties of values that a rule may read; None if they have too many.

    Args:
        tracked: where given, the key has the names of tracked tensors, and other values of parameters have no key.
    """
    if trace.alone or trace.ragged:
        return None
    found: list[object] = [*names, trace.num_samples]
    try:
        _collect(trace, values, found, tracked)
    except _Unkeyed:
        return None
    return tuple(found)


def _collect(trace: Trace, values: Iterable[Any], found: list[object], tracked: Mapping[int, Tracked] | None) -> None:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            memory = _memory_of(trace, value)
            if tracked is not None:
                own = tracked.get(id(value))
                if own is not None:
                    found.append((own.name,))
                elif len(memory) == 1 and value.requires_grad:
                    raise _Unkeyed  # computed from parameters, unseen
            found += (memory, value.shape, value.stride(), value.dtype)
        elif kind in _PLAIN:
            found += (kind, value)  # 1, 1.0 and True are equal, and other arguments
        elif kind is list or kind is tuple:
            found += (kind, len(value))
            _collect(trace, value, found, tracked)
        else:
            raise _Unkeyed


def _memory_of(trace: Trace, tensor: Tensor) -> tuple[object, ...]:
    """The samples of the memory of a tensor, and where it lies there, as numbers; one if it depends on no sample."""
    if tensor.layout is not torch.strided:
        raise _Unkeyed
    key = tensor.untyped_storage()._cdata
    known = trace.entries.get(key)
    if known is None:
        if key not in trace.untraced_memory:
            trace.type_of(tensor)
        return (0,)
    entry = known[1]
    if type(entry) is Stored and entry.numbers is not None:
        return entry.numbers, tensor.storage_offset()
    if type(entry) is Constant and entry in _CONSTANTS:
        return (_CONSTANTS[entry],)
    raise _Unkeyed


def recall(trace: Trace, key: object, result: Any) -> bool | None:
    """Note the types of the results of a call that was typed before; None if it was not.

    Returns:
        True if a result has numbers of 16 bits.
    """
    answers = _answers.get(key)
    return None if answers is None else note_again(trace, answers, result)


def note_again(trace: Trace, answers: tuple[Answer, ...], result: Any) -> bool | None:
    """Note the types of the results of a call from these answers; None unless they are as they were, in new memory."""
    results = result if type(result) is tuple or type(result) is list else (result,)
    if len(results) != len(answers):
        return None
    for answer, tensor in zip(answers, results, strict=True):
        if not _is_like(answer, tensor):
            return None
        memory = key_of(tensor)
        if memory in trace.entries or memory in trace.untraced_memory:
            return None
    coarse = False
    for answer, tensor in zip(answers, results, strict=True):
        storage = tensor.untyped_storage()
        coarse |= answer.coarse
        trace.entries[storage._cdata] = StorageWeakRef(storage), answer.entry
    return coarse


def _is_like(answer: Answer, tensor: Any) -> bool:
    """True for a tensor with this shape, these strides and this dtype (the default dtype is in no key)."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.dtype != answer.dtype:
        return False
    return tensor.shape == answer.shape and tensor.stride() == answer.strides


def keep(trace: Trace, key: object, inputs: Sequence[Tensor], result: Any) -> bool:
    """Keep the types that were just noted, if they have no doubt and each result has memory of its own.

    Returns:
        True if they were kept.
    """
    answers = answers_for(trace, inputs, result)
    if answers:
        put(_answers, key, answers)
    return bool(answers)


def put(cache: dict[object, _Value], key: object, value: _Value) -> None:
    """Keep a value; a cache that is full forgets all others."""
    if len(cache) >= _KEPT:
        cache.clear()
    cache[key] = value


def answers_for(trace: Trace, inputs: Sequence[Tensor], result: Any) -> tuple[Answer, ...]:
    """The types that were just noted; none if one has a doubt, or a result has no memory of its own."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    given = {key_of(tensor) for tensor in inputs}
    answers = []
    for tensor in results:
        answer = None if type(tensor) is not Tensor or key_of(tensor) in given else _answer(trace, tensor)
        if answer is None:
            return ()
        answers.append(answer)
    return tuple(answers)


def _answer(trace: Trace, tensor: Tensor) -> Answer | None:
    """All that is kept of a result in new memory; None if its type is more than a few numbers."""
    entry = trace.entry_of(tensor)
    if tensor.storage_offset() or entry is None or isinstance(entry, Mixed):
        return None
    regular = not entry.end and entry.numbers is not None if isinstance(entry, Stored) else entry in _CONSTANTS
    coarse = tensor.dtype in COARSE_DTYPES
    return Answer(tensor.shape, tensor.stride(), tensor.dtype, entry, coarse) if regular else None
