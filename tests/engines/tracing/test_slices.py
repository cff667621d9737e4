"""Writes into slices and reads of others: what mixes samples, or depends on positions, is never proven."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import quiet
from slices import drawn
from sweep import Call, Verdict, batch, is_proven, judged, rows_of

BAD = (Verdict.MIXES, Verdict.POSITION)


def check(seed, counts):
    """The verdict on a program, and what book-keeping says of it, counted."""
    program, x = drawn(seed), rows_of(seed % 5)
    call = Call("slices", program, (batch("B2"),))
    with quiet():
        for place, verdict in enumerate(judged(call, x) or []):
            proven = is_proven(call, place, x)
            assert not (proven and verdict in BAD), f"seed {seed}: proven, but {verdict.value}: {program}"
            counts[verdict, proven] += 1


@settings(max_examples=60)
@given(st.integers(0, 2**30))
def test_no_write_into_slices_that_mixes_samples_is_proven(seed):
    check(seed, Counter())


def test_slices_of_own_rows_are_proven():
    counts = Counter()
    for seed in range(150):
        check(seed, counts)
    honest = counts[Verdict.HONEST, True] + counts[Verdict.HONEST, False]
    assert honest > 10, counts
    assert counts[Verdict.HONEST, True] > 0.4 * honest, counts  # some had rows of others for a while
    assert sum(counts[verdict, False] for verdict in BAD) > 30, counts


@pytest.mark.slow
def test_no_write_into_slices_that_mixes_samples_is_proven_in_many_programs():
    counts = Counter()
    for seed in range(1000, 4000):
        check(seed, counts)
