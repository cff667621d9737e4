"""Ledgers are values that compose like a multiset and survive a round trip through JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfunc._utils.validation import signed
from dpfunc.accounting import Ledger, MixtureOfGaussians, compose, schedule_ledger
from dpfunc.errors import InvalidArgument, LedgerConflict
from dpfunc.types import ADJACENCIES, Event

kinds = st.sampled_from([(0.01, 1.0), (0.01, 2.0), (0.5, 1.0), (1.0, 3.0)])
events = st.builds(lambda kind, steps: Event(*kind, steps), kinds, st.integers(1, 10**12))
ledgers = st.builds(lambda items: Ledger(tuple(items)), st.lists(events, max_size=6))
any_float = st.floats(min_value=0.0, max_value=1e300, allow_nan=False)
any_event = st.builds(Event, st.floats(min_value=5e-324, max_value=1.0), any_float, st.integers(1, 2**70))


@given(ledgers, ledgers, ledgers)
def test_composition_laws(a, b, c):
    assert a.compose(b) == b.compose(a)
    assert a.compose(b).compose(c) == a.compose(b.compose(c)) == compose(a, b, c)
    assert a.compose(Ledger()) == a == compose(a)
    assert a.compose(b).num_steps == a.num_steps + b.num_steps
    assert hash(a.compose(b)) == hash(b.compose(a))


@given(st.lists(any_event, max_size=5), st.sampled_from(ADJACENCIES))
def test_json_round_trip_is_exact(items, adjacency):
    ledger = Ledger(tuple(items), adjacency)
    assert Ledger.from_json(ledger.to_json()) == ledger
    assert Ledger.from_json(ledger.to_json()).to_json() == ledger.to_json()


def broken(change):
    values = json.loads(Ledger((Event(0.1, 1.0, 5),)).to_json())
    change(values)
    return json.dumps(signed(values))


BROKEN = {
    "not JSON": "{", "not an object": "[]", "empty object": "{}",
    "other schema": broken(lambda v: v.update(schema="dpfunc.ledger/1")),
    "no schema": broken(lambda v: v.pop("schema")),
    "no digest": json.dumps({"schema": "dpfunc.ledger/2", "adjacency": "add_remove", "events": []}),
    "no events": broken(lambda v: v.pop("events")),
    "unknown field": broken(lambda v: v.update(amplification=0.5)),
    "unknown adjacency": broken(lambda v: v.update(adjacency="swap")),
    "events not a list": broken(lambda v: v.update(events={})),
    "event not an object": broken(lambda v: v.update(events=[[0.1, 1.0, 5]])),
    "event with an unknown field": broken(lambda v: v["events"][0].update(mechanism="laplace")),
    "event without noise field": broken(lambda v: v["events"][0].pop("noise_multiplier")),
    "probability 2": broken(lambda v: v["events"][0].update(sampling_prob=2)),
    "probability as text": broken(lambda v: v["events"][0].update(sampling_prob="0.1")),
    "NaN noise": broken(lambda v: v["events"][0].update(noise_multiplier=float("nan"))),
    "half a step": broken(lambda v: v["events"][0].update(num_steps=2.5)),
    "negative steps": broken(lambda v: v["events"][0].update(num_steps=-5)),
    "true steps": broken(lambda v: v["events"][0].update(num_steps=True)),
}  # fmt: skip


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_json_is_refused_and_never_repaired(text):
    with pytest.raises(InvalidArgument):
        Ledger.from_json(text)


@pytest.mark.parametrize("name", ["events", "adjacency", "num_steps"])
def test_a_name_that_occurs_twice_is_refused(name):
    """The last value would count, and another reader would take the first."""
    text = Ledger((Event(0.1, 1.0, 5),)).to_json()
    first = {"events": "[]", "adjacency": '"replace_one"', "num_steps": "100"}[name]
    with pytest.raises(InvalidArgument, match=f"the name '{name}' occurs twice"):
        Ledger.from_json(text.replace(f'"{name}":', f'"{name}": {first}, "{name}":'))


STEP = Event(0.1, 1.0, 1)
NO_LEDGER = {
    "numbers": (lambda: Ledger((1, 2)), InvalidArgument, "Event"),
    "a tuple": (lambda: Ledger(((0.1, 1.0, 5),)), InvalidArgument, "Event"),
    "adjacency": (lambda: Ledger(adjacency="swap"), InvalidArgument, "adjacency"),
    "nothing": (compose, InvalidArgument, "at least one ledger"),
    "a tuple of events": (lambda: compose(Ledger(), (STEP,)), InvalidArgument, "Ledger"),
    "a recorded tuple": (lambda: Ledger().record((0.1, 1.0, 1)), InvalidArgument, "Event"),
    "mixed": (lambda: Ledger().compose(Ledger((), "replace_one")), LedgerConflict, "add_remove and replace_one"),
    "mixed, one empty": (lambda: compose(Ledger((), "zero_out"), Ledger((STEP,))), LedgerConflict, "zero_out"),
    **{f"{bad}": (lambda bad=bad: schedule_ledger(*bad), InvalidArgument, "Expected")
       for bad in ((1.5, 1.0, 5), (0.1, -1.0, 5), (0.1, 1.0, -5), (0.1, 1.0, 2.5))},
}  # fmt: skip


@pytest.mark.parametrize("name", NO_LEDGER)
def test_what_is_not_a_ledger_is_refused(name):
    make, kind, message = NO_LEDGER[name]
    with pytest.raises(kind, match=message):
        make()


def test_repr_is_short_and_says_what_was_spent():
    assert repr(Ledger()) == "Ledger(0 steps, add_remove: nothing spent)"
    many = Ledger(tuple(Event(0.1, 1.0 + i, 1) for i in range(100)), "zero_out")
    assert repr(many).startswith("Ledger(100 steps, zero_out: (q=0.1, sigma=1) x 1 + ")
    assert repr(many).endswith("96 kinds more)")
    mixed = Ledger((MixtureOfGaussians(2.0, 5, distances=(0.0, 1.0), probs=(0.75, 0.25)),))
    assert repr(mixed) == (
        "Ledger(5 steps, add_remove: mixture_of_gaussians(q=1, sigma=2, distances=[0, 1], probs=[0.75, 0.25]) x 5)"
    )
