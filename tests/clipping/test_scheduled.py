"""Bounds by schedule: clipping and noise have the same bound in each step; gradients in its units."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import GROUPINGS, as_batch, flat, linear_loss, params, random_rows

import dpfunc
from dpfunc import checkpoint, clipping, sampling
from dpfunc.clipping import Scheduled
from dpfunc.engines.by_name import ENGINES
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat
from dpfunc.types import Schedule

SCALE = Schedule(((1, 1.0), (2, 0.25), (1, 2.0)))
OF_STEP = (1.0, 0.25, 0.25, 2.0)
BODY = clipping.Flat({"body": 0.3, "head": 2.0}, GROUPINGS["mapping"])


def plan_of(clip, **changes):
    values = {
        "sampler": sampling.Poisson(4, 1.0), "noise_multiplier": 1.0, "num_steps": 4, "delta": 1e-2,
        "adjacency": "zero_out",
    }  # fmt: skip
    return dpfunc.Plan(clip=clip, **{**values, **changes})


def steps_of(plan, batch, **options):
    """What the steps of a run release, undivided."""
    dp_step = dpfunc.make_dp_step(linear_loss, plan, **{"reduction": "sum", **options})
    state = allow_repeat(dp_step.init(params(), insecure_key(0)))
    for _ in range(plan.num_steps):
        grads, state, _ = dp_step(params(), batch, state)
        yield grads, state


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", [clipping.Flat(1.0), clipping.auto_v(1.0, GROUPINGS["layer"]), BODY], ids=repr)
def test_noise_follows_the_bound(engine, rule):
    """In each step both are those of a run whose bound never was another one; the ledger too."""
    batch = as_batch(random_rows(0, 4, 1e3))
    short = {name: 1e-13 * value for name, value in batch.items()}
    for rows in (batch, short):
        constant = [grads for grads, _ in steps_of(plan_of(rule), rows, engine=engine)]
        found = list(steps_of(plan_of(Scheduled(rule, SCALE)), rows, engine=engine))
        for (grads, _), its_grads, scale in zip(found, constant, OF_STEP, strict=True):
            assert float(flat(its_grads).norm()) > 0.1
            # where gradients are far longer than any bound, the clipped sum is the scale times that, as the noise is
            torch.testing.assert_close(flat(grads), scale * flat(its_grads), rtol=1e-5, atol=1e-6)
        state = found[-1][1]
        assert state.ledger == plan_of(rule).ledger()
        assert state.clip_state is None


@pytest.mark.parametrize("rule", [clipping.Flat(0.5), BODY, clipping.Adaptive(0.5, share=0.1)], ids=repr)
def test_gradients_in_units_of_the_bound(rule):
    """They are those of the step over its whole bound, noise included; by schedule, or where the bound adapts."""
    batch = as_batch(random_rows(0, 4, 10.0))
    scheduled = rule if hasattr(rule, "at") else Scheduled(rule, SCALE)
    whole = [0.5, 0.5, 0.5, 0.5] if rule != BODY else [(0.3**2 + 2.0**2) ** 0.5] * 4
    plain = list(steps_of(plan_of(scheduled), batch))
    found = list(steps_of(plan_of(scheduled), batch, unit="clip_norm", reduction="mean"))
    bounds = [bound * scale for bound, scale in zip(whole, OF_STEP, strict=True)]
    if rule == scheduled:
        bounds = [bound / 0.9**0.5 for bound in (0.5, *(state.clip_state["all"] for _, state in plain[:-1]))]
        assert len(set(bounds)) == 4
    for (grads, _), (its_grads, _), bound in zip(found, plain, bounds, strict=True):
        torch.testing.assert_close(4 * bound * flat(grads), flat(its_grads), rtol=1e-5, atol=1e-6)


def test_a_resumed_run_has_its_bound(tmp_path):
    """A checkpoint in the middle of the schedule goes on with the bound of its step, bit for bit."""
    plan, batch, path = plan_of(Scheduled(BODY, SCALE)), as_batch(random_rows(0, 4)), tmp_path / "journal.jsonl"
    run = {"params": params(), "plan": plan, "data": "these", "journal": path}
    dp_step = dpfunc.make_dp_step(linear_loss, plan, journal=checkpoint.Journal(path, plan))
    state = dp_step.init(params(), dpfunc.secure_key())
    for _ in range(2):
        _, state, _ = dp_step(params(), batch, state)
    checkpoint.save(tmp_path / "run", state=state, **run)
    expected = []
    for _ in range(2):
        grads, state, _ = dp_step(params(), batch, state)
        expected.append(grads)
    again = dpfunc.state.resumed(checkpoint.load(tmp_path / "run", **run).state)
    for its_grads in expected:
        grads, again, _ = dp_step(params(), batch, again)
        assert all(torch.equal(value, its_grads[name]) for name, value in grads.items())
    other = {**run, "plan": plan_of(Scheduled(BODY, Schedule(((1, 1.0), (2, 0.5), (1, 2.0)))))}
    with pytest.raises(dpfunc.errors.CheckpointError, match=r"plan.clip.scale.pieces\[1\]\[1\]: saved 0.25, now 0.5"):
        checkpoint.load(tmp_path / "run", **other)


def test_a_record_has_the_bound_of_the_last_step():
    plan = plan_of(Scheduled(clipping.Flat(3.0), SCALE))
    dp_step = dpfunc.make_dp_step(linear_loss, plan)
    state = dp_step.init(params(), dpfunc.secure_key())
    found = []
    for _ in range(plan.num_steps):
        _, state, _ = dp_step(params(), as_batch(random_rows(0, 4)), state)
        found.append(checkpoint.make_record(dp_step, state, unit="one record").max_grad_norm)
    assert found == [3.0 * scale for scale in OF_STEP]


def test_a_record_names_a_rule_that_is_not_proven():
    """A schedule of a rule of somebody else is not called by its own name."""

    @dataclasses.dataclass(frozen=True)
    class Mine(clipping.Flat):
        pass

    for rule, name in ((clipping.Flat(1.0), "Scheduled"), (Mine(1.0), "Mine")):
        dp_step = dpfunc.make_dp_step(linear_loss, plan_of(Scheduled(rule, SCALE)))
        state = dp_step.init(params(), dpfunc.secure_key())
        assert checkpoint.make_record(dp_step, state, unit="one record").clip == name


BAD = {
    "a rule with a state": (lambda: Scheduled(clipping.Adaptive(), SCALE), "a rule with one bound over the run"),
    "no rule": (lambda: Scheduled(1.0, SCALE), "a rule with one bound over the run"),
    "no schedule": (lambda: Scheduled(clipping.Flat(1.0), 0.5), "scale to be a dpfunc.types.Schedule"),
    "too large": (lambda: Scheduled(clipping.Flat(1e9), Schedule(((1, 1.0), (1, 100.0)))), "clip_norm <= 1e"),
    "unit": (lambda: dpfunc.make_dp_step(linear_loss, plan_of(BODY), unit="norm"), "unit"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    make, message = BAD[case]
    with pytest.raises(InvalidArgument, match=message):
        make()
