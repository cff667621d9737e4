"""Optimizer states on disk: written only if they can be read back without running code."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dpfunc._utils.validation import shorten
from dpfunc.errors import CheckpointError, InvalidArgument

# `bool` and so on exactly: a subclass, such as a number of numpy or an Enum, is stored as a call of its class.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
LISTS = (list, tuple, set)
HINTS = {
    "numpy": "Convert it: float(x) or int(x) for a number, torch.from_numpy(x) for an array.",
    "collections": "Convert it with list(x), or dict(x).",
    "enum": "Store its .value.",
}
OTHER = "Store what it consists of: numbers, strings, tensors, lists and dicts."


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write an optimizer state, and check that `read_values` can read it.

    Args:
        path: of the new file. values: as from `optimizer.state_dict()`.

    Raises:
        InvalidArgument: something in it cannot be read back; its place and type are named, and what to convert.

    Guarantees:
        tests/checkpoint/test_local.py::test_an_optimizer_state_that_cannot_be_read_is_refused_when_it_is_saved.
    """
    try:
        torch.save(dict(values), path)
        torch.load(path, weights_only=True, mmap=True, map_location="meta")  # tensors are not read
    except (pickle.PickleError, TypeError, AttributeError, RecursionError) as error:
        found = list(unreadable(values))
        if not found:
            reason = str(error).partition("\n")[0]
            raise InvalidArgument(f"Expected optimizer_state to have plain values, got others: {reason}.") from error
        kinds = {type(value) for _, value in found}
        hint = " ".join(dict.fromkeys(_hint(kind) for kind in sorted(kinds, key=str)))
        where = shorten([f"{place} of type {_name(type(value))}" for place, value in found])
        raise InvalidArgument(
            f"Expected optimizer_state to have tensors, numbers, strings, lists and dicts, which a load can read "
            f"without running code, got {where}. {hint}"
        ) from error


def read_values(path: Path) -> Mapping[str, Any]:
    """Read what `write_values` wrote.

    Raises:
        CheckpointError: it has something else than plain values and tensors: somebody changed it.
    """
    try:
        values: Mapping[str, Any] = torch.load(path, weights_only=True)
    except (pickle.PickleError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"The file {path} cannot be read without running code that it holds (weights only): it was changed after "
            f"it was saved, or written by another version. {str(error).partition(chr(10))[0]}"
        ) from error
    return values


def unreadable(value: object, place: str = "optimizer_state") -> Iterator[tuple[str, object]]:
    """Place and value of each part of an optimizer state that is not plain.

    >>> [place for place, _ in unreadable({"param_groups": [{"lr": 0.1, "rates": range(3)}]})]
    ["optimizer_state['param_groups'][0]['rates']"]
    """
    if type(value) in PLAIN or isinstance(value, torch.Tensor):
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():  # type: ignore[attr-defined]
            yield from unreadable(key, f"a key of {place}")
            yield from unreadable(item, f"{place}[{key!r}]")
    elif type(value) in LISTS:
        for index, item in enumerate(value):  # type: ignore[arg-type]
            yield from unreadable(item, f"{place}[{index}]")
    else:
        yield place, value


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _hint(kind: type) -> str:
    homes = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return next((hint for home, hint in HINTS.items() if home in homes), OTHER)
