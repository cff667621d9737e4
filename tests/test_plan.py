"""Plans: contradictions are refused, budgets are met, JSON reads back."""

import dataclasses
import json
import re

import pytest
from cases import GROUPINGS, RULES
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc import Ledger, Plan, clipping, sampling
from dpfunc.accounting import Event
from dpfunc.checkpoint._format import plan_difference, plan_to_dict
from dpfunc.errors import InvalidArgument, LedgerConflict, NoiseWarning
from dpfunc.noise import Gaussian
from dpfunc.types import Schedule

GOOD = {
    "sampler": sampling.Poisson(1000, 0.05),
    "clip": clipping.Flat(clip_norm=1.0),
    "noise_multiplier": 1.0,
    "num_steps": 20,
    "delta": 1e-5,
}
BUDGET = {
    "epsilon": 3.0,
    "delta": 1e-5,
    "dataset_size": 1000,
    "expected_batch_size": 50,
    "num_steps": 20,
    "clip": clipping.Flat(clip_norm=1.0),
}


class Free(Gaussian):
    """Noise of a user that forgot to say what it costs."""

    def events(self, run, start, stop):
        return ()


class OfNoSize(sampling.Poisson):
    """A sampler of a user whose expected batch divides gradients by NaN."""

    def expected_batch_size(self, step):
        return float("nan")


SHUFFLED = sampling.Shuffled(1000, 500)


class Epochs:
    """A sampler of a user that charges an epoch of two steps at its first one, and says no more about epochs."""

    dataset_size = 1000
    adjacencies = ("zero_out",)
    indices = SHUFFLED.indices
    expected_batch_size = SHUFFLED.expected_batch_size
    events = SHUFFLED.events


@dataclasses.dataclass(frozen=True)
class Beside(clipping.Flat):
    """A clip rule of a user whose statistics have this share of the squared bound."""

    clip_norm: float = 1.0
    share: object = 0.0

    def at(self, step, state):
        return clipping.Flat(1.0)


CONTRADICTIONS = {
    "noise that costs nothing": ({"noise": Free()}, r"Expected noise whose events say what the steps of the run cost"),
    "batches of no size": ({"sampler": OfNoSize(1000, 0.05)}, r"Expected 0 < expected_batch_size of the sampler < inf"),
    "a word for true": ({"delta": 1e-3, "allow_large_delta": "false"}, r"Expected allow_large_delta to be true or false"),
    "delta too large": ({"delta": 1e-3}, r"Expected delta < 1 / dataset_size = 0.001, got delta=0.001.*allow_large_delta"),
    "delta 0": ({"delta": 0.0}, r"Expected 0 < delta < 1, got delta=0\.0"),
    "delta 1": ({"delta": 1.0}, r"Expected 0 < delta < 1, got delta=1\.0"),
    "delta NaN": ({"delta": float("nan")}, r"Expected 0 < delta < 1, got delta=nan"),
    "negative sigma": ({"noise_multiplier": -1.0}, r"Expected 0 < noise_multiplier < inf, got noise_multiplier=-1\.0"),
    "sigma 0": ({"noise_multiplier": 0.0}, r"Expected 0 < noise_multiplier < inf"),
    "sigma NaN": ({"noise_multiplier": float("nan")}, r"got noise_multiplier=nan"),
    "sigma text": ({"noise_multiplier": "1"}, r"got noise_multiplier='1'"),
    "no steps": ({"num_steps": 0}, r"Expected an integer num_steps >= 1, got num_steps=0"),
    "half a step": ({"num_steps": 2.5}, r"got num_steps=2\.5"),
    "adjacency": ({"adjacency": "add-remove"}, r"Expected adjacency to be one of 'add_remove', 'zero_out', 'replace_one'"),
    "allocation": ({"allocation": "equal"}, r"Expected allocation to be one of 'uniform', 'optimal'"),
    "GDP as budget": ({"accountant": "gdp-approximation"}, r"Expected accountant to be one of.*under-reports"),
    "clip": ({"clip": 1.0}, r"Expected a clip rule such as clipping.Flat\(clip_norm=...\), got clip=1\.0"),
    "clip class": ({"clip": clipping.Flat}, r"Expected a clip rule such as clipping.Flat\(clip_norm=...\), got clip=<class"),
    "share NaN": ({"clip": Beside(share=float("nan"))}, r"Expected 0 <= share < 1, got share=nan"),
    "share below 0": ({"clip": Beside(share=-0.1)}, r"Expected 0 <= share < 1, got share=-0\.1"),
    "share of a text": ({"clip": Beside(share="0.1")}, r"Expected 0 <= share < 1, got share='0\.1'"),
    "sampler": ({"sampler": 0.05}, r"Expected a sampler such as sampling.Poisson"),
    "noise": ({"noise": 1.0}, r"Expected noise such as noise.Gaussian\(\), got noise=1\.0"),
    "plan over budget": ({"epsilon": 0.1}, r"Expected a plan within its budget, got epsilon=0.1, but 20 steps"),
    "negative budget": ({"epsilon": -1.0}, r"Expected 0 < epsilon < inf, got epsilon=-1\.0"),
    "shuffled with add/remove": (
        {"sampler": sampling.Shuffled(1000, 50)}, r"Expected adjacency to be one of \('zero_out', 'replace_one'\) with Shuffled",
    ),
    "fixed size with add/remove": ({"sampler": sampling.FixedSize(1000, 50)}, "with FixedSize"),
    "allocated with replaced records": (
        {"sampler": sampling.RandomAllocation(1000, 20), "adjacency": "replace_one"}, "with RandomAllocation"
    ),
    "noise changes inside a shuffled epoch": (
        {
            "sampler": SHUFFLED, "adjacency": "zero_out",
            "noise_multiplier": Schedule(((3, 1.0), (3, 0.5))),
        },
        "where a release begins, got a change at step 3",
    ),
    "noise changes inside a release of a user's sampler": (
        {"sampler": Epochs(), "adjacency": "zero_out", "noise_multiplier": Schedule(((3, 5.0), (3, 0.5)))},
        "where a release begins, got a change at step 3",
    ),
}  # fmt: skip
OF_BUDGETS = {
    "q > 1": ({"expected_batch_size": 1001}, r"0 < expected_batch_size <= dataset_size.*expected_batch_size=1001"),
    "empty data": ({"dataset_size": 0}, r"dataset_size >= 1, got dataset_size=0"),
    "a number for a schedule": ({"noise_schedule": 0}, "noise_schedule to be a dpfunc.types.Schedule, or None"),
    "no batch": ({"expected_batch_size": 0}, r"expected_batch_size=0"),
    "epsilon 0": ({"epsilon": 0}, r"Expected 0 < epsilon < inf, got epsilon=0"),
    "delta": ({"delta": 0.01}, r"Expected delta < 1 / dataset_size"),
}


@pytest.mark.parametrize("name", [*CONTRADICTIONS, *OF_BUDGETS])
def test_contradictions_are_refused(name):
    changes, message = (CONTRADICTIONS | OF_BUDGETS)[name]
    make, facts = (Plan.for_budget, BUDGET) if name in OF_BUDGETS else (Plan, GOOD)
    with pytest.raises(InvalidArgument, match=message):
        make(**{**facts, **changes})


def test_large_delta_on_purpose():
    assert Plan(**{**GOOD, "delta": 0.01, "allow_large_delta": True}).delta == 0.01


@settings(max_examples=5)
@given(epsilon=st.floats(0.5, 8), steps=st.integers(20, 200), q=st.floats(0.01, 0.5))
def test_budget_is_met_and_used(epsilon, steps, q):
    plan = Plan.for_budget(**{**BUDGET, "epsilon": epsilon, "num_steps": steps, "expected_batch_size": 1000 * q})
    assert 0.97 * epsilon < plan.guarantee().epsilon <= epsilon
    less = Plan(plan.sampler, plan.clip, plan.noise_multiplier * 0.98, steps, plan.delta)
    assert less.guarantee().epsilon > plan.guarantee().epsilon


def test_budget_over_two_phases():
    spent = Ledger((Event(0.1, 1.5, 20),))
    plan = Plan.for_budget(**BUDGET, spent=spent)
    alone = Plan.for_budget(**BUDGET)
    assert plan.noise_multiplier > alone.noise_multiplier
    assert spent.compose(plan.ledger()).epsilon(1e-5).epsilon <= 3.0
    assert plan.step_limit(spent) == 20
    assert plan.spent == spent
    assert alone.spent is None
    with pytest.raises(InvalidArgument, match="after 20 earlier ones, spend"):
        dataclasses.replace(plan, noise_multiplier=alone.noise_multiplier)
    with pytest.raises(LedgerConflict, match="Expected spent with adjacency 'add_remove'"):
        dataclasses.replace(plan, spent=Ledger(adjacency="zero_out"))
    with pytest.raises(InvalidArgument, match="Expected spent to be a dpfunc Ledger"):
        dataclasses.replace(plan, spent=3.0)


@pytest.mark.parametrize("noises", [(1.0, 4.0), (4.0, 1.0)])
def test_the_limit_of_a_run_that_goes_on_counts_its_later_steps(noises):
    """Steps from the fifth on have another cost: what is left after the first ones, and some more, is for those."""
    noise = Schedule(tuple((5, value) for value in noises))
    plan = Plan(sampling.Poisson(1000, 0.1), clipping.Flat(1.0), noise, num_steps=10, delta=1e-5)
    bounded = dataclasses.replace(plan, epsilon=plan.guarantee().epsilon)
    again = plan.ledger(5).compose(Ledger(plan.events(5, 7)))  # two steps were drawn anew
    assert bounded.step_limit(plan.ledger(5), 5) == 10
    assert bounded.step_limit(again, 5) == 8
    assert bounded.step_limit(plan.ledger(), 12) == 12  # behind the end there is no step, and no error


def test_runs_share_one_budget():
    """Five runs, each with the ledger of those before it, use the budget up and no more; a sixth has no step left."""
    plan = Plan.for_budget(**BUDGET, runs=5)
    spent = Ledger()
    for _ in range(5):
        assert plan.step_limit(spent) == plan.num_steps
        spent += plan.ledger()
    assert 0.97 * 3.0 < spent.epsilon(1e-5).epsilon <= 3.0
    assert plan.step_limit(spent) < plan.num_steps / 4
    with pytest.raises(InvalidArgument, match="runs"):
        Plan.for_budget(**BUDGET, runs=0)


def test_budget_with_a_noise_schedule():
    plan = Plan.for_budget(**BUDGET, noise_schedule=Schedule(((10, 2.0), (10, 1.0))))
    (_, first), (_, second) = plan.noise_multiplier.pieces
    assert first == pytest.approx(2 * second)
    assert 2.9 < plan.guarantee().epsilon <= 3.0


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_the_adjacency_reaches_the_ledger(adjacency):
    plan = Plan.for_budget(**BUDGET, adjacency=adjacency)
    assert plan.ledger().adjacency == adjacency
    assert plan.guarantee().epsilon <= 3.0


def test_the_clip_norm_does_not_change_epsilon():
    answers = {Plan(**{**GOOD, "clip": clipping.Flat(c)}).guarantee().epsilon for c in (0.01, 1.0, 100.0)}
    assert len(answers) == 1


def test_at_fixed_noise_larger_batches_cost_more():
    answers = [Plan(**{**GOOD, "sampler": sampling.Poisson(1000, q)}).guarantee().epsilon for q in (0.01, 0.05, 0.2)]
    assert answers == sorted(answers)


PLANS = {
    "plain": GOOD,
    "groups": {**GOOD, "clip": clipping.Flat({"a": 1.0, "b": 0.5}, groups=clipping.ByName({"w": "a", "v": "b"}))},
    "blocks": {**GOOD, "clip": clipping.PSAC(1.0, 0.1, groups=clipping.Blocks(3)), "allocation": "optimal"},
    "schedules": {
        **GOOD, "sampler": sampling.Poisson(1000, Schedule(((5, 0.1), (5, 0.2)))),
        "noise_multiplier": Schedule(((7, 1.0), (1, 2.0))),
    },
    "shuffled": {**GOOD, "sampler": sampling.Shuffled(1000, 30), "adjacency": "replace_one", "clip": clipping.auto_v()},
    "in order": {**GOOD, "sampler": sampling.InOrder(1000, 30), "adjacency": "zero_out"},
    "budget": {**GOOD, "epsilon": 50.0},
    **{name: {**GOOD, "clip": make(1.0, clipping.AllParameters())} for name, (make, _) in RULES.items()},
    **{f"groups by {name}": {**GOOD, "clip": clipping.Flat(1.0, groups=each)} for name, each in GROUPINGS.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_json_round_trip(name):
    plan = Plan(**PLANS[name])
    values = json.loads(json.dumps(plan_to_dict(plan)))
    assert plan_difference(plan, values) == []


def test_a_rule_of_ones_own_cannot_be_written():
    class Mine:
        groups = clipping.AllParameters()
        clip_norm = 1.0

        def factors(self, norms_BG, bounds_G):
            return bounds_G / norms_BG

    with pytest.raises(InvalidArgument, match="Mine"):
        plan_to_dict(Plan(**{**GOOD, "clip": Mine()}))


NOISY = {"epsilon": 0.1, "delta": 1e-5, "dataset_size": 1000, "num_steps": 100, "expected_batch_size": 500}


def test_a_plan_whose_noise_hides_all_is_said():
    """Noise multiplier above 150: from public facts, with a number of records that helps."""
    with pytest.warns(NoiseWarning, match=r"room for at least 100 trained parameters, got room for 6\d") as caught:
        noisy = Plan.for_budget(**NOISY, clip=clipping.Automatic())
    assert noisy.noise_multiplier > 150
    assert caught[0].filename == __file__
    assert str(caught[0].message) == noisy.advice()
    records = int(re.search(r"have (\d+) records", noisy.advice()).group(1))
    half = {**NOISY, "dataset_size": records, "expected_batch_size": records / 2}
    assert Plan.for_budget(**half, clip=clipping.Automatic()).advice() is None  # warnings are errors in these tests
    with pytest.warns(NoiseWarning):
        Plan.for_budget(
            **{**half, "dataset_size": records - 5, "expected_batch_size": records / 2 - 2.5}, clip=clipping.Automatic()
        )


def test_the_advice_of_a_plan_adds_up_its_steps():
    """Room for d parameters where `sqrt(d)` is a quarter of the root of the sum of (b_t / sigma_t)^2."""
    sampler = sampling.Poisson(1000, Schedule(((2, 0.1), (2, 0.05))))
    for adjacency, scale in (("add_remove", 1.0), ("replace_one", 2.0)):
        noise = Schedule(((1, 20.0), (3, 10.0)))
        found = Plan(sampler, clipping.Flat(1.0), noise, num_steps=4, delta=1e-5, adjacency=adjacency)
        room = (5**2 + 10**2 + 5**2 + 5**2) / 16 / scale**2
        assert f"got room for {int(room)}:" in found.advice()
