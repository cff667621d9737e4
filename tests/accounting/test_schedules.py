"""Run-length ledgers equal the ledgers of their single steps."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfunc.accounting import Ledger, compose, schedule_ledger
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event, Schedule, schedule_at

noise = st.sampled_from([0.5, 1.0, 1.5, 2.0])
probs = st.sampled_from([0.01, 0.1, 1.0])


def schedules(values):
    pieces = st.lists(st.tuples(st.integers(1, 9), values), min_size=1, max_size=4)
    return st.one_of(values, st.builds(lambda p: Schedule(tuple(p)), pieces))


@given(schedules(probs), schedules(noise), st.integers(0, 30))
def test_pieces_equal_single_steps(q, sigma, num_steps):
    single = [Ledger((Event(schedule_at(q, t), schedule_at(sigma, t), 1),)) for t in range(num_steps)]
    assert schedule_ledger(q, sigma, num_steps) == compose(Ledger(), *single)


def test_no_loop_over_steps():
    start = time.perf_counter()
    ledger = schedule_ledger(0.1, Schedule(((10**12, 1.0), (1, 2.0))), 10**15)
    assert time.perf_counter() - start < 1
    assert ledger.num_steps == 10**15
    assert len(ledger.events) == 2


def test_adjacency_and_bad_arguments():
    assert schedule_ledger(0.1, 1.0, 5, "replace_one").adjacency == "replace_one"
    for bad in ((1.5, 1.0, 5), (0.1, -1.0, 5), (0.1, 1.0, -5), (0.1, 1.0, 2.5)):
        with pytest.raises(InvalidArgument):
            schedule_ledger(*bad)
