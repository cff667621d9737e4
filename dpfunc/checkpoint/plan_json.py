"""Plans as JSON, so that a checkpoint can tell whether it belongs to a plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import NoneType
from typing import Any

from dpfunc import clipping, noise, sampling
from dpfunc._utils.validation import apart
from dpfunc.accounting import Ledger
from dpfunc.checkpoint.format import difference
from dpfunc.errors import InvalidArgument
from dpfunc.plan import Plan
from dpfunc.types import Event, Schedule

SCHEMA = 1
_PUBLIC = [getattr(folder, name) for folder in (clipping, sampling, noise) for name in folder.__all__]
_KNOWN: dict[str, type] = {
    cls.__name__: cls
    for cls in (Plan, Schedule, Ledger, Event, *_PUBLIC)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls)
}
"""What a saved plan may hold: its own classes, and all dataclasses among the public names of these folders."""

_LATER: dict[str, dict[str, Any]] = {"Plan": {"noise": noise.Gaussian()}}
"""Fields that plans saved before did not have, and what they mean where they are left out."""


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, each dataclass with its kind.

    Raises:
        InvalidArgument: a clip rule, grouping or sampler that is not dpfunc's own, which JSON cannot describe.

    >>> from dpfunc import clipping, sampling
    >>> plan = Plan(sampling.Poisson(1000, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=10, delta=1e-5)
    >>> plan_from_dict(plan_to_dict(plan)) == plan
    True
    """
    return {"schema": SCHEMA, **_encode(plan)}


def plan_from_dict(values: Mapping[str, Any]) -> Plan:
    """The plan from `plan_to_dict`; every value is checked again.

    Raises:
        InvalidArgument: another schema, an unknown kind, unknown or missing fields.
    """
    if values.get("schema") != SCHEMA:
        raise InvalidArgument(f"Expected a plan with schema {SCHEMA}, got schema={values.get('schema')!r}.")
    plan = _decode({name: value for name, value in values.items() if name != "schema"})
    if not isinstance(plan, Plan):
        raise InvalidArgument(f"Expected a plan, got kind={values.get('kind')!r}.")
    return plan


def plan_difference(ours: Plan, theirs: Mapping[str, Any]) -> list[str]:
    """One line for each field in which a saved plan differs from ours; empty when they agree."""
    return difference(_leaves(dict(theirs)), _leaves(json.loads(json.dumps(plan_to_dict(ours)))), repr)


def _encode(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        if _KNOWN.get(kind) is not type(value):
            raise _not_ours(kind)
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        later = _LATER.get(kind, {})
        return {
            "kind": kind,
            **{name: _encode(item) for name, item in given.items() if name not in later or item != later[name]},
        }
    if isinstance(value, Mapping):
        return {"kind": "mapping", "items": {str(name): _encode(item) for name, item in value.items()}}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, (bool, int, float, str, NoneType)):
        return value
    raise _not_ours(type(value).__name__)


def _not_ours(kind: str) -> InvalidArgument:
    return InvalidArgument(
        f"Expected a plan of dpfunc's own parts, got {kind}, which JSON cannot describe. Steps can be taken and "
        "a journal written with it, checkpoints not: they hold the public dataclasses of dpfunc.clipping, "
        "dpfunc.sampling and dpfunc.noise."
    )


def _decode(value: object) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if kind == "mapping":
        return {name: _decode(item) for name, item in value["items"].items()}
    cls = _KNOWN.get(str(kind))
    if cls is None:
        raise InvalidArgument(f"Expected a known kind in a plan, got kind={kind!r}. Known: {', '.join(_KNOWN)}.")
    fields = {field.name for field in dataclasses.fields(cls)}
    given = set(value) - {"kind"}
    if given - fields or fields - given - _LATER.get(cls.__name__, {}).keys():
        raise InvalidArgument(
            f"Expected the fields {', '.join(sorted(fields))} of {kind}, got it "
            f"{apart(fields - given, given - fields)}."
        )
    return cls(**{name: _decode(value[name]) for name in sorted(given)})


def _leaves(value: object, path: str = "plan") -> dict[str, Any]:
    if isinstance(value, dict):
        pairs = [(f"{path}.{name}", item) for name, item in value.items()]
    elif isinstance(value, list):
        pairs = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for inner, item in pairs for name, leaf in _leaves(item, inner).items()}
