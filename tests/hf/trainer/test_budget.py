"""A Trainer run reserves before its first step and settles at its end; a killed one stays charged, and goes on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from trainer_cases import PRIVACY, at, classifier, interrupt, labelled, training_arguments

from dpfunc.accounting import Ledger
from dpfunc.accounting.record import ONE_RECORD
from dpfunc.budget import Budget
from dpfunc.errors import BudgetExhausted, InvalidArgument, NotWritten
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.types import Event

DATA = labelled()


@pytest.fixture
def budget(tmp_path):
    return Budget(tmp_path / "budget.db", run="first", spender="ana").create(
        epsilon=8.0, delta=1e-3, unit=ONE_RECORD, adjacency="add_remove", spenders=["ana"],
        earlier=Ledger((Event(0.2, 2.0, 5),)),
    )  # fmt: skip


def trainer(budget, folder, **options):
    arguments = training_arguments(folder, max_steps=6, save_strategy="steps", save_steps=3)
    return DPTrainer(classifier(), arguments, privacy=PRIVACY, train_dataset=DATA, budget=budget, **options)


def test_a_run_reserves_and_settles(budget, tmp_path):
    run = trainer(budget, tmp_path / "run")
    run.train()
    entry = budget.account().entries["first"]
    assert (entry.state, entry.charged) == ("settled", run.plan.ledger())
    assert budget.account().charged() == run.ledger
    assert 7.9 < run.ledger.epsilon(1e-3).epsilon <= 8.0
    place = json.loads((tmp_path / "run" / "privacy_budget.json").read_text())
    assert (place["run"], place["number"], place["epsilon"]) == ("first", 1, 8.0)
    with pytest.raises(BudgetExhausted, match="of the data set"):  # whose plan was made for another budget
        trainer(replace(budget, run="second"), tmp_path / "second", ledger=Ledger()).train()
    assert not (tmp_path / "second" / "privacy_journal.jsonl").exists()


def test_an_interrupted_run_stays_charged_and_goes_on(budget, tmp_path):
    run = trainer(budget, tmp_path / "run", callbacks=[at("on_pre_optimizer_step", interrupt, 5)])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    account = budget.account()
    assert account.entries["first"].state == "reserved"
    assert account.charged() == budget.account().facts.earlier + run.plan.ledger()
    assert budget.settle(tmp_path / "run").charged == run.plan.ledger(6)  # by hand: it was thought dead
    again = trainer(budget, tmp_path / "run")
    assert again.plan == run.plan
    again.train(resume_from_checkpoint=True)
    assert budget.account().entries["first"].charged == run.plan.ledger()
    assert budget.account().charged() == again.ledger


def test_another_unit_is_refused_before_a_step(budget, tmp_path):
    with pytest.raises(InvalidArgument, match="unit to be one of 'one record"):
        trainer(budget, tmp_path / "run", unit="one person").train()
    assert budget.account().number == 0
    assert not (tmp_path / "run" / "privacy_journal.jsonl").exists()


def test_a_finished_run_is_not_lost_with_the_database(budget, tmp_path, caplog, monkeypatch):
    """It stays charged in full, and is settled later."""
    run = trainer(budget, tmp_path / "run")
    monkeypatch.setattr(Budget, "settle", unreachable)
    run.train()
    assert "until `dpfunc budget settle`" in caplog.text
    monkeypatch.undo()
    assert budget.account().entries["first"].state == "reserved"
    assert budget.settle(tmp_path / "run").charged == run.plan.ledger()


def unreachable(*_):
    raise NotWritten("The database could not be reached.")
