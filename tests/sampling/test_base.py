"""What holds for every sampler: drawing again, independent steps, and what they charge."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from cases import SAMPLERS
from scipy import stats

import dpfunc
from dpfunc.clipping import Flat
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.sampling import CappedPoisson, FixedSize, InOrder, Poisson, RandomAllocation, Shuffled
from dpfunc.types import ADJACENCIES, Capped, Event

KEY = insecure_key(0)
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


@every_sampler
def test_any_step_can_be_drawn_again(sampler):
    """In any order; other steps and other keys give other batches; a batch has no record twice, and is the caller's."""
    drawn = [sampler.indices(KEY, step) for step in range(20)]
    for step in (19, 3, 11, 0):
        sampler.indices(KEY, step).zero_()
        assert torch.equal(sampler.indices(KEY, step), drawn[step])
        assert not torch.equal(sampler.indices(insecure_key(2**32), step), drawn[step])
    for batch in drawn:
        assert batch.dtype == torch.int64
        assert batch.unique().numel() == batch.numel()
        assert int(batch.min()) >= 0
        assert int(batch.max()) < sampler.dataset_size
    assert len({tuple(batch.tolist()) for batch in drawn}) == 20


@every_sampler
@pytest.mark.parametrize("start", [0, 1, 7])
def test_costs_add_up(sampler, start):
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
    assert names <= {"dataset_size", "sampling_prob", "batch_size", "cap", "num_batches", "cycle"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampler.dataset_size = 1


@pytest.mark.parametrize("sampler", [Poisson(1000, 0.2), FixedSize(1000, 200)], ids=["poisson", "fixed size"])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_steps_are_independent(sampler, lag):
    """A record in this batch says nothing about the next one: both at rate q^2, and neither 0.9 nor 1.1 of it."""
    member_TN = np.zeros((400, 1000))
    for step in range(400):
        member_TN[step, sampler.indices(KEY, step).numpy()] = 1
    both, trials = int((member_TN[lag:] * member_TN[:-lag]).sum()), member_TN[lag:].size
    for factor, accepted in ((1.0, True), (0.9, False), (1.1, False)):
        assert (1e-6 < stats.binom.cdf(both, trials, factor * 0.04) < 1 - 1e-6) == accepted


def test_shuffled_is_not_accounted_as_poisson():
    """100 batches of 1 % cost a whole Gaussian release, not a hundred amplified ones."""
    assert Shuffled(10_000, 100).events(0, 100, 1.0) == (Event(1.0, 1.0, 1),)
    assert Poisson.of_batch_size(10_000, 100).events(0, 100, 1.0) == (Event(0.01, 1.0, 100),)
    assert FixedSize(10_000, 100).events(0, 100, 1.0) == (Capped(1.0, 1.0, 100, 10_000, 100),)


def test_which_neighbours_a_sampler_covers():
    """With a fixed batch size, or a cut, one record more changes the batches of others."""
    assert Poisson(10, 0.1).adjacencies == ADJACENCIES
    assert RandomAllocation(10, 2).adjacencies == ("add_remove", "zero_out")
    for sampler in (CappedPoisson(10, 0.1, 5), FixedSize(10, 5), Shuffled(10, 5), InOrder(10, 5)):
        assert sampler.adjacencies == ("zero_out", "replace_one")


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


@pytest.mark.parametrize(
    "drawn",
    [
        torch.tensor([3, 5, 3]), torch.tensor([3, -1]), torch.tensor([1.0, 2.0]), torch.ones(9, dtype=torch.bool),
        torch.zeros(1, 1, dtype=torch.int64), torch.tensor(3), [3, 5],
    ],
    ids=["twice", "from the end", "floating", "a mask", "a matrix", "a number", "a list"],
)  # fmt: skip
def test_a_record_is_drawn_once(drawn):
    """What a sampler of a user draws is checked before it is read: by the loop, by the loader and by the step."""
    plan = dpfunc.Plan(_Drawn(10, 0.5, drawn), Flat(1.0), noise_multiplier=1.0, num_steps=2, delta=1e-3)
    params = {"w": torch.zeros(2)}
    dp_step = dpfunc.make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), plan)
    state = dp_step.init(params, insecure_key(41))
    size = len(drawn) if isinstance(drawn, list) else drawn.numel()
    for take in (
        lambda: next(plan.batches(state)), lambda: next(iter(plan.loader(torch.ones(10, 2), state))),
        lambda: dp_step(params, torch.ones(size, 2), state),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="different records"):
            take()


@dataclasses.dataclass(frozen=True)
class _Drawn(Poisson):
    drawn: object

    def indices(self, key, step):
        return self.drawn
