"""A step is released once: taken again it gives the same values, whoever takes it, or it is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cases import as_batch, linear_loss, params, random_rows
from run_cases import DATA, PLAN, Run, start, steps

from dpfunc import Journal, clipping, make_dp_step, sampling, secure_key, take
from dpfunc import state as state_module
from dpfunc.accounting import Ledger
from dpfunc.checkpoint.journal import journal_ledger, read_steps
from dpfunc.errors import CheckpointError, InvalidArgument, RunWarning, SamplingMismatch, StateReused
from dpfunc.noise import Correlated, Gaussian
from dpfunc.noise.strategies import LambdaCGD
from dpfunc.rng import fingerprint
from dpfunc.state import allow_repeat
from dpfunc.types import Event


def bent_loss(values, batch):
    """Its gradients depend on the parameters."""
    return linear_loss(values, batch).square()


def test_other_values_with_the_same_noise_are_refused(tmp_path):
    """A step that was released is released again bit for bit, or not at all."""
    run = Run(tmp_path).step(2)
    run.save(journal=None)
    run.step(2)
    before, saved = run.path.read_text(), run.load()
    dp_step = make_dp_step(lambda params, batch: -linear_loss(params, batch), PLAN, journal=Journal(run.path, PLAN))
    with pytest.raises(StateReused, match="Step 2 of this run was released before, and with other values"):
        dp_step(saved.params, take(DATA, next(iter(PLAN.batches(saved.state)))), saved.state)
    assert run.path.read_text() == before
    repeated = run.step(2, state=run.load().state).state
    assert (repeated.step, repeated.charged, repeated.released) == (4, 4, ())


def test_other_values_are_refused_in_the_process_that_released_the_first_ones():
    """Also without a journal, by a state that says nothing of them."""
    batch, values = take(DATA, torch.arange(50)), params()
    dp_step = make_dp_step(linear_loss, PLAN, verify_batch=False)
    state = dp_step.init(values, secure_key())
    first = dp_step(values, batch, state).grads
    again = state_module.resumed(state)
    other = make_dp_step(lambda params, batch: -linear_loss(params, batch), PLAN, verify_batch=False)
    with pytest.raises(StateReused, match="Step 0 of this run was released before, and with other values"):
        other(values, batch, again)
    assert all(map(torch.equal, dp_step(values, batch, again).grads.values(), first.values()))


def test_a_key_begins_one_run(tmp_path):
    """Also when another process forgets that it did."""
    run = Run(tmp_path)
    begin = run.state
    run.step()
    other = {name: value + 1.0 for name, value in DATA.items()}
    dp_step, drawn = make_dp_step(linear_loss, PLAN, journal=Journal(run.path, PLAN)), next(iter(PLAN.batches(begin)))
    with pytest.raises(CheckpointError, match="has step 0 of this run, which released other values"):
        dp_step(run.values, take(other, drawn), allow_repeat(begin))
    dp_step(run.values, take(DATA, drawn), allow_repeat(begin))  # the same values: a reproduction


def faster(values):
    return torch.optim.SGD(values.values(), lr=3.0)


def test_a_step_is_released_once(tmp_path):
    """The first step has the parameters it had; later ones would share their noise with those of another rate."""
    journal = Journal(tmp_path / "journal.jsonl", PLAN)
    begin, values, optimizer = start()
    fresh = {name: p.detach().clone().requires_grad_() for name, p in values.items()}
    steps(begin, values, optimizer, 4, journal, bent_loss)
    for known in (journal, Journal(journal.path, PLAN)):  # this process, and another one
        again = {name: p.detach().clone().requires_grad_() for name, p in fresh.items()}
        state = allow_repeat(begin)
        with pytest.raises(CheckpointError, match="has step 1 of this run, which released other values"):
            steps(state, again, faster(again), 2, known, bent_loss)
    assert len(read_steps(journal.path)[fingerprint(begin.key)]) == 4
    slower = torch.optim.Adam(fresh.values(), lr=0.1)
    repeated = steps(allow_repeat(begin), fresh, slower, 6, Journal(journal.path, PLAN), bent_loss)
    assert journal_ledger(journal.path) == repeated.ledger == PLAN.ledger(6)


def test_a_state_is_of_one_plan():
    """Otherwise the limit of one would let the budget of the other pass."""
    state, values, optimizer = start()
    state = steps(state, values, optimizer, 1)
    other = dataclasses.replace(PLAN, num_steps=5)
    batch = take(DATA, next(iter(PLAN.batches(state))))
    with pytest.raises(InvalidArgument, match="Expected a state of this plan"):
        make_dp_step(linear_loss, other)(values, batch, state)
    with pytest.raises(InvalidArgument, match="Expected the journal of this plan"):
        make_dp_step(linear_loss, other, journal=Journal(Path("never.jsonl"), PLAN))
    assert make_dp_step(linear_loss, other).init(values, secure_key(), state.ledger).ledger == state.ledger


LIVE = {
    "journal": (lambda state: state, lambda after: time.sleep(0.05)),
    "no journal": (lambda state: state, None),
    "copy of the state": (copy.deepcopy, lambda after: time.sleep(0.05)),
    "state read from bytes": (lambda state: pickle.loads(pickle.dumps(state)), None),
}


@pytest.mark.parametrize("name", LIVE)
def test_of_two_threads_one_releases_a_step(name, monkeypatch):
    """Both begin before the other has released: the second one is refused, and its journal is not called."""
    copied, journal = LIVE[name]
    written, both = [], threading.Barrier(2, timeout=60)

    def note(after):
        written.append(after.step)
        journal(after)

    state, values, _ = start()
    dp_step = make_dp_step(linear_loss, PLAN, journal=note if journal else None, verify_batch=False)
    monkeypatch.setattr(Gaussian, "mechanism", waiting_for(both))
    batches = [take(DATA, torch.tensor([row])) for row in (0, 1)]
    first, second = pool_results(dp_step, values, batches, [state, copied(state)])
    refused = [each for each in (first, second) if isinstance(each, StateReused)]
    assert len(refused) == 1, (first, second)
    assert "Step 0 of this run was already released" in str(refused[0])
    assert written == ([1] if journal else [])


def waiting_for(both):
    """Noise, once both threads are there: the states of both were checked, and nothing is released."""
    usual = Gaussian.mechanism

    def mechanism(*args):
        made = usual(*args)
        return made._replace(add=lambda *args: both.wait() is not None and made.add(*args))

    return mechanism


def pool_results(dp_step, values, batches, states):
    """Result or error of each call, all at once."""
    with ThreadPoolExecutor(len(states)) as pool:
        calls = [pool.submit(dp_step, values, batch, state) for batch, state in zip(batches, states, strict=True)]
        return [call.exception() or call.result() for call in calls]


def test_a_thread_takes_the_step_that_another_could_not_write(monkeypatch):
    """A journal that fails releases nothing: the state is good, also for a thread that has waited for it."""
    written, both = [], threading.Barrier(2, timeout=60)

    def full_once(after):
        written.append(after.step)
        time.sleep(0.05)
        if len(written) == 1:
            raise OSError("no space left on device")

    state, values, _ = start()
    dp_step = make_dp_step(linear_loss, PLAN, journal=full_once, verify_batch=False)
    monkeypatch.setattr(Gaussian, "mechanism", waiting_for(both))
    batches = [take(DATA, torch.tensor([row])) for row in (0, 1)]
    found = pool_results(dp_step, values, batches, [state, state])
    assert sorted(type(each).__name__ for each in found) == ["OSError", "StepResult"]
    assert written == [1, 1]


def loop(dp_step, state, count=2):
    for indices in itertools.islice(PLAN.batches(state), count):
        _, state, _ = dp_step(params(), take(DATA, indices), state)
    return state


@pytest.mark.filterwarnings("error:This process has taken steps:dpfunc.errors.RunWarning")
def test_a_second_run_that_counts_nothing_is_said(tmp_path):
    """Of one step function, or of a loop that is run again: its ledger and the first one both say too little."""
    state_module._ledgers.clear()  # of other tests
    dp_step = make_dp_step(linear_loss, PLAN)
    first, waiting = dp_step.init(params(), secure_key()), dp_step.init(params(), secure_key())  # no step yet: fine
    first = loop(dp_step, first)
    for again in (dp_step, make_dp_step(bent_loss, PLAN)):
        with pytest.warns(RunWarning, match="which the ledger of the new run does not count.*ledger=state.ledger"):
            again.init(params(), secure_key())
    dp_step.init(params(), first.key)  # the same run: its steps are refused, or repeated
    second = dp_step.init(params(), secure_key(), first.ledger)
    assert loop(dp_step, second).ledger.num_steps == 4
    with pytest.warns(RunWarning):  # counts the first run, and not the second
        dp_step.init(params(), secure_key(), first.ledger)
    for change in (
        {"num_steps": 9},
        {"clip": clipping.Flat(0.5)},
        {"noise_multiplier": 3.0},
        {"adjacency": "replace_one"},
    ):
        edited = dataclasses.replace(PLAN, **change)
        for journal in (None, Journal(tmp_path / "journal.jsonl", edited)):
            with pytest.warns(RunWarning, match="also where the plan was edited"):
                make_dp_step(linear_loss, edited, journal=journal).init(params(), secure_key())
    more = dataclasses.replace(PLAN, sampler=sampling.Poisson(61, 0.1))
    make_dp_step(linear_loss, more).init(params(), secure_key())
    assert loop(dp_step, waiting).step == 2


def test_a_loop_over_a_run_that_has_ended_is_said():
    """An epoch loop takes all steps in its first epoch."""
    begin, values, optimizer = start()
    records = [{name: value[i] for name, value in DATA.items()} for i in range(60)]
    end = steps(begin, values, optimizer, 8)
    assert end.step == end.limit == 8
    for epoch in (lambda: list(PLAN.batches(end)), lambda: list(PLAN.loader(records, end))):
        with pytest.warns(RunWarning, match="No step is left after step 8, so this loop takes none") as said:
            assert epoch() == []
        assert [each.filename for each in said] == [__file__]
    last = end._replace(step=7)
    assert len(list(PLAN.batches(last))) == len(list(PLAN.loader(records, last))) == 1


RECORDS = as_batch(random_rows(0, 40))
LISTED = [take(RECORDS, torch.arange(i, i + 4)) for i in range(0, 40, 4)]
BUFFERS = {name: torch.zeros(40, *leaf.shape[1:]) for name, leaf in RECORDS.items()}


def in_buffers(write):
    """The draw, written into the same memory each time."""

    def batch(step, drawn):
        own = {name: buffer[: len(drawn)] for name, buffer in BUFFERS.items()}
        for name, leaf in take(RECORDS, drawn).items():
            write(own[name], leaf)
        return own

    return batch


def whole_with_mask(step, drawn):
    return RECORDS, torch.zeros(40, dtype=torch.bool).index_fill(0, drawn, True)


FOUR, SOME, ALL = sampling.FixedSize(40, 4), sampling.Poisson(40, 0.2), sampling.Poisson(40, 1.0)
GIVEN = {  # sampler, batch of a step and its draw, steps that are taken
    "the same tensors": (FOUR, lambda step, drawn: LISTED[0], 1),
    "in a dictionary of its own": (FOUR, lambda step, drawn: dict(LISTED[0]), 1),
    "views of the same": (FOUR, lambda step, drawn: {n: x.detach().view_as(x) for n, x in LISTED[0].items()}, 1),
    "the first rows": (FOUR, lambda step, drawn: {name: leaf[:4] for name, leaf in RECORDS.items()}, 1),
    "each batch twice": (FOUR, lambda step, drawn: LISTED[step // 2], 1),
    "a list that is run through again": (FOUR, lambda step, drawn: LISTED[step % 3], 3),
    "drawn": (SOME, lambda step, drawn: take(RECORDS, drawn), 8),
    "all records each time": (ALL, lambda step, drawn: RECORDS, 8),
    "all records, which ones by a mask": (SOME, whole_with_mask, 8),
    "in order, for two epochs": (sampling.InOrder(40, 10), lambda s, drawn: {n: x[drawn[0] : drawn[-1] + 1] for n, x in RECORDS.items()}, 8),
    "written by torch": (FOUR, in_buffers(lambda buffer, new: buffer.copy_(new)), 8),
    "written unseen": (SOME, in_buffers(lambda buffer, new: buffer.data.copy_(new)), 8),
    "written by numpy": (FOUR, in_buffers(lambda buffer, new: buffer.numpy().__setitem__(slice(None), new.numpy())), 8),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_tensors_of_an_earlier_step_are_refused(name):
    """Same-batch sharpness-aware steps and batches in a list are no draws; memory that holds a new draw is one."""
    sampler, batch, expected = GIVEN[name]
    plan = dataclasses.replace(PLAN, sampler=sampler, adjacency="zero_out", num_steps=8, allow_large_delta=True)
    dp_step = make_dp_step(linear_loss, plan)
    state = dp_step.init(params(), secure_key())
    for number, drawn in enumerate(plan.batches(state)):
        given = batch(number, drawn)
        own, mask_B = given if isinstance(given, tuple) else (given, None)
        if number == expected:
            with pytest.raises(SamplingMismatch, match="got the tensors of an earlier step.*Nothing was spent"):
                dp_step(params(), own, state, mask_B=mask_B)
            break
        state = dp_step(params(), own, state, mask_B=mask_B).state
    assert state.step == expected


def test_plans_with_noise_without_a_repr_are_told_apart():
    """A class of a user's own has the repr of an object: its values are read."""

    class Mine:
        def __init__(self, level):
            self.level = level
            self.check, self.events, self.mechanism = Gaussian().check, Gaussian().events, Gaussian().mechanism

    digests = [state_module.plan_digest(dataclasses.replace(PLAN, noise=Mine(level))) for level in (1.0, 1.0, 2.0)]
    assert digests[0] == digests[1] != digests[2]


def test_plans_are_told_apart_by_all_that_they_count_and_by_a_strategy_without_a_repr():
    """The repr of a ledger has four kinds of steps in six digits; a checkpoint compares fields, a state this digest."""
    first = [Event(0.1, 2.0 + i, 1) for i in range(4)]
    digests = {
        state_module.plan_digest(dataclasses.replace(PLAN, spent=Ledger((*first, last), PLAN.adjacency)))
        for last in (Event(0.1, 9.0, 1), Event(0.1, 9.0 + 1e-9, 1), Event(0.1, 0.5, 1))
    }
    assert len(digests) == 3

    class Mine(LambdaCGD):
        __repr__ = object.__repr__

    once = dataclasses.replace(PLAN, sampler=sampling.ShuffledOnce(60, 6), adjacency="zero_out")
    noises = [Correlated(Mine(level)) for level in (0.25, 0.25, 0.5)]
    digests = [state_module.plan_digest(dataclasses.replace(once, noise=noise)) for noise in noises]
    assert digests[0] == digests[1] != digests[2]
