"""Records of a data set: read by index, collated as copies, and recognised by a digest of their contents.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import copy
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from pickle import PickleError
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpfunc.batches import filled
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.types import Batch

# Records that are read to recognise a data set, and to see whether reading it twice gives the same.
_WHOLE = 1_000_000  # of a list or tuple: measured 8 us for a text of 100 words, 70 us for ids and mask of 128 tokens
_WHOLE_ELSEWHERE = 20_000  # of a data set that may read, tokenize or decode each
_RECOGNISED = 1024  # of larger ones
_PROBED = 16  # at once
_NUMBERS = frozenset((int, float, bool))
_UNCOPIED = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, OSError, copy.Error, PickleError)
# Records may name files of images or sound, which are read when the record is drawn.
_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm",
          ".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a")  # fmt: skip
# What bytes are of, beside their type: an image of 2 x 3 has those of one of 3 x 2.
_OF_BYTES = ("mode", "size", "shape", "typecode")


def read(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The records of a data set at these indices, read at once where it has `__getitems__`."""
    at_once = getattr(dataset, "__getitems__", None)
    return list(at_once(list(indices))) if at_once else [dataset[index] for index in indices]


def data_name(dataset: Any) -> str:
    """A digest by which a resumed run recognises its data: the length, and what is in the records.

    All records are read of a list or tuple of up to a million, and of another data set of up to 20000; files of images
    and sound that they name are read too. Of larger ones 1024 records: that catches another split, order or version.

    Args:
        dataset: a data set with a length and an index; its records are read with torch's generator seeded.

    Returns:
        The number of records and a digest. Private: with it a guess of the records can be checked.

    Guarantees:
        tests/sampling/test_records.py::test_a_change_of_any_record_is_another_data_set.

    >>> data_name([1.0, 2.0]) == data_name([1.0, 2.5])
    False
    """
    known = _WHOLE if isinstance(dataset, (list, tuple)) else _WHOLE_ELSEWHERE
    indices = range(len(dataset)) if len(dataset) <= known else spread(len(dataset), _RECOGNISED)
    state = hashlib.blake2b(digest_size=16)
    with torch_seed(insecure_key(0), accelerators=False):
        for at in range(0, len(indices), _RECOGNISED):
            for record in read(dataset, indices[at : at + _RECOGNISED]):
                _update(state, record)
    return f"{len(dataset)} records {state.hexdigest()}"


def batches_name(dataset: Any, collate: Callable[[list[Any]], Batch]) -> str:
    """A digest by which processes compare their data sets: the length, and the batches of up to 1024 records.

    Guarantees:
        tests/sampling/test_loader.py::test_another_order_has_another_name.
    """
    indices = spread(len(dataset), _RECOGNISED)
    parts = [_digest_of(dataset, collate, indices[at : at + _PROBED]) for at in range(0, len(indices), _PROBED)]
    return f"{len(dataset)} records {digest(parts)}"


def _digest_of(dataset: Any, collate: Callable[[list[Any]], Batch], indices: Sequence[int]) -> str:
    with torch_seed(insecure_key(0), accelerators=False):
        return digest(collate(read(dataset, indices)))


def check_repeatable(dataset: Any, collate: Callable[[list[Any]], Batch]) -> None:
    """Check that reading and collating can be repeated: a resumed run must repeat the steps that it has paid for."""
    once, again = (_digest_of(dataset, collate, spread(len(dataset), _PROBED)) for _ in range(2))
    if once != again:
        raise InvalidArgument(
            "Expected the data set and the collator to give the same records when they are read twice with torch's "
            "generator seeded alike, got different ones: they draw from Python's, numpy's or their own generator. A "
            "run that is resumed repeats steps with the same noise, so the batch must be the same too. Use torch's "
            "generator for random augmentation and masking."
        )


class _Cloning(TorchFunctionMode):
    """Mode in which a deep copy of a tensor has its numbers: torch's own copies all the memory that it is a view of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = func is Tensor.__deepcopy__ and type(args[0]) is Tensor and not args[0].__dict__
        return args[0].clone() if plain and not args[0].requires_grad else func(*args, **(kwargs or {}))


def collated(collate: Callable[[list[Any]], Batch], records: Sequence[Any]) -> Batch | None:
    """A batch of copies, as a collate function may change its records; None where they cannot be copied."""
    try:
        with _Cloning():
            copied = [copy.deepcopy(record) for record in records]
    except _UNCOPIED:  # open files, locks, tensors of a graph
        return None
    batch = collate(copied)
    return dict(batch) if isinstance(batch, Mapping) else batch


def spread(length: int, count: int) -> list[int]:
    """At most `count` indices, evenly spread over a length, the first and the last one included."""
    return sorted({int(index) for index in np.linspace(0, length - 1, min(length, count))})


def digest(value: object) -> str:
    """A digest of nested records of tensors, arrays, values of Python, images and dataclasses; of the rest the type."""
    state = hashlib.blake2b(digest_size=16)
    _update(state, value)
    return state.hexdigest()


def _update(state: hashlib.blake2b, value: Any) -> None:
    state.update(type(value).__name__.encode() + b";")
    match value:
        # a file that the record names: by its contents and its own name, wherever its folder is
        case str() | PurePath() if str(value).lower().endswith(_FILES) and os.path.isfile(value):
            state.update(repr(PurePath(str(value)).name).encode())
            with open(str(value), "rb") as file:
                state.update(hashlib.file_digest(file, "sha256").digest())
        case (
            None | bool() | int() | float() | complex() | Decimal() | str() | bytes() | PurePath()
            | date() | time() | timedelta()
        ):  # fmt: skip
            state.update(repr(value).encode())
        case list() | tuple() if _NUMBERS.issuperset(map(type, value)):  # tokens: at once, many times faster
            state.update(f"{len(value)}:{value!r}".encode())
        case list() | tuple():
            state.update(f"{len(value)}:".encode())
            for item in value:
                _update(state, item)
        case set() | frozenset():
            _update(state, sorted(map(digest, value)))
        case Tensor():
            _update(state, filled(value.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        case np.ndarray() if value.dtype.hasobject:  # its bytes are addresses
            _update(state, value.tolist())
        case np.ndarray():
            state.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        case Mapping():
            state.update(f"{len(value)}:".encode())
            for name in sorted(value, key=str):
                state.update(f"{name}:".encode())
                _update(state, value[name])
        case _ if is_dataclass(value) and not isinstance(value, type):
            _update(state, {each.name: getattr(value, each.name) for each in fields(value)})
        case _ if callable(getattr(value, "tobytes", None)):  # images, numpy scalars
            _update(state, [getattr(value, name, None) for name in _OF_BYTES])
            palette = getattr(value, "getpalette", lambda: None)()
            state.update(repr(palette).encode() + value.tobytes())
