"""Reservations and settlements against a model in plain Python; refusals; a run that crashes and goes on."""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from budget_jobs import FACTS, steps
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import dpfunc
from dpfunc import clipping
from dpfunc.accounting import Guarantee, Ledger
from dpfunc.budget import Budget, _store
from dpfunc.checkpoint.journal import Journal, journal_ledger
from dpfunc.errors import BudgetExhausted, InvalidArgument, LedgerConflict
from dpfunc.types import Event

UNIT = FACTS["unit"]


def made(folder, **facts):
    return Budget(folder / "budget.db").create(**{**FACTS, **facts})


def of(budget, run, spender="ana"):
    return Budget(budget.url, run=run, spender=spender)


class _Crash(BaseException):
    """The process ends, as Python can tell of it."""


class Machine(RuleBasedStateMachine):
    """Runs reserve, take steps, settle, crash and come back in any order."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.budget = made(Path(self.folder.name))
        self.reserved, self.spent, self.settled, self.unknown, self.written = {}, {}, {}, {}, set()
        self.once = _store._once

    def teardown(self):
        _store._once = self.once
        self.folder.cleanup()

    def crashing(self, when, action):
        """Do it; `before` the transaction, or `after` its commit, the process ends. True if it was done and known."""

        def once(address, change, mode):
            if when == "before" and mode == "rw":
                raise _Crash
            answer = self.once(address, change, mode)
            if when == "after" and mode == "rw":
                raise _Crash
            return answer

        _store._once = once
        try:
            action()
        except _Crash:
            return False
        finally:
            _store._once = self.once
        return True

    crashes = st.sampled_from(["never", "before", "after"])
    runs = st.integers(0, 5)

    @rule(run=runs, count=st.integers(1, 1500), when=crashes)
    def reserve(self, run, count, when):
        count = self.reserved.get(run, self.unknown.get(run, count))  # a run has one plan
        if run in self.written:
            with pytest.raises(LedgerConflict):
                of(self.budget, f"{run}").reserve(steps(count), f"{run}", unit=UNIT)
            return
        if run not in self.reserved:
            self.unknown[run] = count
        try:
            if self.crashing(when, lambda: of(self.budget, f"{run}").reserve(steps(count), f"{run}", unit=UNIT)):
                self.reserved[run] = count
                self.spent.setdefault(run, 0)
                self.unknown.pop(run, None)
        except BudgetExhausted:
            assert run not in self.reserved
            del self.unknown[run]

    @rule(run=runs, more=st.integers(0, 300))
    def take_steps(self, run, more):
        if run in self.reserved and run not in self.settled:
            self.spent[run] = min(self.reserved[run], self.spent[run] + more)

    @rule(run=runs, when=crashes)
    def settle(self, run, when):
        if run in self.reserved:
            spent = self.settled.setdefault(run, self.spent[run])  # from here on it takes no step
            self.crashing(when, lambda: of(self.budget, f"{run}").settle(steps(spent)))
            if when != "before":
                self.written.add(run)

    @invariant()
    def the_charge_is_never_below_the_truth(self):
        account = self.budget.account()
        charged = {int(run): entry.charged.num_steps for run, entry in account.entries.items()}
        for run, count in self.reserved.items():
            assert self.spent[run] <= charged[run] <= count
            assert charged[run] == (self.spent[run] if run in self.written else count)
        for run, count in charged.items():
            assert run in self.reserved or count == self.unknown[run]
        assert account.ledger().num_steps == sum(charged.values())
        assert account.ledger().epsilon(1e-6).epsilon <= FACTS["epsilon"]


Machine.TestCase.settings = settings(max_examples=10, stateful_step_count=20, deadline=None, derandomize=True)
TestTruth = Machine.TestCase


def test_a_run_that_does_not_fit_is_told_what_would(tmp_path):
    budget = made(tmp_path)
    of(budget, "a").reserve(steps(1000), "a", unit=UNIT)
    with pytest.raises(BudgetExhausted, match=r"(\d+) of its 5000 steps would fit beside the 1000") as caught:
        of(budget, "b").reserve(steps(5000), "b", unit=UNIT)
    fits = int(str(caught.value).split(" of its 5000")[0].split()[-1])
    assert budget.account().number == 1
    of(budget, "b").reserve(steps(fits), "b", unit=UNIT)
    with pytest.raises(BudgetExhausted, match=r" 0 of its 1 steps"):
        of(budget, "c").reserve(steps(1), "c", unit=UNIT)
    of(budget, "a").settle(steps(999))
    of(budget, "c").reserve(steps(1), "c", unit=UNIT)


REFUSED = {
    "unit": (lambda b: b.reserve(steps(1), "a", unit="one record"), InvalidArgument, "unit to be one of 'one patient'"),
    "delta": (lambda b: b.reserve(plan(delta=1e-5), "a", unit=UNIT), InvalidArgument, "delta of the budget"),
    "adjacency": (
        lambda b: b.reserve(Ledger((Event(1.0, 9.0, 1),), "zero_out"), "a", unit=UNIT), LedgerConflict, "'add_remove'",
    ),
    "spender": (
        lambda b: replace(b, spender="eve").reserve(steps(1), "a", unit=UNIT), InvalidArgument, "spender to be one of",
    ),
    "no run": (lambda b: replace(b, run=None).reserve(steps(1), "a", unit=UNIT), InvalidArgument, "name of a run"),
    "settled before": (lambda b: b.settle(steps(1)), InvalidArgument, "a run that has reserved"),
    "no noise": (lambda b: b.reserve(Ledger((Event(0.1, 0.0, 1),)), "a", unit=UNIT), BudgetExhausted, "cost inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_misuse(tmp_path, name):
    action, error, message = REFUSED[name]
    budget = made(tmp_path)
    with pytest.raises(error, match=message):
        action(of(budget, "a"))
    assert budget.account().number == 0


@pytest.mark.parametrize("wrong", [
    {"epsilon": 0.0}, {"delta": 1.0}, {"unit": "a\nb"}, {"adjacency": "both"}, {"spenders": []}, {"spenders": [""]},
    {"earlier": Ledger(adjacency="zero_out")},
])  # fmt: skip
def test_facts_are_checked(tmp_path, wrong):
    with pytest.raises((InvalidArgument, LedgerConflict)):
        made(tmp_path, **wrong)
    assert not os.listdir(tmp_path)


def test_numbers_of_numpy_and_torch_are_facts(tmp_path):
    """They were an error of JSON."""
    assert made(tmp_path, epsilon=np.float32(3), delta=torch.tensor(1e-5)).account().facts.epsilon == 3.0


def test_two_runs_of_one_name_are_not_one(tmp_path):
    budget = of(made(tmp_path, spenders=["ana", "ben"]), "a")
    budget.reserve(steps(10), "a", unit=UNIT)
    for planned, key in ((steps(10), "b"), (steps(11), "a"), (steps(10), dpfunc.rng.insecure_key(0))):
        with pytest.raises(LedgerConflict, match="another key, plan or spender"):
            budget.reserve(planned, key, unit=UNIT)
    with pytest.raises(LedgerConflict, match="spender \\('ana'\\)"):  # two people, who have one script
        replace(budget, spender="ben").reserve(steps(10), "a", unit=UNIT)
    budget.settle(steps(10))
    with pytest.raises(LedgerConflict, match="or is settled"):  # a text says nothing of which run it is
        budget.reserve(steps(10), "a", unit=UNIT)
    assert budget.account().ledger() == steps(10)


def test_more_than_was_reserved_is_charged_and_told(tmp_path):
    budget = of(made(tmp_path), "a")
    budget.reserve(steps(10), "a", unit=UNIT)
    with pytest.raises(LedgerConflict, match="charged both"):
        budget.settle(steps(12))
    assert budget.account().ledger() == steps(12)
    other = Ledger((Event(0.1, 3.0, 7),))
    with pytest.raises(LedgerConflict, match="charged both"):  # a mistake, which the right ledger repairs
        budget.settle(other)
    assert budget.account().ledger() == steps(12) + other
    assert budget.settle(steps(12)).charged == steps(12)
    with pytest.raises(LedgerConflict, match="does not return"):
        budget.settle(steps(11))


def test_a_run_that_was_not_dead_is_charged_what_it_took_since(tmp_path):
    """And earlier runs are: epsilon is that of all ledgers together."""
    budget = of(made(tmp_path, earlier=steps(10)), "a")
    budget.reserve(steps(10), "a", unit=UNIT)
    for count in (4, 6, 6):
        assert budget.settle(steps(count)).charged == steps(count)
    assert budget.account().number == 3
    assert budget.account().ledger() == steps(16)


SHAPE = {"dataset_size": 100, "expected_batch_size": 10, "num_steps": 4, "clip": clipping.Flat(1.0)}


def plan(budget=None, **more):
    return dpfunc.Plan.for_budget(**SHAPE, **({"epsilon": 1.0} if budget is None else {"budget": budget}), **more)


def run(budget, folder, key, stop=None):
    """A loop of a user, which ends after some steps as if it had been killed."""
    found = plan(budget)
    budget.reserve(found, key, unit=UNIT)
    return found, go_on(found, folder, step_of(found, folder).init(PARAMS, key), stop)


PARAMS = {"w": torch.zeros(2)}


def step_of(found, folder):
    journal = Journal(folder / "journal.jsonl", found)
    return dpfunc.make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), found, journal=journal)


def go_on(found, folder, state, stop=None):
    dp_step = step_of(found, folder)
    for indices in found.batches(state):
        if state.step == stop:
            break
        _, state, _ = dp_step(PARAMS, torch.ones(100, 2)[indices], state)
    return state


def test_a_loop_reserves_and_settles(tmp_path):
    """A run that was killed is charged whole, then what its journal says; a resumed one makes the plan it began with."""
    budget, key = made(tmp_path), dpfunc.rng.insecure_key(1)
    of(budget, "before").reserve(steps(200), "before", unit=UNIT)
    first, state = run(of(budget, "first"), tmp_path / "first", key, stop=2)
    assert first.spent == steps(200)
    assert budget.account().ledger() == steps(200) + first.ledger()
    assert budget.account().ledger().epsilon(1e-6).epsilon == pytest.approx(5.0, rel=1e-3)
    of(budget, "before").settle(steps(100))
    assert plan(of(budget, "first")) == first
    entry = of(budget, "first").settle(tmp_path / "first")
    assert entry.charged == first.ledger(2) == state.ledger.beyond(first.spent)
    (tmp_path / "other").mkdir()
    run(of(made(tmp_path / "other"), "x"), tmp_path / "x", dpfunc.rng.insecure_key(2), stop=1)
    with pytest.raises(InvalidArgument, match="which has none"):  # a journal of another run
        of(budget, "first").settle(tmp_path / "x")
    second = plan(of(budget, "second"))
    assert second.spent == steps(100) + first.ledger(2)
    assert of(budget, "first").reserve(first, key, unit=UNIT).charged == first.ledger()  # it goes on: charged whole
    with pytest.raises(BudgetExhausted):
        of(budget, "second").reserve(second, "second", unit=UNIT)


def test_an_older_copy_of_a_journal_hides_no_step(tmp_path):
    budget, folder = made(tmp_path), tmp_path / "first"
    found, state = run(of(budget, "first"), folder, dpfunc.rng.insecure_key(11), stop=1)
    for name in ("journal.jsonl", "journal.jsonl.head"):
        shutil.copy(folder / name, folder / f"old_{name}")
    go_on(found, folder, state, stop=3)
    assert of(budget, "first").settle(folder).charged == found.ledger(3)


def test_a_run_that_was_resumed_with_a_new_key_settles_all(tmp_path, monkeypatch):
    """Steps under both keys count; a later run in its journal that has reserved is charged for itself."""
    budget, folder = made(tmp_path), tmp_path / "first"
    found, state = run(of(budget, "first"), folder, dpfunc.rng.insecure_key(12), stop=1)
    files = {"plan": found, "params": PARAMS, "data": "ones", "journal": folder / "journal.jsonl"}
    dpfunc.save(tmp_path / "saved", state=state, **files)
    go_on(found, folder, state, stop=2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)  # the step cannot be repeated: it is drawn anew
    state = dpfunc.load(tmp_path / "saved", recharge=True, **files).state
    assert state.ledger.beyond(found.spent) == found.ledger(2)
    go_on(found, folder, state, stop=2)
    assert of(budget, "first").settle(folder).charged == found.ledger(3)
    second = replace(found, num_steps=1, spent=journal_ledger(files["journal"]))
    of(budget, "second").reserve(second, dpfunc.rng.insecure_key(13), unit=UNIT)
    go_on(second, folder, step_of(second, folder).init(PARAMS, dpfunc.rng.insecure_key(13)))
    assert of(budget, "first").settle(folder).charged == found.ledger(3)


KEY = dpfunc.rng.insecure_key(5)
RESERVED = {  # what happened before the run begins, and True if it may
    "nothing": (lambda b, p: None, False),
    "another key": (lambda b, p: b.reserve(p, dpfunc.rng.insecure_key(6), unit=UNIT), False),
    "fewer steps": (lambda b, p: b.reserve(replace(p, num_steps=3), KEY, unit=UNIT), False),
    "a text of another run": (lambda b, p: of(b, "b").reserve(p, "a", unit=UNIT), False),
    "a text, fewer steps": (lambda b, p: b.reserve(p.ledger(3), "a", unit=UNIT), False),
    "settled": (lambda b, p: (b.reserve(p, KEY, unit=UNIT), b.settle(p.ledger())), False),
    "the key": (lambda b, p: b.reserve(p, KEY, unit=UNIT), True),
    "a text": (lambda b, p: b.reserve(p, "a", unit=UNIT), True),
    "more steps": (lambda b, p: b.reserve(p.ledger(3) + Ledger((Event(0.1, 1e3, 1),)) + p.ledger(1), "a", unit=UNIT), True),
}  # fmt: skip


@pytest.mark.parametrize("name", RESERVED)
def test_a_plan_of_a_budget_is_reserved_before_it_runs(tmp_path, name):
    """Also a copy of the plan, and a call without a state; a plan is the same with and without its budget."""
    (before, fine), budget = RESERVED[name], of(made(tmp_path), "a")
    found = replace(plan(budget), telemetry=None)
    assert found == replace(found, budget=None)
    before(budget, found)
    dp_step = dpfunc.make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), found)
    params, number = {"w": torch.zeros(2)}, budget.account().number
    if fine:
        assert dp_step.init(params, KEY).limit == 4
        return
    for begin in (lambda: dp_step.init(params, KEY), lambda: dp_step(params, torch.ones(3, 2))):
        with pytest.raises(InvalidArgument, match="reserved in the budget of its data set"):
            begin()
    assert budget.account().number == number


BY_HAND = {  # a plan, and the ledger with which a run begins
    "spent": lambda b: (replace(plan(b), budget=None, spent=b.spent()), None),
    "a plan for it, without it": lambda b: (replace(plan(b), budget=None), None),
    "a plan of another one": lambda b: (
        replace(dpfunc.Plan.for_budget(epsilon=5.0, delta=1e-6, **SHAPE), spent=b.spent()),
        None,
    ),
    "a ledger": lambda b: (dpfunc.Plan.for_budget(epsilon=5.0, delta=1e-6, **SHAPE), b.spent()),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_a_budget_has_spent_is_counted_by_runs_that_reserve_there(tmp_path, name):
    """Else nobody would know what the run costs; a plan made by hand does not say of which budget it is."""
    budget = of(made(tmp_path), "a")
    found, ledger = BY_HAND[name](budget)
    dp_step = dpfunc.make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), found)
    with pytest.raises(InvalidArgument, match="reserved in the budget of its data set"):
        dp_step.init({"w": torch.zeros(2)}, KEY, ledger)
    budget.reserve(found, KEY, unit=UNIT)
    assert dp_step.init({"w": torch.zeros(2)}, KEY, ledger).limit == 4
    assert budget.spent() == Ledger(budget.spent().events, budget.spent().adjacency)


def test_a_plan_needs_one_budget():
    with pytest.raises(InvalidArgument, match="epsilon and delta, or the budget"):
        dpfunc.Plan.for_budget(**SHAPE)


def test_a_search_takes_the_rest(tmp_path):
    budget = made(tmp_path)
    of(budget, "a").reserve(steps(10), "a", unit=UNIT)
    cost = Guarantee(4.5, 1e-6, "rdp", "add_remove")
    search, key = of(budget, "search"), dpfunc.rng.insecure_key(3)
    with pytest.raises(LedgerConflict, match="counts all charges"):
        search.reserve(cost, key, unit=UNIT, before=steps(9))
    with pytest.raises(BudgetExhausted, match="Lower the epsilon"):
        search.reserve(replace(cost, epsilon=5.5), key, unit=UNIT, before=steps(10))
    with pytest.raises(BudgetExhausted, match="Lower the epsilon"):
        search.check(replace(cost, epsilon=5.5), unit=UNIT)
    with pytest.raises(InvalidArgument, match="delta of the budget"):
        search.check(replace(cost, delta=1e-5), unit=UNIT)
    search.check(cost, unit=UNIT)
    search.reserve(cost, key, unit=UNIT, before=steps(10))
    search.reserve(cost, key, unit=UNIT, before=steps(10))
    assert budget.account().closed
    assert search.spent() == steps(10)
    search.check(cost, unit=UNIT)  # which goes on
    for late in (lambda: of(budget, "b").reserve(steps(1), "b", unit=UNIT),
                 lambda: of(budget, "s").check(cost, unit=UNIT),
                 lambda: of(budget, "s").reserve(cost, "s", unit=UNIT)):  # fmt: skip
        with pytest.raises(BudgetExhausted, match="A search has reserved all"):
            late()
    with pytest.raises(InvalidArgument, match="no search"):
        search.settle(steps(0))
    of(budget, "a").settle(steps(5))
