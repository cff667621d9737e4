"""States of optimizers and of noise as JSON values, beside a table of named tensors; no code runs when they are read.

May import: its folder, step and below. Privacy depends on it: yes.

Each process writes and reads its parts of the tensors.
"""

import pickle
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.parts import distributed, is_dtensor, local, shard_dims
from dpfunc._utils.validation import refuse, shorten
from dpfunc.checkpoint._format import describe
from dpfunc.checkpoint.folder import METADATA
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.types import Params

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
    "": "Store what it consists of: numbers, strings, tensors, lists and dicts.",
}
_Place = tuple[Any, ...]
PARAMS = "params/"


class _Slot(NamedTuple):
    name: str  # of a saved tensor
    place: _Place  # the keys that lead to it in its state
    sharded: bool  # processes held different shards


def encode(name: str, value: object, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON values; its tensors go into `tensors`. A value that a load cannot read is refused by name."""
    # tests/checkpoint/test_states.py::test_a_state_that_cannot_be_read_is_refused_when_it_is_saved
    unreadable: list[tuple[str, type]] = []

    def part(value: Any, place: str) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            slot = f"{name}/{len(tensors)}"
            tensors[slot] = value.detach()
            return {"tensor": slot, "sharded": bool(shard_dims(value))}
        if kind in _PLAIN:
            return value
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

    try:
        encoded = part(value, name)
    except RecursionError as error:
        raise InvalidArgument(f"Expected {name} to have plain values, got others: nested too deeply.") from error
    if unreadable:
        homes = [{"", *(base.__module__.partition(".")[0] for base in kind.__mro__)} for _, kind in unreadable]
        hints = dict.fromkeys(next(hint for home, hint in _HINTS.items() if home in known) for known in homes)
        where = [
            f"{place} of type {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
            for place, kind in unreadable
        ]
        raise InvalidArgument(
            f"Expected {name} to have tensors, numbers, strings, lists and dicts, which a load can read without "
            f"running code, got {shorten(where)}. {' '.join(hints)}"
        )
    return encoded


def decode(values: Any, tensor: Callable[[_Slot], Any], place: _Place = ()) -> Any:
    """Inverse of `encode`, with `tensor(slot)` in place of each tensor."""
    if not isinstance(values, dict):
        return values
    if "tensor" in values:
        return tensor(_Slot(values["tensor"], place, values["sharded"]))
    ((kind, content),) = values.items()
    if kind in _MAPS:
        pairs = [(decode(key, tensor), item) for key, item in content]
        return _MAPS[kind]({key: decode(item, tensor, (*place, key)) for key, item in pairs})
    return (
        _LISTS[kind]([decode(item, tensor, (*place, index)) for index, item in enumerate(content)])
        if kind in _LISTS
        else _TEXTS[kind][2](content)
    )


def _slots(values: Any) -> tuple[list[_Slot], Any]:
    """All tensors of an encoded state, and the state with slots in their place."""
    found: list[_Slot] = []
    return found, decode(values, lambda slot: found.append(slot) or slot)  # type: ignore[func-returns-value]  # None


def _owner(slot: _Slot, saved: Tensor, skeleton: Any, params: Params) -> Tensor | None:
    """The parameter that a tensor of a state is about, over whose processes it is divided if they are alike.

    Its name is among the keys of the state, or its number, as the optimizers of torch number what they got.
    """
    names = [key for key in slot.place if isinstance(key, str) and key in params]
    if not names and slot.place[:1] == ("state",) and len(slot.place) > 2:
        names = [_numbered(skeleton.get("param_groups", ()), params).get(slot.place[1], "")]
    found = params.get(names[-1]) if names else None
    return found if found is not None and found.shape == saved.shape else None


def _numbered(groups: Any, params: Params) -> dict[object, str]:
    """Names of the parameters that an optimizer numbers; none where its numbers do not fit."""
    numbers = [number for group in groups for number in group["params"]]
    names = [name for group in groups for name in group.get("param_names", ())] or list(params)
    return dict(zip(numbers, names, strict=True)) if len(numbers) == len(names) else {}


def empty(like: Tensor | None, saved: Tensor) -> Tensor:
    """An empty tensor to load into, laid out as another one; without one, an unsharded tensor on the CPU."""
    if like is None:
        return torch.empty_like(saved, device="cpu")
    part = local(like.detach())
    return distributed(torch.empty(part.shape, dtype=saved.dtype, device=part.device), like)


def empties(
    name: str, encoded: Any, table: Mapping[str, Tensor], params: Params, template: object | None = None
) -> dict[str, Tensor]:
    """Empty tensors for those of a saved state, laid out as those of the template, or as `load` says without one."""
    found, skeleton = _slots(encoded)
    given: dict[str, Tensor] = {}
    by_place = {slot.place: given[slot.name] for slot in _slots(encode(name, template, given))[0]}

    def pattern(slot: _Slot, saved: Tensor) -> Tensor | None:
        like = by_place.get(slot.place) if template is not None else _owner(slot, saved, skeleton, params)
        refuse(
            (template is None and like is None and slot.sharded and any(map(is_dtensor, params.values())),
             CheckpointError(
                f"Expected to know how the tensor of {name} at {slot.place} is laid out, which was sharded and is "
                "like no parameter. States of noise need the name and the shape of their parameter; for others "
                "pass optimizer_state=, a state of the same structure whose tensors are laid out as they should be.")),
            (template is not None and (like is None or like.shape != saved.shape), CheckpointError(
                f"Expected {name} to have {describe(saved)} at {slot.place}, as the checkpoint, got "
                f"{'nothing' if like is None else describe(like)}. Pass a state of the same structure, or none: most "
                "can be laid out as the parameters.")),
        )  # fmt: skip
        return like

    return {slot.name: empty(pattern(slot, table[slot.name]), table[slot.name]) for slot in found}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this process's share of all tensors; collective: all processes of the group write, or an OSError on all."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(path, overwrite=False, sync_files=True)
    with _translated(OSError):
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def read_tensors(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill tensors, each process its parts; a CheckpointError on all when one could not read."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _translated(CheckpointError, f"The tensors of {path} could not be read: "):
        load(tensors, storage_reader=FileSystemReader(path), process_group=group, no_dist=group is None)


@contextmanager
def _translated(kind: type[Exception], what: str = "") -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # one process alone is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:  # not an Exception: it would pass all handlers
        raise kind(what + shorten([str(cause) for cause, _ in error.failures.values()])) from error


def read_table(path: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint without their values. Runs no code that its file might contain, and refuses it."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with open(path / METADATA, "rb") as file:
        entries = _Unpickler(file).load().state_dict_metadata
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"Expected only tensors in {path}, got {type(entry).__name__} as {name!r}.")
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta") for name, entry in entries.items()
    }


class _Unpickler(pickle.Unpickler):
    """Unpickler of tensor descriptions that refuses every other class."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
            "torch.serialization": ("_get_layout",),
            "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
        }
        if module == "pathlib._local":  # where Python 3.13 keeps its classes
            module = "pathlib"
        value = getattr(import_module(module), name, None) if module.startswith(("torch", "pathlib")) else None
        described = module == "torch.distributed.checkpoint.metadata" and getattr(value, "__module__", "") == module
        dtype = module == "torch" and (isinstance(value, torch.dtype) or value is torch.Size)
        if name in allowed.get(module, ()) or described or dtype:
            return value
        raise CheckpointError(f"Expected a description of tensors, got {module}.{name}: the file was changed.")
