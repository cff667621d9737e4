"""Replays: planted faults are found, and loops without fault hold."""

import dataclasses

import pytest
import torch
from evidence_loops import FAULTS, init, left_out, loss_fn, make_step, momentum, records, step, take_step

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.errors import InvalidArgument
from dpfunc.evidence import Replay, replay


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    """`python -m benchmarks.evidence` does it with 20 seeds each."""
    faulty, words = FAULTS[fault]
    found = replay(make_step(), init, faulty, records(0), candidates=2, key=dpfunc.insecure_key(0))
    assert not found.holds
    assert any(words in moved for moved in found.moved), found


@pytest.mark.parametrize("loop", [step, momentum])
def test_loops_that_hold(loop):
    found = replay(make_step(), init, loop, records(1), steps=6, candidates=2)
    assert found.holds, found
    assert found.not_compared == ()
    assert 0.2 < found.ratio <= 1.001
    assert found.steps == 6


def test_a_large_record_is_found():
    """The one that moves the sum most; it is clipped."""
    data = {**records(2), "x": 0.01 * records(2)["x"]}
    first = make_step().plan.sampler
    key = dpfunc.fold_in(dpfunc.insecure_key(0), "replay")
    row = int(first.indices(key, 0)[-1])
    data["x"][row] = 100.0
    found = replay(make_step(), init, step, data, steps=2, candidates=48)
    assert (found.record, found.holds) == (row, True)
    assert found.ratio == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_other_neighbours(adjacency):
    plan = dpfunc.Plan(
        sampling.Poisson(48, 0.25), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=4, delta=1e-3,
        adjacency=adjacency,
    )  # fmt: skip
    found = replay(dpfunc.make_dp_step(loss_fn, plan), init, step, records(3), candidates=2)
    assert found.holds, found


def test_a_sum_that_is_not_clipped():
    """A step whose engine forgets the norm of a parameter."""
    dp_step = dpfunc.make_dp_step(loss_fn, make_step().plan, engine=left_out)
    large = {**records(4), "x": 30 * records(4)["x"]}
    found = replay(dp_step, init, step, large, steps=2, candidates=2)
    assert found.ratio > 2
    assert "of its sensitivity" in found.moved[0]


def test_what_is_never_the_same_is_named():
    import time

    def clocked(dp_step, data, carry):
        print("at", time.perf_counter())
        return step(dp_step, data, carry)

    found = replay(make_step(), init, clocked, records(5), steps=3, candidates=2)
    assert found.holds, found
    assert any("prints" in what for what in found.not_compared)


def test_an_error_on_other_data_is_found():
    def reading(dp_step, data, carry):
        batch = dpfunc.take(data, dp_step.plan.draw(carry["state"], carry["state"].step))
        batch["y"][0]  # none in an empty batch
        return take_step(dp_step, batch, carry)[0]

    found = replay(make_step(), init, reading, records(6), steps=2, candidates=2)
    assert any("IndexError" in what for what in found.moved)


def test_bad_arguments():
    dp_step = make_step()
    with pytest.raises(InvalidArgument, match="dp_step"):
        replay(loss_fn, init, step, records(0))
    with pytest.raises(InvalidArgument, match="steps"):
        replay(dp_step, init, step, records(0), steps=0)
    rare = dataclasses.replace(dp_step.plan, sampler=sampling.Poisson(48, 1e-9))
    with pytest.raises(InvalidArgument, match="Take more steps"):
        replay(dpfunc.make_dp_step(loss_fn, rare), init, step, records(0), steps=2)


def test_nothing_of_the_run_is_left(tmp_path):
    """No journal, and no generator that goes on elsewhere."""
    dp_step = dataclasses.replace(make_step(), journal=lambda state: pytest.fail("a journal was written"))
    before = torch.get_rng_state()
    assert isinstance(replay(dp_step, init, step, records(7), steps=2, candidates=1), Replay)
    assert torch.equal(torch.get_rng_state(), before)
