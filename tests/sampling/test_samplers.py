"""Samplers: the law of their draws, drawing again, and what they charge for it."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from cases import SAMPLERS
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpfunc.errors import InvalidArgument
from dpfunc.rng import fold_in, insecure_key
from dpfunc.sampling import FixedSize, InOrder, Poisson, Shuffled
from dpfunc.types import ADJACENCIES, Event, Schedule

KEY = insecure_key(0)
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


def membership(sampler, steps, key=KEY):
    """Who was in which batch: (steps, records) of 0 and 1."""
    member_TN = np.zeros((steps, sampler.dataset_size))
    for step in range(steps):
        member_TN[step, sampler.indices(key, step).numpy()] = 1
    return member_TN


def count_accepted(count, trials, prob, level=1e-6):
    """Two-sided exact binomial test."""
    tail = stats.binom.cdf(count, trials, prob)
    return level < tail < 1 - level


@every_sampler
def test_any_step_can_be_drawn_again(sampler):
    """In any order; other steps and other keys give other batches; a batch has no record twice."""
    drawn = [sampler.indices(KEY, step) for step in range(20)]
    for step in (19, 3, 11, 0):
        assert torch.equal(sampler.indices(KEY, step), drawn[step])
        assert not torch.equal(sampler.indices(insecure_key(2**32), step), drawn[step])
    for batch in drawn:
        assert batch.dtype == torch.int64
        assert batch.unique().numel() == batch.numel()
        assert int(batch.min()) >= 0
        assert int(batch.max()) < sampler.dataset_size
    assert len({tuple(batch.tolist()) for batch in drawn}) == 20


@every_sampler
def test_a_batch_belongs_to_the_caller(sampler):
    """Writing into a draw does not change the next one."""
    before = sampler.indices(KEY, 0).clone()
    sampler.indices(KEY, 0).zero_()
    assert torch.equal(sampler.indices(KEY, 0), before)


@every_sampler
@pytest.mark.parametrize("start", [0, 1, 7])
def test_costs_add_up(sampler, start):
    """The cost of a stretch is that of its steps, one by one."""

    def spent(events):
        total = {}
        for event in events:
            kind = (event.sampling_prob, event.noise_multiplier)
            total[kind] = total.get(kind, 0) + event.num_steps
        return total

    single = [event for step in range(start, 50) for event in sampler.events(step, step + 1, 1.3)]
    assert spent(sampler.events(start, 50, 1.3)) == spent(single)
    assert sampler.events(start, start, 1.3) == ()


@every_sampler
def test_public_facts_only(sampler):
    """A sampler is frozen, hashable, and holds no key: it can be published."""
    assert hash(sampler) == hash(dataclasses.replace(sampler))
    names = {field.name for field in dataclasses.fields(sampler)}
    assert names <= {"dataset_size", "sampling_prob", "batch_size"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampler.dataset_size = 1


@pytest.mark.parametrize("prob", [0.002, 0.05, 0.75])
def test_poisson_rate(prob):
    """Records are drawn at rate q, and neither at 0.9 q nor at 1.1 q."""
    sampler = Poisson(20_000, prob)
    steps = 300
    total = sum(len(sampler.indices(KEY, step)) for step in range(steps))
    assert count_accepted(total, 20_000 * steps, prob)
    assert not count_accepted(total, 20_000 * steps, 0.9 * prob)
    assert not count_accepted(total, 20_000 * steps, 1.1 * prob)


def test_poisson_rate_is_the_same_for_every_record():
    """Also for the first, the last and those at the edge of a chunk."""
    steps = 3000
    counts_N = membership(Poisson(300, 0.2), steps).sum(0)
    assert all(count_accepted(count, steps, 0.2) for count in counts_N)
    spread = float(((counts_N - 0.2 * steps) ** 2).sum() / (steps * 0.2 * 0.8))
    assert 1e-6 < stats.chi2.cdf(spread, 300) < 1 - 1e-6
    edges = Poisson(2**16 + 1, 0.5)
    hits = np.array([[i in set(edges.indices(KEY, t).tolist()) for i in (0, 2**16 - 1, 2**16)] for t in range(60)])
    assert ((hits.sum(0) > 10) & (hits.sum(0) < 50)).all()


def pairs_accepted(member_TN, prob):
    """Two records are in a batch together at rate `prob`: exact counts over disjoint pairs of records."""
    together = int((member_TN[:, ::2] * member_TN[:, 1::2]).sum())
    return count_accepted(together, member_TN[:, ::2].size, prob)


def test_poisson_records_are_independent():
    """Pairs are drawn together at rate q^2, and batch sizes have the variance of a binomial."""
    prob, steps = 0.3, 2000
    member_TN = membership(Poisson(400, prob), steps)
    assert pairs_accepted(member_TN, prob**2)
    assert not pairs_accepted(member_TN, 0.9 * prob**2)
    assert not pairs_accepted(member_TN, 1.1 * prob**2)
    assert size_variance_accepted(member_TN, 400 * prob * (1 - prob))
    corrected = (member_TN - prob) / math.sqrt(prob * (1 - prob))
    correlations_NN = corrected.T @ corrected / math.sqrt(steps)
    assert np.abs(correlations_NN - np.diag(np.diag(correlations_NN))).max() < 6.5


def size_variance_accepted(member_TN, variance, level=1e-6):
    sizes_T = member_TN.sum(1)
    statistic = float(((sizes_T - sizes_T.mean()) ** 2).sum()) / variance
    return level < stats.chi2.cdf(statistic, len(sizes_T) - 1) < 1 - level


def test_batch_sizes_tell_poisson_from_fixed():
    """Binomial variance, and neither 0.8 nor 1.2 of it; a fixed size has none."""
    variance = 400 * 0.1 * 0.9
    member_TN = membership(Poisson(400, 0.1), 6000)
    assert size_variance_accepted(member_TN, variance)
    assert not size_variance_accepted(member_TN, 0.8 * variance)
    assert not size_variance_accepted(member_TN, 1.2 * variance)
    assert not size_variance_accepted(membership(FixedSize(400, 40), 2000), variance)


@pytest.mark.parametrize("sampler", [Poisson(1000, 0.2), FixedSize(1000, 200)], ids=["poisson", "fixed size"])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_poisson_steps_are_independent(sampler, lag):
    """A record in this batch says nothing about the next one: both at rate q^2."""
    member_TN = membership(sampler, 400)
    both = int((member_TN[lag:] * member_TN[:-lag]).sum())
    trials = member_TN[lag:].size
    assert count_accepted(both, trials, 0.04)
    assert not count_accepted(both, trials, 0.9 * 0.04)
    assert not count_accepted(both, trials, 1.1 * 0.04)


@given(small=st.integers(1, 200_000), more=st.integers(0, 70_000), step=st.integers(0, 2**40))
def test_poisson_draws_do_not_depend_on_other_records(small, more, step):
    """Adding records at the end changes nobody else's coin: the neighbour relation of the proof."""
    batch = Poisson(small + more, 0.01).indices(KEY, step)
    assert torch.equal(batch[batch < small], Poisson(small, 0.01).indices(KEY, step))


@given(size=st.integers(1, 3000), low=st.floats(1e-6, 1.0), high=st.floats(1e-6, 1.0))
def test_poisson_batches_grow_with_the_probability(size, low, high):
    """With the same key, a higher probability moves every record drawn to the front or leaves it there."""
    low, high = sorted((low, high))
    few, many = (Poisson(size, prob).indices(KEY, 0) for prob in (low, high))
    assert len(few) <= len(many)
    assert bool((many[: len(few)] <= few).all())


def test_poisson_extremes():
    """q = 1 draws everybody, in order; a tiny q draws nobody, which is a batch like any other."""
    assert torch.equal(Poisson(70_000, 1.0).indices(KEY, 5), torch.arange(70_000))
    for prob in (1e-12, 1e-300, 5e-324):
        empty = Poisson(100, prob).indices(KEY, 5)
        assert (empty.shape, empty.dtype) == ((0,), torch.int64)
    assert Poisson(1, 0.5).expected_batch_size(0) == 0.5


def test_known_draws():
    """The same records in every version of this library and of numpy: a resumed run draws what it drew before."""
    assert Poisson(100, 0.1).indices(KEY, 0).tolist() == [2, 37, 53, 75, 77, 85, 89, 91, 92, 98]
    assert Poisson(10**9, 5e-9).indices(KEY, 7).tolist() == [414413965, 839099303, 938972809, 967700496]


def test_poisson_schedule():
    """The rate, the expected size and the price change together, at the same step."""
    sampler = Poisson(20_000, Schedule(((2, 0.01), (3, 0.2), (1, 0.5))))
    for step, prob in enumerate([0.01, 0.01, 0.2, 0.2, 0.2, 0.5, 0.5]):
        assert sampler.expected_batch_size(step) == prob * 20_000
        assert count_accepted(len(sampler.indices(KEY, step)), 20_000, prob)
        assert sampler.events(step, step + 1, 1.5) == (Event(prob, 1.5, 1),)
    assert sampler.events(1, 9, 1.5) == (Event(0.01, 1.5, 1), Event(0.2, 1.5, 3), Event(0.5, 1.5, 4))


def test_the_probability_is_batch_size_over_data_set():
    """Not 1 / len(loader): 48 of 64 records are 2 batches an epoch, and the probability is 0.75, not 0.5."""
    sampler = Poisson.of_batch_size(dataset_size=64, expected_batch_size=48)
    assert sampler == Poisson(64, 0.75)
    assert sampler.expected_batch_size(0) == 48
    assert sampler.events(0, 4, 1.0) == (Event(0.75, 1.0, 4),)
    total = sum(len(sampler.indices(KEY, step)) for step in range(1000))
    assert count_accepted(total, 64_000, 0.75)
    assert not count_accepted(total, 64_000, 0.5)


@given(size=st.integers(1, 10**9), data=st.data())
def test_of_batch_size_keeps_the_size(size, data):
    batch = data.draw(st.integers(1, size))
    assert Poisson.of_batch_size(size, batch).expected_batch_size(0) == pytest.approx(batch, rel=1e-12)


@given(size=st.integers(1, 2000), data=st.data())
def test_fixed_size(size, data):
    """Exactly batch_size different records, sorted."""
    batch_size = data.draw(st.integers(1, size))
    batch = FixedSize(size, batch_size).indices(KEY, data.draw(st.integers(0, 10**6)))
    assert len(batch) == batch_size
    assert bool((batch.diff() > 0).all())


def test_fixed_size_subsets_are_uniform():
    """All 10 pairs of 5 records come equally often."""
    counts = dict.fromkeys(itertools.combinations(range(5), 2), 0)
    for step in range(3000):
        counts[tuple(FixedSize(5, 2).indices(KEY, step).tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-5
    large = membership(FixedSize(300, 30), 2000)
    assert all(count_accepted(count, 2000, 0.1) for count in large.sum(0))


@given(size=st.integers(1, 500), data=st.data(), epoch=st.integers(0, 5))
def test_shuffled_epoch(size, data, epoch):
    """Every record exactly once an epoch; only the last batch is smaller, and it is kept."""
    sampler = Shuffled(size, data.draw(st.integers(1, size)))
    steps = sampler.steps_per_epoch
    batches = [sampler.indices(KEY, epoch * steps + i) for i in range(steps)]
    assert steps == math.ceil(size / sampler.batch_size)
    assert sorted(torch.cat(batches).tolist()) == list(range(size))
    assert all(len(batch) == sampler.batch_size for batch in batches[:-1])
    assert len(batches[-1]) == size - sampler.batch_size * (steps - 1)


def test_shuffled_epochs_differ():
    sampler = Shuffled(100, 100)
    orders = {tuple(sampler.indices(KEY, epoch).tolist()) for epoch in range(50)}
    assert len(orders) == 50
    assert tuple(range(100)) not in orders
    assert not torch.equal(Shuffled(100, 50).indices(KEY, 0), Shuffled(100, 50).indices(fold_in(KEY, "other"), 0))


def test_shuffled_positions_are_uniform():
    """Each record is in each of the four batches of an epoch equally often."""
    sampler = Shuffled(20, 5)
    counts_NP = np.zeros((20, 4))
    for step in range(4 * 1500):
        counts_NP[sampler.indices(KEY, step).numpy(), step % 4] += 1
    assert all(stats.chisquare(row).pvalue > 1e-6 for row in counts_NP)


@given(size=st.integers(1, 300), data=st.data(), epoch=st.integers(0, 5))
def test_in_order_epoch(size, data, epoch):
    """The records one after the other, each once an epoch, as a stream gives them."""
    sampler = InOrder(size, data.draw(st.integers(1, size)))
    steps = sampler.steps_per_epoch
    batches = [sampler.indices(KEY, epoch * steps + i) for i in range(steps)]
    assert [len(batch) for batch in batches[:-1]] == [sampler.batch_size] * (steps - 1)
    assert torch.cat(batches).tolist() == list(range(size))
    assert all(batch.dtype == torch.int64 and len(batch) for batch in batches)


@pytest.mark.parametrize("kind", [Shuffled, InOrder])
@given(size=st.integers(1, 300), data=st.data())
def test_shuffled_charges_each_epoch_once(kind, size, data):
    """A run from the start is charged for each epoch it touches, however its steps are cut into stretches."""
    sampler = kind(size, data.draw(st.integers(1, size)))
    cuts = sorted(data.draw(st.lists(st.integers(0, 1000), max_size=5)))
    edges = [0, *cuts]
    paid = sum(event.num_steps for a, b in itertools.pairwise(edges) for event in sampler.events(a, b, 1.0))
    assert paid == math.ceil(edges[-1] / sampler.steps_per_epoch)


def test_shuffled_is_not_accounted_as_poisson():
    """100 batches of 1 % cost a whole Gaussian release, not a hundred amplified ones."""
    assert Shuffled(10_000, 100).events(0, 100, 1.0) == (Event(1.0, 1.0, 1),)
    assert Poisson.of_batch_size(10_000, 100).events(0, 100, 1.0) == (Event(0.01, 1.0, 100),)
    assert FixedSize(10_000, 100).events(0, 100, 1.0) == (Event(1.0, 1.0, 100),)


def test_which_neighbours_a_sampler_covers():
    """With a fixed batch size, one record more changes the batches of others."""
    assert Poisson(10, 0.1).adjacencies == ADJACENCIES
    for sampler in (FixedSize(10, 5), Shuffled(10, 5), InOrder(10, 5)):
        assert sampler.adjacencies == ("zero_out", "replace_one")


BAD = {
    "no records": (lambda: Poisson(0, 0.1), "integer dataset_size >= 1, got dataset_size=0"),
    "fraction of a record": (lambda: Poisson(10.0, 0.1), "integer dataset_size >= 1, got dataset_size=10.0"),
    "probability 0": (lambda: Poisson(10, 0.0), "0 < sampling_prob <= 1, got sampling_prob=0.0"),
    "probability above 1": (lambda: Poisson(10, 1.5), "0 < sampling_prob <= 1, got sampling_prob=1.5"),
    "probability NaN": (lambda: Poisson(10, math.nan), "0 < sampling_prob <= 1"),
    "more than there can be": (lambda: Poisson(2**46 + 1, 0.1), r"dataset_size <= 70368744177664"),
    "percent": (lambda: Poisson(10, "1%"), "not str"),
    "schedule above 1": (lambda: Poisson(10, Schedule(((5, 0.1), (5, 2.0)))), "0 < sampling_prob <= 1"),
    "batch above data set": (lambda: Poisson.of_batch_size(64, 65), "expected_batch_size <= dataset_size.*64 records"),
    "batch of 0": (lambda: Poisson.of_batch_size(64, 0), "0 < expected_batch_size"),
    "fixed: no records": (lambda: FixedSize(0, 1), "dataset_size >= 1"),
    "fixed: no batch": (lambda: FixedSize(10, 0), "batch_size >= 1"),
    "fixed: batch above data set": (lambda: FixedSize(10, 11), "batch_size <= dataset_size.*10 records"),
    "shuffled: no records": (lambda: Shuffled(0, 1), "dataset_size >= 1"),
    "in order: batch above data set": (lambda: InOrder(10, 11), "batch_size <= dataset_size.*10 records"),
    "shuffled: batch above data set": (lambda: Shuffled(10, 11), "batch_size <= dataset_size.*10 records"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    make, message = BAD[case]
    with pytest.raises(InvalidArgument, match=message):
        make()


@every_sampler
def test_refused_by_every_sampler(sampler):
    with pytest.raises(InvalidArgument, match="integer step >= 0, got step=-1"):
        sampler.indices(KEY, -1)
    with pytest.raises(InvalidArgument, match="integer step >= 0"):
        sampler.expected_batch_size(-1)
    for key in (42, [1], None):
        with pytest.raises(InvalidArgument, match="Expected key to be a dpfunc Key"):
            sampler.indices(key, 0)
    with pytest.raises(InvalidArgument, match="integer stop >= 5, got stop=4"):
        sampler.events(5, 4, 1.0)
    with pytest.raises(InvalidArgument, match="integer start >= 0"):
        sampler.events(-1, 4, 1.0)
    for noise_multiplier in (-1.0, math.nan):
        with pytest.raises(InvalidArgument, match="noise_multiplier"):
            sampler.events(0, 40, noise_multiplier)
