"""Loops of files: both forms are read, the loop sees its own records only, and what is planted is found or not."""

import dataclasses
import math
import re

import pytest
import torch
from evidence_loops import Less, OnHalf, Reused

import dpfunc
from dpfunc.errors import InvalidArgument
from dpfunc.evidence import largest_bound, replay
from dpfunc.evidence.canary_run import Planted, audit_loop
from dpfunc.evidence.script import audit as audit_file
from dpfunc.evidence.script import read_script
from dpfunc.noise import BLT, Correlated, Gaussian, LambdaCGD

HEAD = """
import torch
import dpfunc
from dpfunc import clipping, sampling

plan = dpfunc.Plan(sampling.Poisson(60, 0.5), clipping.Flat(1.0), noise_multiplier=2.0, num_steps=5, delta=1e-3)
dp_step = dpfunc.make_dp_step(lambda params, x: (params["w"] * x).sum(1), plan)
data = torch.randn(60, 500, generator=torch.Generator().manual_seed(0))
"""
PLAIN = f"""{HEAD}
def train(dp_step, data, key):
    params = {{"w": torch.zeros(500)}}
    state = dp_step.init(params, key)
    yield params, state
    for indices in dp_step.plan.batches(state):
        grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
        params = {{"w": params["w"] - 0.1 * grads["w"]}}
        yield params, state
"""
LOOP = f"""{HEAD}
def init(dp_step, data, key):
    params = {{"w": torch.zeros(500)}}
    return params, dp_step.init(params, key)

def step(dp_step, data, carry):
    params, state = carry
    indices = dp_step.plan.draw(state, state.step)
    grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
    params = {{"w": params["w"] - 0.1 * grads["w"]}}
    return None if state.step == state.limit else (params, state)
"""
IN_DATA = """
canaries = 30 * torch.eye(500)[:300]
"""
NO_NOISE = """
from dataclasses import dataclass, replace
from dpfunc.noise import Gaussian

@dataclass(frozen=True)
class Less(Gaussian):
    def mechanism(self, run):
        return super().mechanism(run._replace(noise_multiplier=1e-3 * run.noise_multiplier))

dp_step = replace(dp_step, plan=replace(plan, noise=Less()))
"""


def script(folder, text):
    path = folder / "loop.py"
    path.write_text(text)
    return read_script(path)


def audited(own, seed, count=300, step=None):
    key = dpfunc.rng.insecure_key(seed)
    planted = Planted(key, count, own.canaries)
    return *audit_loop(own.dp_step, own.init, step or own.step, own.data, planted, key=key, steps=50), planted


@pytest.mark.parametrize(("form", "space"), [(LOOP, ""), (PLAIN, IN_DATA)], ids=["gradient", "input"])
def test_an_honest_loop_is_not_refuted_and_one_without_noise_is(tmp_path, form, space):
    found, steps, plan, _ = audited(script(tmp_path, form + space), len(space))
    assert (found.exceeds, steps, found.num_canaries) == (False, 5, 300)
    assert found.claim == pytest.approx(plan.ledger(5).epsilon(plan.delta).epsilon)
    found, *_ = audited(script(tmp_path, form + space + NO_NOISE), 50 + len(space))
    assert found.exceeds, found


def test_other_records_than_those_of_the_plan_are_refused_without_their_number(tmp_path):
    own = script(tmp_path, LOOP + IN_DATA)
    with pytest.raises(InvalidArgument, match=r"data of 60 records, .*, got another number\."):
        audited(dataclasses.replace(own, data=own.data[:57]), 1)


def test_a_number_of_canaries_that_a_file_has_itself_is_refused(tmp_path):
    """It had no effect."""
    script(tmp_path, LOOP + IN_DATA)
    options = {"key": dpfunc.rng.insecure_key(1), "steps": 2, "score": "sum"}
    with pytest.raises(InvalidArgument, match=r"no --canaries, as loop.py has canaries of its own.*canaries=40"):
        audit_file(tmp_path / "loop.py", count=40, **options)
    assert audit_file(tmp_path / "loop.py", count=None, **options)[0].num_canaries == 300


@pytest.mark.parametrize("space", ["", IN_DATA], ids=["gradient", "input"])
def test_the_loop_sees_its_own_records(tmp_path, space):
    """As many as its own draw, and never a canary in gradients; one among the records only if it is in."""
    seen, own = [], script(tmp_path, LOOP + space)

    def looking(dp_step, data, carry):
        seen.append(dp_step.plan.draw(carry[1], carry[1].step))
        assert len(data) == (360 if space else 60)
        return own.step(dp_step, data, carry)

    _, _, plan, planted = audited(own, 60 + len(space), step=looking)
    drawn = torch.cat(seen).unique() - 60
    assert plan.sampler.dataset_size == 360
    assert bool(planted.present[drawn[drawn >= 0]].all()) if space else int(drawn.max()) < 0


NOISES = {
    "as claimed": (Gaussian(), ""),
    "0.9 of it": (Less(factor=0.9), "of what is claimed"),
    "1.1 of it": (Less(factor=1.1), "of what is claimed"),
    "none": (Less(), "is 0 of what"),
    "on half of each parameter": (OnHalf(), "of what is claimed"),
    "on half, with the variance of all": (OnHalf(factor=2**0.5), "another law"),
    "the same in each step": (Reused(), "not independent"),
}


@pytest.mark.parametrize("name", NOISES)
def test_noise_that_is_not_claimed_is_found(tmp_path, name):
    """By the guesses alone it was found in 0 of 10 runs with 0.9, 0.8, and on half of each parameter."""
    own = script(tmp_path, LOOP)
    noise, words = NOISES[name]
    plan = dataclasses.replace(own.dp_step.plan, noise=noise)
    for seed in range(2):
        own = dataclasses.replace(own, dp_step=dataclasses.replace(own.dp_step, plan=plan))
        found, *_ = audited(own, 1000 + 10 * [*NOISES].index(name) + seed)
        assert words in found.noise, found
        assert bool(words) == bool(found.noise) == found.exceeds, found
        assert found.noise in repr(found)


@dataclasses.dataclass(frozen=True)
class Forgetful(Correlated):
    """It takes nothing back of earlier noise, at the deviation that is claimed for each step."""

    def mechanism(self, run):
        deviations = tuple((1, math.hypot(*self.weights(run, step))) for step in range(run.num_steps))
        return Gaussian().mechanism(run._replace(noise_multiplier=dpfunc.types.Schedule(deviations)))


@pytest.mark.parametrize(("kind", "words"), [(Correlated, ""), (Forgetful, "of what is claimed")])
@pytest.mark.parametrize("strategy", [LambdaCGD(0.5), BLT((0.5, 0.2), (0.9, 0.4))], ids=["lambda-CGD", "BLT"])
def test_correlated_noise_is_compared_with_its_weights(tmp_path, kind, words, strategy):
    """Independent noise, taken out of that of all steps: correlation that is missing is found."""
    own = script(tmp_path, LOOP + IN_DATA)
    sampler = dpfunc.sampling.ShuffledOnce(60, 30)
    plan = dataclasses.replace(own.dp_step.plan, noise=kind(strategy), sampler=sampler, adjacency="zero_out")
    own = dataclasses.replace(own, dp_step=dataclasses.replace(own.dp_step, plan=plan))
    place = 10 * len(words) + len(strategy.row(9, 8))  # a key of its own for each case
    for seed in range(2):
        found, *_ = audited(own, 2000 + 1000 * seed + place)
        assert words in found.noise, found
        assert bool(words) == bool(found.noise) == found.exceeds, found


def test_what_canaries_can_show_is_said_before(tmp_path, caplog):
    audited(script(tmp_path, LOOP), 72, count=40)
    most, _ = largest_bound(40, delta=1e-3)
    assert f"40 canaries shows at most epsilon >= {most:.3g}" in caplog.records[0].getMessage()


def test_bad_loops(tmp_path):
    own = script(tmp_path, LOOP)
    with pytest.raises(InvalidArgument, match="took no step"):
        audited(own, 62, step=lambda *given: None)
    with pytest.raises(InvalidArgument, match="Expected a state"):
        audited(own, 63, step=lambda dp_step, data, carry: dp_step(carry[0], data))
    planted = Planted(dpfunc.rng.insecure_key(64), 0, torch.zeros(4, 500))
    with pytest.raises(InvalidArgument, match="dataset_size"):
        audit_loop(own.dp_step, own.init, own.step, own.data[:9], planted, key=dpfunc.rng.insecure_key(64), steps=5)


@pytest.mark.parametrize("form", [LOOP, PLAIN], ids=["functions", "plain loop"])
def test_both_forms_are_the_same_loop(tmp_path, form):
    """A plain loop that yields, and its two functions; a fault in it is found."""
    for change, holds in (("", True), (" - data.mean(0)", False)):
        own = script(tmp_path, form.replace("dpfunc.take(data, indices)", f"dpfunc.take(data, indices){change}"))
        found = replay(own.dp_step, own.init, own.step, own.data, candidates=2, key=dpfunc.rng.insecure_key(0))
        assert (found.holds, found.steps, found.not_compared) == (holds, 5, ()), found
        assert holds == (not any("rows of other records" in moved for moved in found.moved))


@pytest.mark.parametrize("name", ["dp_step", "data", "train"])
def test_what_is_missing_is_named(tmp_path, name):
    with pytest.raises(InvalidArgument, match=f"{name}=NoneType"):
        script(tmp_path, re.sub(rf"^(def )?{name}\b", r"\1other", PLAIN, flags=re.MULTILINE))
