"""States of optimizers and of noise as JSON values beside a table of tensors: read back without running code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfunc._utils.dtensor import shard_dims
from dpfunc._utils.validation import shorten
from dpfunc.errors import InvalidArgument

# Each type exactly: a subclass, such as a number of numpy or an Enum, would come back as something else.
_PLAIN = (type(None), bool, int, float, str)
_MAPS: dict[str, Any] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_LISTS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, torch.Size)}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "complex": (complex, str, complex),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "dtype": (torch.dtype, str, _DTYPES.__getitem__),
    "device": (torch.device, str, torch.device),
}
_HINTS = {
    "numpy": "Convert it: float(x) or int(x) for a number, torch.from_numpy(x) for an array.",
    "collections": "Convert it with list(x), or dict(x).",
    "enum": "Store its .value.",
}
_OTHER = "Store what it consists of: numbers, strings, tensors, lists and dicts."
_Place = tuple[Any, ...]


class Slot(NamedTuple):
    """Place of a tensor in a state.

    Args:
        name: of the saved tensor. place: keys that lead to it. sharded: True if processes held different shards.
    """

    name: str
    place: _Place
    sharded: bool


def encode(name: str, value: object, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON values; its tensors are put into `tensors`.

    Args:
        name: of the state, for names of tensors and messages. value: of the state. tensors: saved beside the values.

    Raises:
        InvalidArgument: something in it cannot be read back; its place and type are named, and what to convert.

    Guarantees:
        tests/checkpoint/test_one_process.py::test_an_optimizer_state_that_cannot_be_read_is_refused_when_it_is_saved.

    >>> tensors = {}
    >>> encode("optimizer_state", {0: (torch.ones(2), 0.9)}, tensors)["dict"][0][1]["tuple"][1]
    0.9
    >>> tensors
    {'optimizer_state/0': tensor([1., 1.])}
    """
    unreadable: list[tuple[str, type]] = []
    try:
        encoded = _encoded(name, value, tensors, name, unreadable)
    except RecursionError as error:
        raise InvalidArgument(f"Expected {name} to have plain values, got others: nested too deeply.") from error
    if unreadable:
        hint = " ".join(dict.fromkeys(_hint(kind) for kind in sorted({kind for _, kind in unreadable}, key=str)))
        where = shorten([f"{place} of type {_name(kind)}" for place, kind in unreadable])
        raise InvalidArgument(
            f"Expected {name} to have tensors, numbers, strings, lists and dicts, which a load can read without "
            f"running code, got {where}. {hint}"
        )
    return encoded


def _encoded(name: str, value: Any, tensors: dict[str, Tensor], place: str, unreadable: list[tuple[str, type]]) -> Any:
    """JSON values of a part of a state; the place and the type of what is not plain go into `unreadable`."""
    kind = type(value)
    if isinstance(value, Tensor):
        slot = f"{name}/{len(tensors)}"
        tensors[slot] = value.detach()
        return {"tensor": slot, "sharded": bool(shard_dims(value))}
    if kind in _PLAIN:
        return value

    def part(item: object, where: str) -> Any:
        return _encoded(name, item, tensors, where, unreadable)

    if kind in _MAPS.values():
        pairs = [[part(key, f"a key of {place}"), part(item, f"{place}[{key!r}]")] for key, item in value.items()]
        return {kind.__name__: pairs}
    if kind in _LISTS.values():
        return {kind.__name__: [part(item, f"{place}[{index}]") for index, item in enumerate(value)]}
    for text, (kind_of_text, written, _) in _TEXTS.items():
        if kind is kind_of_text:
            return {text: written(value)}
    unreadable.append((place, kind))
    return None


def decode(values: Any, tensor: Callable[[Slot], Any], place: _Place = ()) -> Any:
    """Inverse of `encode`, with `tensor(slot)` in place of each tensor."""
    if not isinstance(values, dict):
        return values
    if "tensor" in values:
        return tensor(Slot(values["tensor"], place, values["sharded"]))
    ((kind, content),) = values.items()
    if kind in _MAPS:
        pairs = [(decode(key, tensor), item) for key, item in content]
        return _MAPS[kind]({key: decode(item, tensor, (*place, key)) for key, item in pairs})
    if kind in _LISTS:
        return _LISTS[kind]([decode(item, tensor, (*place, index)) for index, item in enumerate(content)])
    return _TEXTS[kind][2](content)


def slots(values: Any) -> tuple[list[Slot], Any]:
    """All tensors of an encoded state, and the state with slots in their place."""
    found: list[Slot] = []

    def note(slot: Slot) -> Slot:
        found.append(slot)
        return slot

    return found, decode(values, note)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _hint(kind: type) -> str:
    homes = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return next((hint for home, hint in _HINTS.items() if home in homes), _OTHER)
