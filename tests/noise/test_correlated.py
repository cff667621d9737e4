"""Correlated noise: what each strategy draws, in which memory and with which rounding; and what it refuses."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from cases import linear_loss
from cases import params as zeros
from noise_cases import BANDS, BUFFERS, NUM_RECORDS, ONCE

from dpfunc import Plan, clipping, make_dp_step, noise
from dpfunc.accounting import Event
from dpfunc.errors import BudgetExhausted, InvalidArgument
from dpfunc.noise import Run, Turn
from dpfunc.noise import correlated as module
from dpfunc.noise._streams import standard_normal
from dpfunc.rng import fold_in, insecure_key, secure_key
from dpfunc.sampling import CyclicPoisson, FixedSize, InOrder, Poisson, RandomAllocation, Shuffled, ShuffledOnce
from dpfunc.types import ClippedSum, Schedule

STATE = {"noise": "of all keys", "source": "secure"}

STRATEGIES = {
    "lambda-CGD": noise.LambdaCGD(0.9), "BISR": noise.BISR(4), "BSR": noise.BSR(5), "all bands": noise.BSR(),
    "BandMF": BANDS, "BLT": BUFFERS,
}  # fmt: skip
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
ROOT = insecure_key(3)


def key_of(step):
    return fold_in(ROOT, step)


def clipped_sum(size, dtype=torch.float32):
    return ClippedSum({"w": torch.zeros(size, dtype=dtype)}, {"w": "all"}, {"all": 1.0})


def released(correlated, steps, size, dtype=torch.float32):
    """What is added to zeros in each step, with a noise multiplier of 1; all states."""
    mechanism = correlated.mechanism(Run(ShuffledOnce(100, 10), 1.0, steps))
    clipped = clipped_sum(size, dtype)
    state, found = mechanism.init(clipped.sums), []
    for step in range(steps):
        values, state = mechanism.add(clipped, state, Turn(step, key_of(step), key_of))
        found.append(values["w"].clone())
        del values  # its memory is that of noise
    return torch.stack(found), state


def exact(strategy, steps, size):
    """Weights, normals and their products, in float64, of the float32 normals of the keys."""
    like = {"w": torch.zeros(size)}
    normals = np.array([standard_normal(key_of(step), like)["w"].numpy() for step in range(steps)], np.float64)
    weights = np.zeros((steps, steps))
    for step in range(steps):
        row = strategy.row(steps, step)
        weights[step, step + 1 - len(row) : step + 1] = row[::-1]
    return weights, normals


@every_strategy
def test_rounding(strategy):
    """Within the error that is stated, and with one: the sums are float32; float64 sums have none of it."""
    weights, normals = exact(strategy, 16, 300)
    found = released(noise.Correlated(strategy), 16, 300)[0].double().numpy()
    bound = (np.count_nonzero(weights, axis=1)[:, None] + 1) * 2.0**-24 * (np.abs(weights) @ np.abs(normals))
    off = np.abs(found - weights @ normals)
    assert (off <= bound).all()
    assert off.max() > 0.01 * bound.max()
    wide = released(noise.Correlated(strategy), 16, 300, torch.float64)[0]
    assert wide.dtype == torch.float64
    assert np.abs(wide.numpy() - weights @ normals).max() < 1e-6  # the normals are not rounded to float32 first


@pytest.mark.parametrize("strategy", [BUFFERS, BANDS, noise.BSR(5)], ids=["BLT", "BandMF", "BSR"])
def test_buffers_are_the_rows(strategy):
    """In 1000 steps within 2^-15 of the deviation, and the state that a step was given stays as it was."""
    weights, normals = exact(strategy, 1000, 20)
    found, state = released(noise.Correlated(strategy, "state"), 1000, 20)
    deviation = np.linalg.norm(weights, axis=1)[:, None]
    assert (np.abs(found.double().numpy() - weights @ normals) <= 2.0**-15 * deviation).all()
    assert len(state["buffers"]) == len(strategy.recursion(1000).read)
    mechanism = noise.Correlated(strategy, "state").mechanism(Run(ONCE, 1.0, 1000))
    assert mechanism.add_share is None
    turn, before = Turn(7, key_of(7), key_of), [each["w"].clone() for each in state["buffers"]]
    first, after = mechanism.add(clipped_sum(20), state, turn)
    assert all(map(torch.equal, before, (each["w"] for each in state["buffers"])))
    assert torch.equal(first["w"], mechanism.add(clipped_sum(20), state, turn)[0]["w"])
    ones = ClippedSum({"w": torch.ones(20)}, {"w": "all"}, {"all": 1.0})  # the state does not depend on the data
    for one, other in zip(mechanism.add(ones, state, turn)[1]["buffers"], after["buffers"], strict=True):
        assert torch.equal(one["w"], other["w"])


@every_strategy
def test_nothing_is_kept(strategy, monkeypatch):
    """Two sets of noise of the size of the parameters at most are alive at once, and none after the step."""
    alive, most = [], []

    def counted(key, like, source="secure"):
        drawn = standard_normal(key, like, source)
        alive.append(weakref.ref(drawn["w"]))
        most.append(sum(ref() is not None for ref in alive))
        return drawn

    monkeypatch.setattr(module, "standard_normal", counted)
    gc.collect()
    found, state = released(noise.Correlated(strategy), 12, 30)
    assert state == STATE
    assert len(alive) == sum(len(strategy.row(12, step)) for step in range(12))
    assert max(most) == 2
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    assert len(found) == 12


def test_only_the_keys_of_the_weights_are_used():
    """A step of lambda-CGD draws the noise of one step before, of BISR(4) that of three."""
    for strategy, most in ((noise.LambdaCGD(0.5), 2), (noise.BISR(4), 4)):
        used = []
        turn = Turn(9, key_of(9), lambda step, used=used: used.append(step) or key_of(step))
        noise.Correlated(strategy).mechanism(Run(ONCE, 1.0, 20)).add(clipped_sum(3), STATE, turn)
        assert sorted(used) == list(range(10 - most, 10))


def plan(correlated, sampler=ONCE, **changes):
    facts = {"noise_multiplier": 1.0, "num_steps": 6, "delta": 1e-3, "adjacency": "zero_out"} | changes
    return Plan(sampler, clipping.Flat(1.0), noise=correlated, **facts)


LISTED = noise.Correlated(noise.BISR(3))
REFUSED = {
    "poisson": (lambda: plan(LISTED, Poisson(12, 0.5)), "a sampler that bounds how often a record takes part"),
    "fixed size": (lambda: plan(LISTED, FixedSize(12, 3)), "a sampler that bounds how often a record takes part"),
    "a schedule": (
        lambda: plan(LISTED, noise_multiplier=Schedule(((2, 1.0), (1, 2.0)))), "one noise multiplier for all steps"
    ),
    "no buffers": (lambda: plan(noise.Correlated(noise.BISR(3), "state")), 'buffers="redraw" with BISR'),
    "no strategy": (lambda: noise.Correlated(0.5), "a strategy such as noise.BISR"),
    "a class": (lambda: noise.Correlated(noise.BISR), "a strategy such as noise.BISR"),
    "no such way": (lambda: noise.Correlated(noise.BISR(3), "cache"), "buffers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    made, message = REFUSED[case]
    with pytest.raises(InvalidArgument, match=message):
        made()


def test_another_source_of_noise_is_refused_within_a_run():
    """It has other numbers for earlier steps; buffers hold what was drawn, whatever drew it."""
    run = Run(ShuffledOnce(512, 8), 2.0, 512)
    params = {"w": torch.zeros(3)}
    clipped = ClippedSum({"w": torch.zeros(3)}, {"w": "all"}, {"all": 1.0})
    key_of = lambda step: fold_in(insecure_key(0), step)
    mechanism = noise.Correlated(noise.BISR(3)).mechanism(run)
    _, state = mechanism.add(clipped, mechanism.init(params), Turn(0, key_of(0), key_of))
    other = noise.Correlated(noise.BISR(3)).mechanism(run._replace(source="device"))
    with pytest.raises(InvalidArgument, match="noise_source='secure', with which the run began"):
        other.add(clipped, state, Turn(1, key_of(1), key_of))
    mechanism.add(clipped, state, Turn(1, key_of(1), key_of))


def test_events():
    """The sensitivity of the participation; in cycles at least as long as the bands, samples of one release a cycle."""
    run = Run(ShuffledOnce(512, 8), 2.0, 512)
    for strategy, squared in ((noise.BSR(32), 17.33580304), (noise.BISR(32), 22.40769827)):
        (event,) = noise.Correlated(strategy).events(run, 0, 1)
        assert event.noise_multiplier == pytest.approx(2.0 / squared**0.5, rel=1e-9)
        assert (event.sampling_prob, event.num_steps) == (1.0, 1)
        assert noise.Correlated(strategy).events(run, 1, 512) == ()
        assert noise.Correlated(strategy).events(run, 0, 0) == ()
    bands = noise.BandMF((1.0, 0.5))
    cyclic = run._replace(sampler=CyclicPoisson(1000, 0.01, 8))
    for cycle, strategy in ((8, noise.BandMF((1.0,) * 8)), (2, bands)):
        one = cyclic._replace(sampler=CyclicPoisson(1000, 0.01, cycle))
        norm = strategy.sensitivity(512, 512, 1)
        assert noise.Correlated(strategy).events(one, 0, 3) == (Event(0.01 * cycle, 2.0 / norm, 512 // cycle),)
    (event,) = noise.Correlated(noise.BandMF((1.0,) * 9)).events(cyclic, 0, 1)  # more bands than groups
    assert event.sampling_prob == 1.0
    (event,) = LISTED.events(run._replace(sampler=Poisson(512, 1.0)), 0, 1)  # of a batch that nobody drew
    assert event.noise_multiplier == pytest.approx(2.0 / noise.BISR(3).sensitivity(512, 1, 512))


@pytest.mark.parametrize("sampler", [
    ShuffledOnce(30, 7), InOrder(30, 7), Shuffled(30, 7), RandomAllocation(30, 5), CyclicPoisson(30, 0.2, 5),
    CyclicPoisson(30, 0.05, 4), Shuffled(30, 1),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("steps", [1, 4, 5, 6, 23])
def test_samplers_keep_what_they_bound(sampler, steps):
    """The separation, and the number of participations of a record, in draws of some keys."""
    separation, most = sampler.participation(steps)
    for seed in range(5):
        taken = np.zeros((steps, 30), bool)
        for step in range(steps):
            taken[step, sampler.indices(insecure_key(seed), step).numpy()] = True
        assert taken.sum(0).max() <= most
        gaps = [np.diff(np.flatnonzero(own)).min(initial=steps) for own in taken.T]
        assert min(gaps) >= min(separation, steps)


def test_a_budget_has_room_for_all_or_nothing():
    whole = Plan.for_budget(
        epsilon=2.0, delta=1e-3, sampler=ONCE, num_steps=6, clip=clipping.Flat(1.0), adjacency="zero_out",
        noise=noise.Correlated(BANDS), runs=2,
    )  # fmt: skip
    first = make_dp_step(linear_loss, whole).init(zeros(), secure_key())
    assert first.limit == 6
    again = make_dp_step(linear_loss, whole).init(zeros(), secure_key(), ledger=whole.ledger())
    assert again.limit == 6
    with pytest.raises(BudgetExhausted):
        make_dp_step(linear_loss, whole).init(zeros(), secure_key(), ledger=whole.ledger().compose(whole.ledger()))
    with pytest.raises(BudgetExhausted, match="costs epsilon=.*more than the budget"):  # nobody drew its batch
        make_dp_step(linear_loss, whole)(zeros(), {name: value[None] for name, value in zeros().items()})
    assert whole.sampler.dataset_size == NUM_RECORDS


def test_no_advice_is_given_by_the_noise_of_single_steps():
    """In sums there is less of it; independent noise of this multiplier has room for few parameters."""
    assert "got room for 0" in plan(noise.Gaussian(), noise_multiplier=30.0).advice()
    assert plan(LISTED, noise_multiplier=30.0).advice() is None


def test_telemetry_errors_are_those_of_the_noise():
    """Of a step: the norm of its weights."""
    statistics = clipping.Telemetry((clipping.Statistic("loss", high=4.0),), share=0.04)
    own, alone = (plan(each, telemetry=statistics) for each in (noise.Correlated(BANDS), noise.Gaussian()))
    for step, norm in ((0, 1.25), (1, 1.25 * np.hypot(1, 0.75))):
        ratio = own.telemetry_errors(step)["loss"] / alone.telemetry_errors(step)["loss"]
        assert ratio == pytest.approx(norm)


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        (noise.BandMF((0.001, 1.0)), 40), (noise.BandMF((1.0, 3.0)), 300), (noise.BandMF((1e-320, 1.0)), 40),
        (noise.BandMF((1e300, 1e300)), 8), (noise.BandMF((1e-40,)), 1), (noise.BLT((1e6,), (0.5,)), 40),
    ],
    ids=str,
)  # fmt: skip
def test_noise_without_numbers_is_refused_before_a_run(strategy, steps):
    """Weights that overflow made a step fail after the whole run was paid, by an error that blames the records."""
    with pytest.raises(InvalidArgument, match=r"strategy=B.*(sensitivity is|C\^-1 grows to)"):
        noise.Correlated(strategy).check(Run(ShuffledOnce(100, 10), 1.0, steps))


class Told(ShuffledOnce):
    """A sampler of a user, with what it says about participation."""

    told = (0, 0)

    def participation(self, num_steps):
        return self.told


@pytest.mark.parametrize("told", [3, (0, 1), (1, 0), (1, 1.5), None], ids=str)
def test_a_participation_outside_its_domain_is_refused_before_a_run(told, monkeypatch):
    monkeypatch.setattr(Told, "told", told)
    with pytest.raises(InvalidArgument, match=r"participation|separation"):
        noise.Correlated(noise.BISR(2)).check(Run(Told(100, 10), 1.0, 20))


class Often(Poisson):
    """A sampler with a number of another meaning under the name `cycle`: a record can be in each step."""

    cycle = 10

    def participation(self, num_steps):
        return 1, num_steps


def test_samples_in_cycles_are_not_claimed_where_a_record_comes_again_sooner():
    run = Run(Often(100, 0.1), 1.0, 8)
    (event,) = noise.Correlated(BANDS).events(run, 0, 8)
    assert event.sampling_prob == 1
    assert event.noise_multiplier == pytest.approx(1 / BANDS.sensitivity(8, 1, 8))


def test_a_strategy_of_a_user_is_asked_each_time():
    """Its sensitivity was remembered, by an object that can change, or that has no hash."""

    class Powers(noise.Toeplitz):
        bands = None
        decay = 0.5
        __hash__ = None

        def coefficients(self, num_steps):
            return self.decay ** np.arange(num_steps)

        def inverse(self, num_steps):
            return np.array([1.0, -self.decay, *[0.0] * num_steps])[:num_steps]

        def recursion(self, num_steps):
            return None

    own = Powers()
    before = own.sensitivity(20, 20, 1)
    own.decay = 0.9
    assert before**2 == pytest.approx(4 / 3, rel=1e-9)
    assert own.sensitivity(20, 20, 1) ** 2 == pytest.approx((1 - 0.9**40) / (1 - 0.9**2), rel=1e-9)


@pytest.mark.parametrize("changed", [{"w": (4, 3)}, {"w": (4, 1), "v": (2,)}, {"w": (4,)}], ids=str)
def test_buffers_are_of_the_parameters_with_which_the_run_began(changed):
    """A buffer of (4, 1) was spread over a sum of (4, 3): three numbers with the same earlier noise; others: raw errors."""

    def sums(shapes):
        leaves = {name: torch.zeros(shape) for name, shape in shapes.items()}
        return ClippedSum(leaves, dict.fromkeys(leaves, "all"), {"all": 1.0})

    mechanism = noise.Correlated(BANDS, "state").mechanism(Run(ShuffledOnce(100, 10), 1.0, 8))
    first = sums({"w": (4, 1)})
    _, state = mechanism.add(first, mechanism.init(first.sums), Turn(0, key_of(0), key_of))
    with pytest.raises(InvalidArgument, match=r"parameters with which the run began.*shape"):
        mechanism.add(sums(changed), state, Turn(1, key_of(1), key_of))
