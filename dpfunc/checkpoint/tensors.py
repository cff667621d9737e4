"""Tables of named tensors on disk, of which each process holds its parts, and room to read them into."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.dtensor import distributed, is_dtensor, local
from dpfunc._utils.validation import shorten
from dpfunc.checkpoint.format import METADATA, describe
from dpfunc.checkpoint.values import Slot, encode, slots
from dpfunc.errors import CheckpointError
from dpfunc.types import Params

PARAMS = "params/"
Table = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name -> type and shape of each saved tensor."""


def _owner(slot: Slot, shape: tuple[int, ...], skeleton: Any, params: Params) -> Tensor | None:
    """The parameter whose layout a tensor of a state gets: the one that it is about, if they are alike.

    A state says what it is about with the name of a parameter among its keys, or as the optimizers of torch do, by
    number.
    """
    names = [key for key in slot.place if isinstance(key, str) and key in params]
    if not names and slot.place[:1] == ("state",) and len(slot.place) > 2:
        names = [_numbered(skeleton, params).get(slot.place[1], "")]
    found = params.get(names[-1]) if names else None
    return found if found is not None and tuple(found.shape) == shape else None


def _numbered(skeleton: Any, params: Params) -> dict[object, str]:
    """Names of the parameters that the state of an optimizer numbers; none where their numbers do not fit.

    Numbers are in the order in which the optimizer got the parameters, `params.values()` unless it knows their names.
    """
    groups = skeleton.get("param_groups", ())
    numbers = [number for group in groups for number in group["params"]]
    names = [name for group in groups for name in group.get("param_names", ())] or list(params)
    return dict(zip(numbers, names, strict=True)) if len(numbers) == len(names) else {}


def empty(like: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room for a tensor, laid out as another; for unsharded tensors that are like nothing, on the CPU."""
    if like is None:
        return torch.empty(shape, dtype=dtype)
    part = local(like.detach())
    return distributed(torch.empty(part.shape, dtype=dtype, device=part.device), like)


def room(name: str, encoded: Any, table: Table, params: Params, template: object | None = None) -> dict[str, Tensor]:
    """Empty tensors for those of a saved state.

    Args:
        name: of the argument that is the template, for messages. encoded: the saved state, from `encode`. table: of
            what is on disk. params: of the run now. template: a state of the same structure whose tensors say how each
            is laid out; without one, what is like its parameter is laid out as that, and the rest is not sharded.

    Raises:
        CheckpointError: the template has another structure, or nothing says how a tensor is laid out.
    """
    found, skeleton = slots(encoded)
    given: dict[str, Tensor] = {}
    by_place = {slot.place: given[slot.name] for slot in slots(encode(name, template, given))[0]}
    tensors: dict[str, Tensor] = {}
    for slot in found:
        dtype, shape = table[slot.name]
        if template is None:
            like = _owner(slot, shape, skeleton, params)
            if like is None and slot.sharded and any(is_dtensor(p) for p in params.values()):
                raise CheckpointError(
                    f"Expected to know how the tensor of {name} at {slot.place} is laid out, which was sharded and is "
                    "like no parameter. States of noise need the name and the shape of their parameter; for others "
                    "pass optimizer_state=, a state of the same structure whose tensors are laid out as they should be."
                )
        else:
            like = by_place.get(slot.place)
            if like is None or tuple(like.shape) != shape:
                has = "nothing" if like is None else describe(like.dtype, tuple(like.shape))
                raise CheckpointError(
                    f"Expected {name} to have {describe(dtype, shape)} at {slot.place}, as the checkpoint, got {has}. "
                    "Pass a state of the same structure, or none: most can be laid out as the parameters."
                )
        tensors[slot.name] = empty(like, shape, dtype)
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this process's share of all tensors; collective: all processes of the group write, or an OSError on all."""
    from torch.distributed.checkpoint import state_dict_saver as saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer = FileSystemWriter(path, overwrite=False, sync_files=True)
    save = saver.save if "no_dist" in signature(saver.save).parameters else saver.save_state_dict  # torch < 2.7
    with _translated(OSError):
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def read_tensors(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill tensors, each process its parts; a CheckpointError on all when one could not read."""
    from torch.distributed.checkpoint import state_dict_loader as loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    load = loader.load if "no_dist" in signature(loader.load).parameters else loader.load_state_dict  # torch < 2.7
    with _translated(CheckpointError, f"The tensors of {path} could not be read: "):
        load(tensors, storage_reader=FileSystemReader(path), process_group=group, no_dist=group is None)


@contextmanager
def _translated(kind: type[Exception], what: str = "") -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # one process alone is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            # torch calls what it has deprecated
            warnings.filterwarnings("ignore", ".*_state_dict. is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # its own call, in torch 2.6
            yield
    except CheckpointException as error:  # not an Exception: it would pass all handlers
        causes = [failure for failure, _ in error.failures.values()]
        raise kind(what + shorten([str(cause) for cause in causes])) from error


def read_table(path: Path) -> Table:
    """Type and shape of each tensor in a checkpoint. Runs no code that its file might contain, and refuses it."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with open(path / METADATA, "rb") as file:
        entries = _Unpickler(file).load().state_dict_metadata
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"Expected only tensors in {path}, got {type(entry).__name__} as {name!r}.")
    return {name: (entry.properties.dtype, tuple(entry.size)) for name, entry in entries.items()}


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
        raise CheckpointError(f"Expected a description of tensors, got {module}.{name}: somebody changed the file.")
