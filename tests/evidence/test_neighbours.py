"""Replays: planted faults are found, and loops without fault hold."""

import dataclasses
import threading

import pytest
import torch
from evidence_loops import (
    CARRIED,
    FAULTS,
    faulty,
    init,
    left_out,
    loss_fn,
    make_step,
    momentum,
    records,
    step,
    take_step,
)

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.errors import InvalidArgument
from dpfunc.evidence import Replay, replay


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    """`python -m benchmarks.evidence` does it with 20 seeds each."""
    faulty, words = FAULTS[fault]
    found = replay(make_step(), init, faulty, records(0), candidates=2, key=dpfunc.rng.insecure_key(0))
    assert not found.holds
    assert any(words in moved for moved in found.moved), found


@pytest.mark.parametrize("kind", CARRIED)
def test_what_carries_private_numbers_is_found(kind):
    """Before, only tensors, numbers, lists and attributes were compared, and files in the folder of the run."""
    loop, words = CARRIED[kind]
    found = replay(make_step(), init, loop, records(8), steps=2, candidates=1, key=dpfunc.rng.insecure_key(0))
    assert any(words in moved for moved in found.moved), found


@pytest.mark.parametrize("made", [lambda: iter([1]), lambda: threading.Lock(), object])
def test_what_cannot_be_compared_is_named(made):
    loop = faulty(after=lambda carry, batch, seen: {**carry, "kept": made()})
    found = replay(make_step(), init, loop, records(9), steps=2, candidates=1)
    assert found.holds or made is object, found
    assert any("['kept']" in what for what in found.not_compared) or found.holds


MEAN, RATE, SMALL = torch.zeros(4), 0.1, 1 / 3


def test_what_is_made_outside_of_the_loop_is_named():
    """A mean of all records at the level of the module is the same in each run, and no sum moves by it."""
    local = torch.ones(4)
    loop = faulty(lambda x, data, carry: RATE * (x - MEAN - local) * SMALL)

    def outer(dp_step, data, carry):
        return loop(dp_step, data, carry) if MEAN is not local else None

    found = replay(make_step(), init, outer, records(10), steps=2, candidates=1)
    assert found.holds, found
    named = {what.partition(",")[0] for what in found.not_compared}
    assert named == {"MEAN", "SMALL", "local"}, found


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_dropout_is_no_fault(adjacency):
    """Masks go by place; without one record those of others would be masks of other records (the sum moved by 1.6)."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(32, 2))
    forward, params = dpfunc.functionalize(module)

    def dropped(params, batch):
        return torch.nn.functional.cross_entropy(forward(params, batch["x"]), batch["y"], reduction="none")

    plan = dataclasses.replace(make_step().plan, adjacency=adjacency)
    dp_step = dpfunc.make_dp_step(dropped, plan)

    def begin(dp_step, data, key):
        own = {name: value.detach().clone() for name, value in params.items()}
        return {"params": own, "state": dp_step.init(own, key), "rate": 0.1}

    found = replay(dp_step, begin, step, records(11), steps=3, candidates=2)
    assert found.holds, found


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
    key = dpfunc.rng.fold_in(dpfunc.rng.insecure_key(0), "replay")
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
