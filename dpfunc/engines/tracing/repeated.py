"""Cache of the types of repeated calls: for the same operation, shapes and types, the result has the same type.

A transformer repeats a few hundred different calls in every layer and step. The rule of a family in `PURE` reads no
numbers, so that its answer is a function of the key; the answer of a rule that had to read numbers after all (of a
constant that may differ between samples) is not kept. Only answers without a doubt are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from dpfunc.engines.tracing.entries import COARSE_DTYPES, Constant, is_doubtful, key_of
from dpfunc.engines.tracing.operations import Known
from dpfunc.engines.tracing.rows import Stored

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace

KEPT = 1 << 14
"""Different calls that are kept; a model has a few hundred."""

_CONSTANTS = {Constant.EQUAL: -1, Constant.RANDOM: -2, Constant.ANY: -3}
_PLAIN = frozenset((int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str))


class _Answer(NamedTuple):
    """The shape and strides of the result, the entry of its memory, and whether it has numbers of 16 bits."""

    shape: torch.Size
    strides: tuple[int, ...]
    entry: Stored | Constant
    coarse: bool


_answers: dict[object, tuple[_Answer, ...]] = {}


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


def key_of_values(trace: Trace, names: tuple[object, ...], values: tuple[Any, ...]) -> object:
    """Key of these names and of all properties of values that a rule may read; None if they have too many."""
    if trace.alone or trace.ragged:
        return None
    found: list[object] = [*names, trace.num_samples]
    try:
        _collect(trace, values, found)
    except _Unkeyed:
        return None
    return tuple(found)


def _collect(trace: Trace, values: Iterable[Any], found: list[object]) -> None:
    entries = trace.entries
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.layout is not torch.strided:
                raise _Unkeyed
            key = value.untyped_storage()._cdata
            entry = entries.get(key)
            if entry is None:
                if key not in trace.untraced_memory:
                    trace.type_of(value)
                found.append(0)
            else:
                stored = entry[1]
                if type(stored) is Stored:
                    if stored.ids is not None or is_doubtful(stored):
                        raise _Unkeyed
                    found += (stored.base, stored.step, stored.count, stored.end, value.storage_offset())
                elif type(stored) is Constant and stored in _CONSTANTS:
                    found.append(_CONSTANTS[stored])
                else:
                    raise _Unkeyed
            found += (value.shape, value.stride(), value.dtype)
        elif kind in _PLAIN:
            found.append(value)
        elif kind is list or kind is tuple:
            found.append(len(value))
            _collect(trace, value, found)
        else:
            raise _Unkeyed


def recall(trace: Trace, key: object, result: Any) -> bool | None:
    """Note the types of the results of a call that was typed before; None if it was not.

    Returns:
        True if a result has numbers of 16 bits.
    """
    answers = _answers.get(key)
    if answers is None:
        return None
    results = result if type(result) is tuple or type(result) is list else (result,)
    if len(results) != len(answers):
        return None
    for answer, tensor in zip(answers, results, strict=True):
        if type(tensor) is not Tensor or tensor.shape != answer.shape or tensor.stride() != answer.strides:
            return None
    coarse = False
    for answer, tensor in zip(answers, results, strict=True):
        storage = tensor.untyped_storage()
        coarse = coarse or answer.coarse
        trace.entries[storage._cdata] = StorageWeakRef(storage), answer.entry
    return coarse


def keep(trace: Trace, key: object, inputs: Sequence[Tensor], result: Any) -> bool:
    """Keep the types that were just noted, if they have no doubt and each result has memory of its own.

    Returns:
        True if they were kept.
    """
    results = result if isinstance(result, (tuple, list)) else (result,)
    given = {key_of(tensor) for tensor in inputs}
    answers = []
    for tensor in results:
        if type(tensor) is not Tensor or tensor.storage_offset() or key_of(tensor) in given:
            return False
        entry = trace.entries.get(key_of(tensor))
        if entry is None:
            return False
        kind = entry[1]
        if isinstance(kind, Stored):
            if kind.ids is not None or kind.end or is_doubtful(kind):
                return False
        elif not isinstance(kind, Constant) or kind not in _CONSTANTS:
            return False
        answers.append(_Answer(tensor.shape, tensor.stride(), kind, tensor.dtype in COARSE_DTYPES))
    if len(_answers) >= KEPT:
        _answers.clear()
    _answers[key] = tuple(answers)
    return True
