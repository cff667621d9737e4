"""Epochs in which each record draws its batch: the law of their draws, and what an epoch costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.sampling import RandomAllocation

KEY = insecure_key(0)


@given(size=st.integers(1, 300), batches=st.integers(1, 20), epoch=st.integers(0, 5))
def test_an_epoch(size, batches, epoch):
    """Every record exactly once, in sorted batches; more records do not move the others."""
    sampler = RandomAllocation(size, batches)
    drawn = [sampler.indices(KEY, epoch * batches + number) for number in range(batches)]
    assert torch.cat(drawn).sort()[0].tolist() == list(range(size))
    more = RandomAllocation(size + 7, batches).indices(KEY, epoch * batches)
    assert torch.equal(more[more < size], drawn[0])


def test_batches_are_drawn_independently():
    """The batches of two records: all 16 pairs equally often. In a permutation one batch twice would be rarer."""
    sampler, counts = RandomAllocation(2, 4), np.zeros((4, 4))
    for epoch in range(4000):
        place = {int(i): b for b in range(4) for i in sampler.indices(KEY, 4 * epoch + b)}
        counts[place[0], place[1]] += 1
    assert stats.chisquare(counts.ravel()).pvalue > 1e-5


@given(batches=st.integers(1, 50), data=st.data())
def test_each_epoch_is_charged_once(batches, data):
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, 500), max_size=5)))]
    sampler = RandomAllocation(10, batches)
    paid = sum(event.num_steps for a, b in itertools.pairwise(edges) for event in sampler.events(a, b, 1.0))
    assert paid == -(-edges[-1] // batches)


def test_refused():
    for sizes in ((0, 1), (10, 0)):
        with pytest.raises(InvalidArgument):
            RandomAllocation(*sizes)
    assert RandomAllocation(10, 2).adjacencies == ("add_remove", "zero_out")
