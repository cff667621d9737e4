"""The schedule of audits: how many rows a step compares."""

from __future__ import annotations

import pytest
import torch

from dpfunc.engines.audit import FIRST_ROWS, ROWS_IN, STEPS_IN, TIME_SHARE, Audits


def schedule(size, steps, *, step_seconds=1.0, row_seconds, doubts=()):
    """Rows that each of so many steps compares, where a step and a row alone take these times."""
    audits, batch = Audits(), torch.zeros(size, 1)
    for _ in range(steps):
        wanted = audits.due(batch, doubts, seconds=step_seconds)
        yield wanted
        audits.paid(wanted, wanted * row_seconds)


@pytest.mark.parametrize("size", [32, 256, 4096])
@pytest.mark.parametrize("share", [1e-4, 1 / 32, 0.2, 3.0])
def test_rows_take_their_share_of_the_time(size, share):
    """At most one row in 100 and 1 % of the time, and yet one row in 20 steps; the first step is not counted."""
    first, *later = schedule(size, 2001, row_seconds=share)
    assert first == max(FIRST_ROWS, size // ROWS_IN)
    assert max(later) <= max(1, size // ROWS_IN)
    assert all(sum(later[start : start + STEPS_IN]) >= 1 for start in range(2001 - STEPS_IN))
    taken, allowed = sum(later) * share / 2000, max(TIME_SHARE, share / STEPS_IN)
    assert taken <= 1.01 * allowed
    possible = max(1 / STEPS_IN, min(TIME_SHARE / share, size // ROWS_IN))
    assert sum(later) / 2000 >= 0.9 * possible, "what may be taken is taken"


def test_no_clock_is_needed_where_a_step_has_doubts():
    assert list(schedule(64, 5, row_seconds=10.0, doubts=("a doubt",))) == [8] * 5
    assert list(schedule(256, 5, row_seconds=10.0, doubts=("a doubt",))) == [32] * 5


def test_a_batch_of_a_new_size_is_audited():
    audits = Audits()
    sizes = [200, 200, 201, 201, 350, 7, 7]
    wanted = []
    for size in sizes:
        wanted.append(audits.due(torch.zeros(size, 1), (), seconds=1.0))
        audits.paid(wanted[-1], 100.0 * wanted[-1])
    assert wanted == [2, 0, 2, 0, 3, 1, 0]
