"""Values that pass between files: what is no event is refused, and schedules are pieces of equal steps."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfunc import Ledger
from dpfunc.accounting import Event, compose, schedule_ledger
from dpfunc.errors import InvalidArgument
from dpfunc.types import Schedule, schedule_at

GOOD = {"sampling_prob": 0.01, "noise_multiplier": 1.0, "num_steps": 1000}
BAD = {
    "sampling_prob": (-0.1, 1.5, math.nan, True, "0.1"),
    "noise_multiplier": (-1.0, math.nan, math.inf, None),
    "num_steps": (0, -5, 2.5, 10.0, True, math.nan),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_events_are_refused(name, value):
    with pytest.raises(InvalidArgument, match=name):
        Event(**(GOOD | {name: value}))


def test_a_schedule_has_no_step_before_the_first():
    with pytest.raises(InvalidArgument, match="an integer step >= 0, got step=-1"):
        Schedule(((2, 0.5), (2, 2.0))).at(-1)


def schedules(values):
    pieces = st.lists(st.tuples(st.integers(1, 9), values), min_size=1, max_size=4)
    return st.one_of(values, st.builds(lambda p: Schedule(tuple(p)), pieces))


@given(
    schedules(st.sampled_from([0.01, 0.1, 1.0])), schedules(st.sampled_from([0.5, 1.0, 1.5, 2.0])), st.integers(0, 30)
)
def test_pieces_equal_single_steps(q, sigma, num_steps):
    single = [Ledger((Event(schedule_at(q, t), schedule_at(sigma, t), 1),)) for t in range(num_steps)]
    assert schedule_ledger(q, sigma, num_steps) == compose(Ledger(), *single)


def test_no_loop_over_steps():
    start = time.process_time()
    ledger = schedule_ledger(0.1, Schedule(((10**12, 1.0), (1, 2.0))), 10**15, "replace_one")
    assert time.process_time() - start < 1
    assert ledger.num_steps == 10**15
    assert (len(ledger.events), ledger.adjacency) == (2, "replace_one")
