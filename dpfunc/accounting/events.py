"""Kinds of events: the table that ledgers, accountants and files read them by.

A kind is a frozen dataclass: `Event`, or a subclass of it with more fields and a `law` of its own. In a ledger, events
that differ in `num_steps` only are one, so n steps must cost what n times one step costs: what is released as a whole,
over many steps of a run, is one step of a kind whose fields describe all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields, replace
from typing import Any

from dpfunc._utils.validation import apart, fail
from dpfunc.accounting._kinds import ZCDP, Laplace, Opaque
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.types import Allocated, Capped, Event

KINDS: dict[str, type[Event]] = {
    "": Event,
    "allocated": Allocated,
    "capped": Capped,
    "laplace": Laplace,
    "opaque": Opaque,
    "zcdp": ZCDP,
}
"""Name in files -> class. A new kind of event is a file with its class, and a line here."""

OTHER_VERSION = "Use the version of dpfunc that wrote it, or name its journal: before version 2 files had no digest."
_Counts = dict[tuple[Any, ...], tuple[Event, int]]  # name of the kind, other fields -> an event, number of steps


def name_of(event: object) -> str:
    """The name of the kind of an event."""
    for name, kind in KINDS.items():
        if type(event) is kind:
            return name
    raise fail("every element of events to be an Event", "events", event)


def canonical(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same events sorted, those that differ in the number of steps only as one."""
    return _made(_counted(events))


def surplus(events: Iterable[Event], others: Iterable[Event]) -> tuple[Event, ...]:
    """The steps of some events that others do not contain."""
    known = _counted(others)
    left = {key: (event, n - known.get(key, (event, 0))[1]) for key, (event, n) in _counted(events).items()}
    return _made({key: (event, n) for key, (event, n) in left.items() if n > 0})


def _counted(events: Iterable[Event]) -> _Counts:
    steps: _Counts = {}
    for event in events:
        name = name_of(event)
        q, sigma, number, *more = _values(event).values()
        key = (name, q, sigma, *more)
        first, before = steps.get(key, (event, 0))
        steps[key] = first, before + number
    return steps


def _made(counts: _Counts) -> tuple[Event, ...]:
    return tuple(e if e.num_steps == n else replace(e, num_steps=n) for _, (e, n) in sorted(counts.items()))


def _values(event: Event) -> dict[str, Any]:
    """All fields: the sampling probability, the noise multiplier and the number of steps are the first ones."""
    return {each.name: getattr(event, each.name) for each in fields(event)}


def to_values(event: Event) -> dict[str, Any]:
    """An event as a JSON object."""
    name = name_of(event)
    return {**({"kind": name} if name else {}), **_values(event)}


def from_values(values: object) -> Event:
    """The event from `to_values`; unknown kinds, and fields that are missing, unknown or outside their domain, fail."""
    if not isinstance(values, dict):
        raise fail("an event as a JSON object", "event", values)
    kind = KINDS.get(str(values.get("kind", "")))
    if kind is None:
        raise fail(f"a kind of events among {sorted(KINDS)}", "kind", values["kind"], OTHER_VERSION)
    given = dict(values)
    given.pop("kind", None)
    check_fields("event", given, [each.name for each in fields(kind)])
    try:
        event = kind(**{each.name: given[each.name] for each in fields(kind) if each.init})
        for name, value in given.items():  # what the kind sets by itself must be as given
            if getattr(event, name) != value:
                raise fail(f"{name} = {getattr(event, name)!r} in an event of its kind", name, value)
    except DPFuncError as error:
        raise InvalidArgument(f"The ledger holds an event that cannot be: {error}") from error
    return event


def check_fields(what: str, values: Collection[str], expected: Collection[str]) -> None:
    """Raise an error unless a JSON object has exactly the expected fields."""
    missing, unknown = set(expected) - set(values), set(values) - set(expected)
    if missing or unknown:
        raise InvalidArgument(
            f"Expected the fields {', '.join(sorted(expected))} in a {what}, got it {apart(missing, unknown)}. An "
            "unknown field may mean something that this version would ignore."
        )
