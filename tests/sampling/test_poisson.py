"""Poisson draws: the law of independent trials, at a cost that does not grow with the number of records."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key, stream
from dpfunc.sampling import CappedPoisson, CyclicPoisson, Poisson, poisson
from dpfunc.types import Event, Schedule

KEY = insecure_key(0)
N = 2 * 10**6
PROB = 0.05
LEVEL = 1e-6


def fits(counts, law, level=LEVEL):
    """Chi-square test of how often each of the values 0, 1, 2, ... occurs; rare values are taken together."""
    values = np.arange(counts.max() + 2)
    observed = np.bincount(counts, minlength=len(values)).astype(float)
    expected = law.pmf(values) * counts.size
    expected[-1] += law.sf(values[-1]) * counts.size
    groups = np.minimum(np.cumsum(expected) // 20, max(expected.sum() // 20 - 1, 0)).astype(int)
    observed, expected = (np.bincount(groups, weights=numbers) for numbers in (observed, expected))
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    return stats.chi2.sf(statistic, kept.sum() - 1) > level


def between(count, trials, prob, level=LEVEL):
    return level < stats.binom.cdf(count, trials, prob) < 1 - level


def drawn(step, prob=PROB, size=N):
    return Poisson(size, prob).indices(KEY, step).numpy()


@pytest.mark.parametrize("prob", [0.1, 0.7, 0.999])
def test_every_subset_at_its_probability(prob):
    """The whole law: each of the 32 subsets of five records, and not at the probabilities of another q."""
    generator = stream(KEY)
    codes = np.array([
        sum(1 << position for piece in poisson.successes(generator, 5, prob) for position in piece.tolist())
        for _ in range(15_000)
    ])  # fmt: skip
    sizes = np.array([code.bit_count() for code in range(32)])

    def accepted(q):
        law = q**sizes * (1 - q) ** (5 - sizes)
        return fits(codes, stats.rv_discrete(values=(np.arange(32), law / law.sum())))

    assert accepted(prob)
    assert not accepted(0.9 * prob)
    assert not accepted(min(1.1 * prob, 0.99 if prob == 0.999 else 1.0))


def test_every_record_at_the_same_rate():
    """How often each of 2e6 records is drawn in 60 steps is binomial; and so it is along the data set."""
    steps = 60
    counts_N = np.zeros(N, np.int64)
    for step in range(steps):
        counts_N[drawn(step)] += 1
    assert fits(counts_N, stats.binom(steps, PROB))
    for wrong in (0.9 * PROB, 1.1 * PROB):
        assert not fits(counts_N, stats.binom(steps, wrong))
    parts_P = counts_N.reshape(1000, -1).sum(1)
    trials = steps * N // 1000
    spread = ((parts_P - trials * PROB) ** 2).sum() / (trials * PROB * (1 - PROB))
    assert LEVEL < stats.chi2.cdf(spread, 1000) < 1 - LEVEL
    assert all(between(int(counts_N[edge].sum()), steps * 1000, PROB) for edge in (slice(1000), slice(-1000, None)))


@pytest.mark.parametrize("distance", [1, 7, 2**16, N // 2])
def test_pairs_are_independent(distance):
    """Two records at any distance are drawn together at rate q^2: exact counts over disjoint pairs."""
    starts = np.arange(N)
    starts = starts[(starts // distance % 2 == 0) & (starts + distance < N)]
    together = 0
    for step in range(3):
        member_N = np.zeros(N, bool)
        member_N[drawn(step)] = True
        together += int((member_N[starts] & member_N[starts + distance]).sum())
    trials = 3 * len(starts)
    assert between(together, trials, PROB**2)
    assert not between(together, trials, 0.9 * PROB**2)
    assert not between(together, trials, 1.1 * PROB**2)


@pytest.mark.parametrize("size", [10**7, 2**46])
def test_batches_of_large_data_sets(size):
    """Sizes are binomial, and the records are spread evenly, as far as the last one."""
    sampler = Poisson.of_batch_size(size, 4096)
    batches = [sampler.indices(KEY, step) for step in range(300)]
    total = sum(len(batch) for batch in batches)
    for factor, expected in ((1.0, True), (0.9, False), (1.1, False)):
        mean = 300 * 4096 * factor
        assert (LEVEL < stats.poisson.cdf(total, mean) < 1 - LEVEL) == expected
    spread = np.var([len(batch) for batch in batches], ddof=1) * 299 / 4096
    assert LEVEL < stats.chi2.cdf(spread, 299) < 1 - LEVEL
    places = torch.cat(batches).numpy() * (64 / size)
    assert stats.chisquare(np.bincount(places.astype(int), minlength=64)).pvalue > LEVEL


@given(small=st.integers(1, 200_000), more=st.integers(0, 70_000), step=st.integers(0, 2**40))
def test_draws_do_not_depend_on_other_records(small, more, step):
    """Adding records at the end changes nobody else's trial: the neighbour relation of the proof."""
    batch = Poisson(small + more, 0.01).indices(KEY, step)
    assert torch.equal(batch[batch < small], Poisson(small, 0.01).indices(KEY, step))


def test_extremes():
    """q = 1 draws everybody, in order; a tiny q draws nobody, which is a batch like any other."""
    assert torch.equal(Poisson(70_000, 1.0).indices(KEY, 5), torch.arange(70_000))
    for prob in (1e-12, 1e-300, 5e-324):
        empty = Poisson(100, prob).indices(KEY, 5)
        assert (empty.shape, empty.dtype) == ((0,), torch.int64)


def test_known_draws():
    """The same records in every version of this library and of numpy: a resumed run draws what it drew before."""
    assert Poisson(100, 0.1).indices(KEY, 0).tolist() == [2, 37, 53, 75, 77, 85, 89, 91, 92, 98]
    assert Poisson(10**9, 5e-9).indices(KEY, 7).tolist() == [414413965, 839099303, 938972809, 967700496]


def test_a_schedule():
    sampler = Poisson(20_000, Schedule(((2, 0.01), (3, 0.2), (1, 0.5))))
    for step, prob in enumerate([0.01, 0.01, 0.2, 0.2, 0.2, 0.5, 0.5]):
        assert sampler.expected_batch_size(step) == prob * 20_000
        assert between(len(sampler.indices(KEY, step)), 20_000, prob)
        assert sampler.events(step, step + 1, 1.5) == (Event(prob, 1.5, 1),)
    assert sampler.events(1, 9, 1.5) == (Event(0.01, 1.5, 1), Event(0.2, 1.5, 3), Event(0.5, 1.5, 4))


def test_the_probability_is_batch_size_over_data_set():
    """Not 1 / len(loader): 48 of 64 records are 2 batches an epoch, and the probability is 0.75, not 0.5."""
    sampler = Poisson.of_batch_size(dataset_size=64, expected_batch_size=48)
    assert sampler == Poisson(64, 0.75)
    assert sampler.expected_batch_size(0) == 48
    assert sampler.events(0, 4, 1.0) == (Event(0.75, 1.0, 4),)
    total = sum(len(sampler.indices(KEY, step)) for step in range(1000))
    assert between(total, 64_000, 0.75)
    assert not between(total, 64_000, 0.5)


@pytest.mark.parametrize(("size", "prob"), [(10_000, 0.3), (10_000, 1.0), (10**9, 1e-6), (7, 0.5)])
def test_chunks_have_no_influence(monkeypatch, size, prob):
    batch = Poisson(size, prob).indices(KEY, 0)
    for chunk in (1, 7, 1000):
        monkeypatch.setattr(poisson, "_CHUNK", chunk)
        assert torch.equal(Poisson(size, prob).indices(KEY, 0), batch)


def peak_bytes(sampler):
    tracemalloc.start()
    sampler.indices(KEY, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_the_memory_is_that_of_the_batch():
    """4096 records of any number; of a large batch the result, twice while the pieces are joined, and one chunk."""
    for size in (10**7, 10**9, 10**12):
        assert peak_bytes(Poisson.of_batch_size(size, 4096)) < 2**20
    assert peak_bytes(Poisson(10**8, 0.01)) < 2 * 8 * 1.1e6 + 2**23


def test_groups_take_turns():
    """A record is drawn in the steps of its group alone, there with `cycle q`; groups are independent and as likely."""
    sampler = CyclicPoisson(5, 0.25, cycle=3)
    groups, taken = np.zeros((1000, 5), int), 0
    for seed in range(1000):
        steps = np.zeros((9, 5), bool)
        for step in range(9):
            steps[step, sampler.indices(insecure_key(seed), step).numpy()] = True
        for record in range(5):
            own = {int(step) % 3 for step in np.flatnonzero(steps[:, record])}
            assert len(own) <= 1
            groups[seed, record] = own.pop() if own else -1
        taken += int(steps.sum())
    assert between(taken, 1000 * 5 * 3, 0.75)
    assert not between(taken, 1000 * 5 * 3, 0.72)
    seen = groups[(groups >= 0).all(1)]  # in three turns at least once: 98.4 %
    assert all(stats.chisquare(np.bincount(seen[:, record], minlength=3)).pvalue > 1e-6 for record in range(5))
    pairs = np.bincount(3 * seen[:, 0] + seen[:, 1], minlength=9)
    assert stats.chisquare(pairs).pvalue > 1e-6
    assert np.array_equal(poisson._groups(KEY, 5, 3), poisson._groups(KEY, 50, 3)[:5])  # whoever else is there
    assert sampler.expected_batch_size(4) == 1.25
    assert CyclicPoisson(1, 0.25, 4).indices(KEY, 1 + int(poisson._groups(KEY, 1, 4)[0])).tolist() == []
    with pytest.raises(InvalidArgument, match=r"sampling_prob <= 1 / cycle = 0.25"):
        CyclicPoisson(50, 0.3, cycle=4)


def test_every_cut_subset_at_its_probability():
    """Four records at q = .5, of which two at most are kept: 11 batches, in 4000 steps."""
    sampler = CappedPoisson(4, 0.5, 2)
    chances = {batch: 1 / 16 for size in (0, 1) for batch in itertools.combinations(range(4), size)}
    pairs = list(itertools.combinations(range(4), 2))
    chances |= dict.fromkeys(pairs, (6 + 4 + 1) / 16 / len(pairs))
    counts = dict.fromkeys(chances, 0)
    for step in range(4000):
        counts[tuple(sampler.indices(KEY, step).tolist())] += 1
    assert stats.chisquare(list(counts.values()), [4000 * chance for chance in chances.values()]).pvalue > 1e-5


def test_without_a_cut_the_draw_is_that_of_poisson():
    for step in range(50):
        assert torch.equal(CappedPoisson(500, 0.1, 500).indices(KEY, step), Poisson(500, 0.1).indices(KEY, step))
        assert len(CappedPoisson(500, 0.1, 45).indices(KEY, step)) <= 45


@pytest.mark.parametrize("cap", [1, 45, 50, 500])
def test_expected_size_of_cut_batches(cap):
    sampler = CappedPoisson(500, 0.1, cap)
    sizes = torch.tensor([float(len(sampler.indices(KEY, step))) for step in range(1000)])
    error = 5 * float(sizes.std()) / 1000**0.5 + 1e-3
    assert sampler.expected_batch_size(0) == pytest.approx(float(sizes.mean()), abs=error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0, 0.1), "integer dataset_size >= 1, got dataset_size=0"),
        (lambda: Poisson(10.0, 0.1), "integer dataset_size >= 1, got dataset_size=10.0"),
        (lambda: Poisson(2**46 + 1, 0.1), r"dataset_size <= 70368744177664"),
        (lambda: Poisson(10, 0.0), "0 < sampling_prob <= 1, got sampling_prob=0.0"),
        (lambda: Poisson(10, 1.5), "0 < sampling_prob <= 1, got sampling_prob=1.5"),
        (lambda: Poisson(10, math.nan), "0 < sampling_prob <= 1"),
        (lambda: Poisson(10, "1%"), "not str"),
        (lambda: Poisson(10, Schedule(((5, 0.1), (5, 2.0)))), "0 < sampling_prob <= 1"),
        (lambda: Poisson.of_batch_size(64, 65), "expected_batch_size <= dataset_size.*64 records"),
        (lambda: Poisson.of_batch_size(64, 0), "0 < expected_batch_size"),
        (lambda: CappedPoisson(0, 0.5, 1), "dataset_size >= 1"),
        (lambda: CappedPoisson(10, 0.0, 1), "0 < sampling_prob <= 1"),
        (lambda: CappedPoisson(10, 0.5, 0), "cap >= 1"),
    ],
)
def test_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
