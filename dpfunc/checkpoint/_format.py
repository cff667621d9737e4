"""A run as JSON values: its state, its plan, and how two of them differ.

May import: its folder, step and below. Privacy depends on it: yes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dpfunc import clipping, noise, sampling
from dpfunc._utils.validation import shorten, wrong_type
from dpfunc.accounting import Ledger
from dpfunc.accounting.events import KINDS
from dpfunc.accounting.record import UNKNOWN
from dpfunc.checkpoint.journal import Taken, charged_for
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.plan import Plan
from dpfunc.rng import Key
from dpfunc.state import StepState, plan_digest
from dpfunc.types import Batch, Schedule

SCHEMA = 3
_PLAN_SCHEMA = 1
_PUBLIC = [getattr(folder, name) for folder in (clipping, sampling, noise) for name in folder.__all__]
# What a saved plan may hold, beside events: all dataclasses among the public names of these folders.
_PARTS = {cls for cls in (Plan, Schedule, Ledger, *_PUBLIC) if is_dataclass(cls)}
# Fields of a state that are JSON values.
_KEPT = ("step", "limit", "charged", "drawn", "num_records", "released", "telemetry", "clip_state", "facts")


def data_fingerprint(data: Batch | str, key: Key) -> str:
    """A fingerprint of a data set that says nothing to who lacks the key: keyed BLAKE2b over all bytes and shapes."""
    digest = hashlib.blake2b(key=key.secret, digest_size=16)
    if isinstance(data, str):
        digest.update(b"name" + data.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
    for path, leaf in pytree.tree_leaves_with_path(data):
        if not isinstance(leaf, torch.Tensor):
            raise wrong_type("data to be a pytree of tensors, or a string that names it", "data", leaf)
        digest.update(f"{pytree.keystr(path)}{leaf.dtype}{tuple(leaf.shape)}".encode())
        digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_to_dict(state: StepState, data: str = "", extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A state as JSON values, with its key, and without that of the noise mechanism, which can have tensors."""
    try:
        json.dumps(dict(extra or {}))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"Expected extra to hold JSON values, got others: {error}.") from error
    return {
        "schema": SCHEMA,
        **{name: getattr(state, name) for name in _KEPT},
        "key": state.key.secret.hex(),
        "guessable": state.key.guessable,
        "ledger": json.loads(state.ledger.to_json()),
        "data": data,
        "extra": dict(extra or {}),
    }


def state_from_dict(values: Mapping[str, Any], plan: Plan, taken: Mapping[int, Taken]) -> StepState:
    """The state from `state_to_dict`, charged for every step in the journal, which may be repeated bit for bit."""
    later = {number: line.release for number, line in taken.items() if number >= values["step"]}
    known = {"clip_state": None, "facts": UNKNOWN if values["step"] else (), **values}  # old files lack these
    kept = {name: known[name] for name in _KEPT} | {"facts": tuple(known["facts"])}
    kept["released"] = tuple(sorted({**dict(values["released"]), **later}.items()))
    state = StepState(
        **kept, key=Key(bytes.fromhex(values["key"]), guessable=bool(values["guessable"])), noise_state=(),
        ledger=Ledger.from_json(json.dumps(values["ledger"])), plan=plan_digest(plan),
    )  # fmt: skip
    return charged_for(state, plan, taken)


def key_of(values: Mapping[str, Any]) -> Key:
    """The key of a saved state, for fingerprints."""
    return Key(bytes.fromhex(values["key"]))


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, each dataclass with its kind; parts that are not dpfunc's own cannot be described."""
    return {"schema": _PLAN_SCHEMA, **_encoded(plan)}


def _encoded(value: Any) -> Any:
    if type(value) in _PARTS or type(value) in KINDS.values():
        return {
            "kind": type(value).__name__,
            **{f.name: _encoded(getattr(value, f.name)) for f in fields(value) if f.compare},
        }
    match value:
        case Mapping():
            return {"kind": "mapping", "items": {str(name): _encoded(item) for name, item in value.items()}}
        case tuple():
            return [_encoded(item) for item in value]
        case bool() | int() | float() | str() | None:
            return value
    raise InvalidArgument(
        f"Expected a plan of dpfunc's own parts, got {type(value).__name__}, which JSON cannot describe. Steps can be "
        "taken and a journal written with it, checkpoints not: they hold the public dataclasses of dpfunc.clipping, "
        "dpfunc.sampling and dpfunc.noise."
    )


def plan_difference(ours: Plan, theirs: Mapping[str, Any]) -> list[str]:
    """One line for each field in which a saved plan differs from ours; empty when they agree."""
    return difference(_leaves(dict(theirs)), _leaves(json.loads(json.dumps(plan_to_dict(ours)))), repr)


def _leaves(value: object, path: str = "plan") -> dict[str, Any]:
    if isinstance(value, dict):
        pairs = {f"{path}.{name}": item for name, item in value.items()}
    elif isinstance(value, list):
        pairs = {f"{path}[{index}]": item for index, item in enumerate(value)}
    else:
        return {path: value}
    return {name: leaf for inner, item in pairs.items() for name, leaf in _leaves(item, inner).items()}


def describe(tensor: torch.Tensor) -> str:
    """Type and shape of a tensor in words, e.g. `float32 (3, 2)`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def difference(saved: Mapping[str, Any], now: Mapping[str, Any], show: Callable[[Any], str] = str) -> list[str]:
    """One line for each name whose value differs."""
    pairs = {name: (saved.get(name, "absent"), now.get(name, "absent")) for name in sorted(saved.keys() | now.keys())}
    return [f"{name}: saved {show(was)}, now {show(has)}" for name, (was, has) in pairs.items() if was != has]


def refuse(what: str, path: Path, lines: list[str]) -> None:
    """Refuse a checkpoint of another run if there are any lines of differences."""
    if lines:
        raise CheckpointError(
            f"The checkpoint {path} belongs to another {what}: {shorten(lines)}. Resume with what the run was "
            "started with, or start a new run whose ledger contains the old one: dp_step.init(params, key, ledger)."
        )
