"""Objects that are still in use, arrays that are shared, and errors about exhausted memory.

May import: its folder, errors. Privacy depends on it: no.
"""

import gc
import re
from typing import Any, TypeVar

import numpy as np
import torch

_Kind = TypeVar("_Kind")
_Array = TypeVar("_Array", bound=np.ndarray[Any, Any])

_WORDS = re.compile(r"out of memory|can't allocate memory|not enough memory|_STATUS_ALLOC_FAILED", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


def objects_of(kind: type[_Kind]) -> list[_Kind]:
    """All objects of a class that are still in use, in the whole process."""
    if _existing(kind):  # most processes have none, and a collection looks at all that they have
        gc.collect()
    return _existing(kind)


def _existing(kind: type[_Kind]) -> list[_Kind]:
    """All objects of a class, even those that are no longer in use."""
    objects = gc.get_objects()
    kinds = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in kinds] if kinds else []


def out_of_memory(error: BaseException) -> str:
    """The memory that an error says was asked for, in words; empty for an error about something else."""
    if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not _WORDS.search(str(error)):
        return ""
    asked = _ASKED.search(str(error))
    return asked[1] if asked else "an unknown number of bytes"


def refuse_out_of_memory(error: BaseException) -> None:
    """Raise an error about exhausted memory again: another way to compute the same must not hide it."""
    if out_of_memory(error):
        raise error


def frozen(values: _Array) -> _Array:
    """An array that is kept and given to all who ask, so that none of them can write into it."""
    values.setflags(write=False)
    return values
