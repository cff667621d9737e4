"""Ledger of the privacy spent: a set of events that composes by addition, and how files hold it.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, cast

from dpfunc._utils.validation import apart, below_one, expect, fail, integer, one_of, signed, unique_json, unsigned
from dpfunc.accounting.accountant import METHODS, Guarantee, cached_epsilon
from dpfunc.accounting.events import KINDS
from dpfunc.errors import DPFuncError, InvalidArgument, LedgerConflict
from dpfunc.types import ADJACENCIES, Adjacency, Event, Schedule, schedule_at, stretches

OTHER_VERSION = "Use the version of dpfunc that wrote it, or name its journal: before version 2 files had no digest."
_Counts = dict[tuple[Any, ...], tuple[Event, int]]  # name of the kind, other fields -> an event, number of steps
_SCHEMA = "dpfunc.ledger/2"
_SHOWN_EVENTS = 4


@dataclass(frozen=True)
class Ledger:
    """All releases about one data set, in a canonical form: the order in which they happened does not matter.

    Composition is commutative and associative, and the empty ledger of the same adjacency is its identity. A ledger is
    a value, and holds public facts only.

    Args:
        events: what was released; stored sorted, with equal kinds merged.
        adjacency: which data sets are neighbours. Noise multipliers are relative to the sensitivity under it (C, and
            2 C under replace_one).

    Raises:
        InvalidArgument: an element that is not an `Event`, or an unknown adjacency.

    Guarantees:
        tests/accounting/test_ledger.py::test_composition_laws, ::test_json_round_trip_is_exact;
        tests/checkpoint/test_journal.py::test_no_flipped_bit_changes_what_is_spent.

    >>> step = Event(sampling_prob=0.01, noise_multiplier=1.0, num_steps=1)
    >>> Ledger().record(step).record(step)
    Ledger(2 steps, add_remove: (q=0.01, sigma=1) x 2)
    """

    events: tuple[Event, ...] = ()
    adjacency: Adjacency = "add_remove"
    _budget: Any = field(default=None, repr=False, compare=False)  # whose charges these are: see `Budget.spent`

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", canonical(self.events))
        one_of("adjacency", self.adjacency, ADJACENCIES)
        for event in self.events:
            if self.adjacency not in (allowed := getattr(event, "adjacencies", ADJACENCIES)):
                raise fail(f"adjacency {' or '.join(allowed)} for {event!r}", "adjacency", self.adjacency)

    @property
    def num_steps(self) -> int:
        """The number of steps of all events together."""
        return sum(event.num_steps for event in self.events)

    @functools.cached_property
    def law(self) -> tuple[Event, ...]:
        """Events that cost at least as much as all, each with a law that accountants know: what they read."""
        return canonical(step for event in self.events for step in event.law())

    def record(self, event: Event) -> Ledger:
        """This ledger with one event more."""
        return Ledger((*self.events, event), self.adjacency)

    def compose(self, *others: Ledger) -> Ledger:
        """This ledger and the others together, see `compose`."""
        return compose(self, *others)

    def __add__(self, other: Ledger) -> Ledger:
        return compose(self, other)

    def epsilon(self, delta: float, method: str = "auto", *, fine: bool = False) -> Guarantee:
        """Compute the epsilon that this ledger costs at `delta`, see `dpfunc.accounting.epsilon`."""
        return epsilon(self, delta, method, fine=fine)

    def beyond(self, other: Ledger) -> Ledger:
        """The steps of this ledger that another one of the same adjacency does not contain.

        >>> Ledger((Event(0.1, 1.0, 5), Event(0.2, 1.0, 1))).beyond(Ledger((Event(0.1, 1.0, 3),)))
        Ledger(3 steps, add_remove: (q=0.1, sigma=1) x 2 + (q=0.2, sigma=1) x 1)
        """
        return Ledger(surplus(self.events, other.events), self.adjacency)

    def lacks(self, other: Ledger) -> int:
        """Number of steps of another ledger of the same adjacency that this one does not contain.

        >>> Ledger((Event(0.1, 1.0, 3),)).lacks(Ledger((Event(0.1, 1.0, 5), Event(0.2, 1.0, 1))))
        3
        """
        return other.beyond(self).num_steps

    def to_json(self) -> str:
        """The ledger as JSON, with its schema and a digest; floats are written so that they read back exactly."""
        values = {"schema": _SCHEMA, "adjacency": self.adjacency, "events": [*map(to_values, self.events)]}
        return json.dumps(signed(values))

    @classmethod
    def from_json(cls, text: str | bytes) -> Ledger:
        """Read a ledger that `to_json` wrote.

        Raises:
            InvalidArgument: not JSON, another schema or digest, or a field that is missing, unknown, there twice or
                outside its domain. Nothing is repaired: a ledger that lost an event would under-report.

        >>> ledger = Ledger((Event(0.1, 1.0, 10),), "replace_one")
        >>> Ledger.from_json(ledger.to_json()) == ledger
        True
        """
        values = unsigned("ledger", parsed(text, "a ledger", _SCHEMA))
        check_fields("a ledger", values, ("schema", "adjacency", "events"))
        expect(isinstance(values["events"], list), "a list of events", "events", values["events"])
        return cls(tuple(map(from_values, values["events"])), cast(Adjacency, values["adjacency"]))

    def __repr__(self) -> str:
        kinds = [_shown(event) for event in self.events[:_SHOWN_EVENTS]]
        if len(self.events) > _SHOWN_EVENTS:
            kinds.append(f"{len(self.events) - _SHOWN_EVENTS} kinds more")
        return f"Ledger({self.num_steps} steps, {self.adjacency}: {' + '.join(kinds) or 'nothing spent'})"


def _shown(event: Event) -> str:
    values = to_values(event)
    kind, steps = values.pop("kind", ""), values.pop("num_steps")
    names = {"sampling_prob": "q", "noise_multiplier": "sigma"}
    shown = (f"{names.get(name, name)}={in_short(value)}" for name, value in values.items())
    return f"{kind}({', '.join(shown)}) x {steps}"


def in_short(value: Any) -> str:
    """A number of an event in six digits, or several."""
    return f"{value:g}" if isinstance(value, float | int) else f"[{', '.join(map(in_short, value))}]"


def compose(*ledgers: Ledger) -> Ledger:
    """All that several ledgers over the same data have spent.

    Args:
        ledgers: at least one, all of the same adjacency.

    Raises:
        LedgerConflict: adjacencies that differ; epsilons of different meaning cannot be added up.
        InvalidArgument: no ledgers, or something else.

    >>> compose(Ledger((Event(0.1, 1.0, 10),)), Ledger((Event(0.1, 1.0, 5),)))
    Ledger(15 steps, add_remove: (q=0.1, sigma=1) x 15)
    """
    if not ledgers:
        raise InvalidArgument("Expected at least one ledger to compose, got none.")
    for ledger in ledgers:
        expect(isinstance(ledger, Ledger), "a Ledger", "ledger", ledger)
    adjacencies = sorted({ledger.adjacency for ledger in ledgers})
    if len(adjacencies) > 1:
        raise LedgerConflict(
            f"Expected ledgers of one adjacency, got {' and '.join(adjacencies)}. Their noise multipliers are relative "
            "to different sensitivities and their epsilons compare different neighbours: account for each apart."
        )
    return Ledger(tuple(event for ledger in ledgers for event in ledger.events), ledgers[0].adjacency)


def epsilon(ledger: Ledger, delta: float, method: str = "auto", *, fine: bool = False) -> Guarantee:
    """The epsilon that a ledger costs at `delta`: an upper bound, and how it was found.

    Args:
        ledger: what was released.
        delta: 0 <= delta < 1; choose it below 1 / number of records. At 0 only pure events have a finite epsilon.
        method: `auto`: exact where every record is in every batch, else the smaller of `tilted` and `rdp`.
            `tilted`: numerical composition, within 1e-3 of the truth (relative), nearly always 1e-4, for delta >=
            1e-200 and noise multipliers >= 0.05. `prv`: numerical composition, about 0.01 (or 2 %) above the truth;
            refused for delta < 1e-9 and where its grid does not fit. `rdp`: Renyi, always possible, typically 5-30 %
            above. `gaussian`: exact, for sampling_prob = 1 only. `gdp-approximation`: a central limit that
            UNDER-REPORTS, by up to 550 times; to compare with older reports, never for a budget.
        fine: compute the bound by `tilted` once more, on a lattice of up to two million points: within 1e-6 of the
            truth (relative) where these are enough, up to some 10,000 steps; in .01 to 2 seconds.

    Returns:
        A `Guarantee`. It depends on public facts only. Equal ledgers give the same answer (it is cached).

    Raises:
        InvalidArgument: delta or method outside its domain, or a method that cannot answer for this ledger.

    Guarantees:
        never below the truth (tests/accounting/test_reference.py::test_never_below_the_truth), and `tilted` hardly
        above it (tests/accounting/test_tilted.py::test_random_ledgers_against_the_inversion; `fine`:
        tests/accounting/test_lattice.py::test_random_ledgers_against_the_inversion,
        tests/accounting/test_reference.py::test_random_plans_are_between_the_estimates_of_a_peer);
        no warning of numpy or scipy (tests/accounting/test_accountant.py::test_no_warning_leaks).

    >>> events = (Event(sampling_prob=0.01, noise_multiplier=1.0, num_steps=1000),)
    >>> print(f"{epsilon(Ledger(events), delta=1e-5).epsilon:.2f}")
    1.83
    """
    expect(isinstance(ledger, Ledger), "a Ledger", "ledger", ledger, "Use Ledger((Event(...), ...)).")
    one_of("method", method, METHODS)
    return cached_epsilon(ledger.law, ledger.adjacency, below_one("delta", delta), method, fine)


def schedule_ledger(
    sampling_prob: float | Schedule,
    noise_multiplier: float | Schedule,
    num_steps: int,
    adjacency: Adjacency = "add_remove",
) -> Ledger:
    """Build the ledger of `num_steps` steps; the time it takes grows with the pieces, not with the steps.

    Args:
        sampling_prob: 0 < q <= 1, or a schedule of it. noise_multiplier: >= 0, or a schedule of it.
        num_steps: steps of the run, >= 0; the last value goes on. adjacency: which data sets are neighbours.

    Guarantees:
        equals the ledger of the single steps (tests/test_types.py::test_pieces_equal_single_steps).

    >>> schedule_ledger(0.1, Schedule(((100, 1.2), (200, 0.9))), num_steps=150)
    Ledger(150 steps, add_remove: (q=0.1, sigma=0.9) x 50 + (q=0.1, sigma=1.2) x 100)
    """
    spans = stretches(0, integer("num_steps", num_steps), sampling_prob, noise_multiplier)
    events = [Event(schedule_at(sampling_prob, a), schedule_at(noise_multiplier, a), b - a) for a, b in spans]
    return Ledger(tuple(events), adjacency)


def _name_of(event: object) -> str:
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
        name = _name_of(event)
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
    name, usual = _name_of(event), _defaults(type(event))
    values = {key: value for key, value in _values(event).items() if key not in usual or value != usual[key]}
    return {**({"kind": name} if name else {}), **values}


def _defaults(kind: type[Event]) -> dict[str, Any]:
    """Fields that a file need not have, with their values; older files do not have them."""
    usual = {each.name: each.default for each in fields(kind) if each.init and each.default is not MISSING}
    return {name: value for name, value in usual.items() if name != "sampling_prob"}


def from_values(values: object) -> Event:
    """The event from `to_values`; unknown kinds, and fields that are missing, unknown or outside their domain, fail."""
    if not isinstance(values, dict):
        raise fail("an event as a JSON object", "event", values)
    kind = KINDS.get(str(values.get("kind", "")))
    if kind is None:
        raise fail(f"a kind of events among {sorted(KINDS)}", "kind", values["kind"], OTHER_VERSION)
    given = {**_defaults(kind), **{name: value for name, value in values.items() if name != "kind"}}
    check_fields("an event", given, [each.name for each in fields(kind)])
    try:
        event = kind(**{each.name: given[each.name] for each in fields(kind) if each.init})
        for name, value in given.items():  # what the kind sets by itself must be as given
            own = getattr(event, name)
            same = own == (tuple(value) if isinstance(own, tuple) else value)
            expect(same, f"{name} = {own!r} in an event of its kind", name, value)
    except DPFuncError as error:
        raise InvalidArgument(f"The ledger holds an event that cannot be: {error}") from error
    return event


def check_fields(what: str, values: Collection[str], expected: Collection[str]) -> None:
    """Raise an error unless a JSON object has exactly the expected fields."""
    if differ := apart(set(expected) - set(values), set(values) - set(expected)):
        raise InvalidArgument(
            f"Expected the fields of {what}, got it {differ}. The file was changed, or is of another version, and an "
            "unknown field may mean something that this version would ignore."
        )


def parsed(text: str | bytes, expected: str, *schemas: str, hint: str = OTHER_VERSION) -> Any:
    """Values of a JSON text in which no field is there twice; an object of one of the schemas, if there are some."""
    try:
        values = unique_json(text)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"Expected {expected} as JSON: {error}.") from error
    schema = values.get("schema") if isinstance(values, dict) else type(values).__name__
    expect(
        not schemas or schema in schemas, f"{expected} with schema {' or '.join(map(repr, schemas))}", "schema", schema,
        hint,
    )  # fmt: skip
    return values
