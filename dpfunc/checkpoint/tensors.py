"""Parameters and optimizer states as flat tables of tensors, and those tables on disk."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.dtensor import distributed, is_dtensor, local, shard_dims
from dpfunc.checkpoint.format import describe
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.types import Params

PARAMS, OPTIMIZER = "params/", "optimizer/"
METADATA = ".metadata"
Place = tuple[str | int, ...]


class Slot(NamedTuple):
    """Place of a tensor in an optimizer state.

    Args:
        name: of the saved tensor. place: keys that lead to it. cut: True if processes held different shards.
    """

    name: str
    place: Place
    cut: bool


def encode(value: Any, tensors: dict[str, Tensor], place: Place = ()) -> dict[str, Any]:  # noqa: ANN401  (a pytree)
    """An optimizer state as JSON values; its tensors are put into `tensors`.

    Raises:
        InvalidArgument: something that is neither a tensor nor a number, string, None, list, tuple or dict.

    >>> tensors = {}
    >>> encode({0: (torch.ones(2), 0.9)}, tensors)["dict"][0][1]["tuple"][1]
    {'value': 0.9}
    >>> tensors
    {'optimizer/0': tensor([1., 1.])}
    """
    if isinstance(value, Tensor):
        name = f"{OPTIMIZER}{len(tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name, "cut": bool(shard_dims(value))}
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return {"dict": [[key, encode(item, tensors, (*place, key))] for key, item in value.items()]}
    for kind in (list, tuple):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, tensors, (*place, index)) for index, item in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise InvalidArgument(
        f"Expected optimizer_state to have tensors, numbers, strings, lists and dicts, got {type(value).__name__} at "
        f"{place}. Convert it: float(x) or int(x) for a number of numpy, list(x) for a deque, x.value for an Enum."
    )


def decode(values: Mapping[str, Any], tensor: Callable[[Slot], Any], place: Place = ()) -> Any:  # noqa: ANN401  (a pytree)
    """Inverse of `encode`, with `tensor(slot)` in place of each tensor."""
    if "tensor" in values:
        return tensor(Slot(values["tensor"], place, values["cut"]))
    if "dict" in values:
        return {key: decode(item, tensor, (*place, key)) for key, item in values["dict"]}
    for name, kind in (("list", list), ("tuple", tuple)):
        if name in values:
            return kind(decode(item, tensor, (*place, index)) for index, item in enumerate(values[name]))
    return values["value"]


def slots(values: Mapping[str, Any]) -> tuple[list[Slot], Any]:
    """All tensors of an encoded optimizer state, and the state with slots in their place."""
    found: list[Slot] = []

    def note(slot: Slot) -> Slot:
        found.append(slot)
        return slot

    return found, decode(values, note)


def owner(slot: Slot, shape: tuple[int, ...], skeleton: Any, params: Params) -> Tensor | None:  # noqa: ANN401
    """The parameter whose layout a tensor of an optimizer state gets: the one that it is about, if they are alike.

    Args:
        slot: of the tensor. shape: of the whole tensor. skeleton: the state with slots in place of tensors. params: as
            the run has them now.

    A state says what it is about with the name of a parameter among its keys, or as the optimizers of torch do: by
    number, in the order in which the optimizer got the parameters, `params.values()` unless it knows their names.
    """
    names = [key for key in slot.place if isinstance(key, str) and key in params]
    if not names and slot.place[:1] == ("state",) and len(slot.place) > 2 and "param_groups" in skeleton:
        groups = skeleton["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        known = [name for group in groups for name in group.get("param_names", ())] or list(params)
        at = dict(zip(numbers, known, strict=False)) if len(numbers) == len(known) else {}
        names = [at[slot.place[1]]] if at.get(slot.place[1]) in params else []
    found = params[names[-1]] if names else None
    return found if found is not None and tuple(found.shape) == shape else None


def empty(like: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room for a tensor, laid out as another; for whole tensors that are like nothing, on the CPU."""
    if like is None:
        return torch.empty(shape, dtype=dtype)
    part = local(like.detach())
    return distributed(torch.empty(part.shape, dtype=dtype, device=part.device), like)


def room(
    skeleton_json: Mapping[str, Any] | None,
    saved: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    params: Params,
    template: Mapping[str, Any] | None,
) -> dict[str, Tensor]:
    """Empty tensors for everything in a checkpoint.

    Args:
        skeleton_json: the encoded optimizer state. saved: name -> type and shape of what is on disk. params: of the run
            now. template: an optimizer state of the same structure whose tensors say how each is laid out.

    Raises:
        CheckpointError: the template has another structure, or nothing says how a tensor is laid out.
    """
    tensors = {PARAMS + name: empty(p, tuple(p.shape), p.dtype) for name, p in params.items()}
    if skeleton_json is None:
        return tensors
    found, skeleton = slots(skeleton_json)
    given: dict[str, Tensor] = {}
    if template is not None:
        like_slots, _ = slots(encode(template, given))
        by_place = {slot.place: given[slot.name] for slot in like_slots}
    for slot in found:
        dtype, shape = saved[slot.name]
        if template is None:
            like = owner(slot, shape, skeleton, params)
            if like is None and slot.cut and any(is_dtensor(p) for p in params.values()):
                raise CheckpointError(
                    f"Expected to know how the optimizer's tensor at {slot.place} is laid out, which was cut into "
                    "parts and is like no parameter. Pass optimizer_state=, a state of the same structure whose "
                    "tensors are laid out as they should be."
                )
        else:
            like = by_place.get(slot.place)
            if like is None or tuple(like.shape) != shape:
                has = "nothing" if like is None else describe(like.dtype, tuple(like.shape))
                raise CheckpointError(
                    f"Expected optimizer_state to have {describe(dtype, shape)} at {slot.place}, as the checkpoint, "
                    f"got {has}. Pass a state of the same structure, or none: most can be laid out as the parameters."
                )
        tensors[slot.name] = empty(like, shape, dtype)
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this process's share of all tensors; collective: all processes of the group write, or none.

    Raises:
        CheckpointError: on all processes, when one could not write.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _translated("written", path):
        save(
            dict(tensors),
            storage_writer=FileSystemWriter(path, overwrite=False, sync_files=True),
            process_group=group,
            no_dist=group is None,
        )


def read_tensors(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill tensors, each process its parts.

    Raises:
        CheckpointError: on all processes, when one could not read.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _translated("read", path):
        load(tensors, storage_reader=FileSystemReader(path), process_group=group, no_dist=group is None)


@contextmanager
def _translated(done: str, path: Path) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:  # not an Exception: it would pass all handlers
        raise CheckpointError(f"The tensors of {path} could not be {done}: {error}.") from error


def read_table(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> type and shape of each tensor in a checkpoint. Runs no code that its file might contain.

    Raises:
        CheckpointError: the file refers to anything but the description of tensors.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with open(path / METADATA, "rb") as file:
        entries = _Unpickler(file).load().state_dict_metadata
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"Expected only tensors in {path}, got {type(entry).__name__} as {name!r}.")
    return {name: (entry.properties.dtype, tuple(entry.size)) for name, entry in entries.items()}


class _Unpickler(pickle.Unpickler):
    """Unpickler of tensor descriptions that refuses every other class."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  (any class)
        allowed = {
            "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
            "torch.serialization": ("_get_layout",),
            "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
        }
        value = getattr(import_module(module), name, None) if module.startswith(("torch", "pathlib")) else None
        described = module == "torch.distributed.checkpoint.metadata" and getattr(value, "__module__", "") == module
        dtype = module == "torch" and (isinstance(value, torch.dtype) or value is torch.Size)
        if name in allowed.get(module, ()) or described or dtype:
            return value
        raise CheckpointError(f"Expected a description of tensors, got {module}.{name}: somebody changed the file.")
