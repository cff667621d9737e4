"""Batches of a fixed size: the law of their draws, and what an epoch costs."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.sampling import FixedSize, InOrder, RandomAllocation, Shuffled, ShuffledOnce

KEY = insecure_key(0)


def test_fixed_size_subsets_are_uniform():
    """All 10 pairs of 5 records come equally often, and so does each of 300 records."""
    counts = dict.fromkeys(itertools.combinations(range(5), 2), 0)
    for step in range(3000):
        counts[tuple(FixedSize(5, 2).indices(KEY, step).tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-5
    drawn = torch.cat([FixedSize(300, 30).indices(KEY, step) for step in range(2000)])
    tails = stats.binom.cdf(np.bincount(drawn, minlength=300), 2000, 0.1)
    assert ((tails > 1e-6) & (tails < 1 - 1e-6)).all()


@pytest.mark.parametrize("kind", [Shuffled, ShuffledOnce, InOrder])
@given(size=st.integers(1, 500), data=st.data(), epoch=st.integers(0, 5))
def test_an_epoch(kind, size, data, epoch):
    """Every record exactly once an epoch, in order if it is `InOrder`; only the last batch is smaller, and it is kept."""
    sampler = kind(size, data.draw(st.integers(1, size)))
    steps = sampler.steps_per_epoch
    batches = [sampler.indices(KEY, epoch * steps + i) for i in range(steps)]
    order = torch.cat(batches)
    assert steps == math.ceil(size / sampler.batch_size)
    assert (order if kind is InOrder else order.sort()[0]).tolist() == list(range(size))
    assert all(len(batch) == sampler.batch_size for batch in batches[:-1])
    assert len(batches[-1]) == size - sampler.batch_size * (steps - 1)
    assert order.dtype == torch.int64


def test_records_keep_their_place():
    """In each epoch the batches of the first one; keys have orders of their own."""
    sampler = ShuffledOnce(20, 6)
    first = [sampler.indices(KEY, step) for step in range(4)]
    for step in range(4, 20):
        assert torch.equal(sampler.indices(KEY, step), first[step % 4])
    places = np.array([
        np.concatenate([sampler.indices(insecure_key(seed), step).numpy() for step in range(4)]) for seed in range(2000)
    ])  # fmt: skip
    counts = np.bincount(np.flatnonzero(places == 7) % 20, minlength=20)
    assert stats.chisquare(counts).pvalue > 1e-6


def test_shuffled_positions_are_uniform():
    """Each record is in each of the four batches of an epoch equally often."""
    sampler = Shuffled(20, 5)
    counts_NP = np.zeros((20, 4))
    for step in range(4 * 1500):
        counts_NP[sampler.indices(KEY, step).numpy(), step % 4] += 1
    assert all(stats.chisquare(row).pvalue > 1e-6 for row in counts_NP)


@given(size=st.integers(1, 300), batches=st.integers(1, 20), epoch=st.integers(0, 5))
def test_an_allocated_epoch(size, batches, epoch):
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


@pytest.mark.parametrize("kind", [Shuffled, InOrder, RandomAllocation])
@given(size=st.integers(1, 300), data=st.data())
def test_each_epoch_is_charged_once(kind, size, data):
    """A run from the start is charged for each epoch it touches, however its steps are cut into stretches."""
    sampler = kind(size, data.draw(st.integers(1, size)))
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, 1000), max_size=5)))]
    paid = sum(event.num_steps for a, b in itertools.pairwise(edges) for event in sampler.events(a, b, 1.0))
    assert paid == math.ceil(edges[-1] / sampler.steps_per_epoch)


@pytest.mark.parametrize("kind", [FixedSize, Shuffled, InOrder])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0, 1), "dataset_size >= 1"), ((10, 0), "batch_size >= 1"), ((10, 11), "batch_size <= dataset_size.*10 records")],
)
def test_refused(kind, sizes, message):
    with pytest.raises(InvalidArgument, match=message):
        kind(*sizes)
    with pytest.raises(InvalidArgument, match="num_batches >= 1"):
        RandomAllocation(10, 0)
