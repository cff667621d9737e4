"""Poisson batches of a largest size: the law of their draws."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.sampling import CappedPoisson, Poisson

KEY = insecure_key(0)


def test_every_subset_at_its_probability():
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
def test_expected_batch_size(cap):
    sampler = CappedPoisson(500, 0.1, cap)
    sizes = torch.tensor([float(len(sampler.indices(KEY, step))) for step in range(1000)])
    error = 5 * float(sizes.std()) / 1000**0.5 + 1e-3
    assert sampler.expected_batch_size(0) == pytest.approx(float(sizes.mean()), abs=error)


def test_refused():
    for sizes in ((0, 0.5, 1), (10, 0.0, 1), (10, 0.5, 0)):
        with pytest.raises(InvalidArgument):
            CappedPoisson(*sizes)
