"""`dpfunc budget`, and `dpfunc train` and `dpfunc tune` that reserve in one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from certified import plan_of, trained
from text_job import run as invoke
from text_job import train, write_job

from dpfunc.accounting import Ledger
from dpfunc.accounting.record import ONE_RECORD
from dpfunc.budget import Budget
from dpfunc.errors import InvalidArgument
from dpfunc.evidence.certificate import certify, check
from dpfunc.rng import secure_key
from dpfunc.types import Event

FACTS = {"epsilon": 8.0, "delta": 1e-3, "unit": ONE_RECORD, "adjacency": "add_remove", "spenders": ["ana"]}


def run(*arguments):
    return invoke("budget", *arguments)


def created(path, unit="one patient", adjacency="add_remove"):
    return run(
        "create", path, "-e", 3, "-d", 1e-3, "--unit", unit, "--adjacency", adjacency, "--spender", "ana", "--spender",
        "ben",
    )  # fmt: skip


def test_the_commands(tmp_path):
    """From the first to the last, as a person writes them; the facts are fixed, and a name is one run."""
    url = tmp_path / "mails.db"
    assert created(url).exit_code == 0
    again = created(url)
    assert (again.exit_code, "There is one" in again.output) == (1, True)
    steps = ["--unit", "one patient", "-q", 0.1, "-s", 2.0, "--spender", "ben", "--json"]
    entry = json.loads(run("reserve", url, "theirs", "-t", 50, *steps).stdout)
    assert (entry["state"], entry["reserved_steps"], entry["spender"]) == ("reserved", 50, "ben")
    twice = run("reserve", url, "theirs", "-t", 50, *steps)
    assert (twice.exit_code, "not in the budget" in twice.output) == (1, True)
    large = run("reserve", url, "large", "-t", 5000, *steps)
    assert (large.exit_code, "of its 5000 steps would fit" in large.output) == (1, True)
    assert json.loads(run("settle", url, "theirs", "--unused", "--spender", "ana", "--json").stdout)["steps"] == 0
    shown = json.loads(run("show", url, "--json").stdout)
    assert (shown["runs"], shown["epsilon_charged"], shown["spenders"]) == (1, 0.0, "ana, ben")
    assert [row["state"] for row in json.loads(run("history", url, "--json").stdout)] == ["settled"]
    for plain in (run("show", url), run("history", url)):
        assert plain.exit_code == 0, plain.output
    assert run("settle", url, "theirs").exit_code == 2
    missing = run("show", tmp_path / "none.db")
    assert (missing.exit_code, "no such file" in missing.output) == (1, True)


@pytest.mark.parametrize("sigma", [2.01, 2.03, 2.05, 2.07])
def test_no_printed_epsilon_is_below_the_cost(tmp_path, sigma):
    """Neither as JSON nor in a table; nor that of the accountant's own commands."""
    url, given = tmp_path / "mails.db", ("-q", 0.1, "-s", sigma, "-t", 50)
    created(url)
    cost = Ledger((Event(0.1, sigma, 50),)).epsilon(1e-3).epsilon
    names = ("--unit", "one patient", "--spender", "ana")
    printed = [run("reserve", url, "one", *given, *names).stdout, run("history", url).stdout, run("show", url).stdout]
    printed.append(invoke("epsilon", *given, "--delta", 1e-3).stdout)
    for text in printed:
        shown = [number for number in map(float, re.findall(r"\d+\.\d+", text)) if abs(number / cost - 1) < 1e-3]
        assert shown, text
        assert min(shown) >= cost, text
    assert json.loads(run("history", url, "--json").stdout)[0]["epsilon_alone"] == cost


def test_a_dead_run_is_settled_by_its_folder(tmp_path):
    """And its certificate says the place in the budget, which is computed again."""
    url, key = tmp_path / "mails.db", secure_key()
    assert created(url, adjacency="zero_out").exit_code == 0
    run("reserve", url, "other", "--unit", "one patient", "-q", 1.0, "-s", 20.0, "-t", 3, "--spender", "ana")
    plan = plan_of(noise_multiplier=5.0)
    Budget(url, run="dead", spender="ana").reserve(replace(plan, num_steps=9), key, unit="one patient")
    trained(tmp_path / "run", plan, key)
    result = run("settle", url, "dead", tmp_path / "run", "--spender", "ana", "--json")
    assert json.loads(result.stdout)["steps"] == 4
    path = certify(tmp_path / "run")
    (found,) = [finding for finding in check(path) if finding.name == "budget"]
    assert found.agrees
    assert found.found == "run 2, 'dead', within epsilon=3 with all others"
    total = (plan.ledger() + Ledger((Event(1.0, 20.0, 3),), "zero_out")).epsilon(1e-3).epsilon
    values = json.loads(path.read_text())
    values["budget"]["epsilon"] = total / 2
    path.write_text(json.dumps(values))
    with pytest.raises(InvalidArgument, match="all runs within the budget of the data set"):
        check(path)


@pytest.fixture
def job(tmp_path, monkeypatch):
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    return Budget("mails.db").create(**FACTS, earlier=Ledger((Event(0.2, 2.0, 5),)))


NAMES = ["--budget", "mails.db", "--budget_run", "first", "--budget_spender", "ana"]


def test_train_reserves_and_settles(job):
    dry = train(*NAMES, "--dry-run")
    assert "with 5 steps of earlier runs: epsilon: 8 in all" in dry.output
    assert job.account().number == 0
    result = train(*NAMES)
    assert result.exit_code == 0, result.output
    entry = job.account().entries["first"]
    assert (entry.state, entry.charged.num_steps) == ("settled", 4)
    assert json.loads(invoke("ledger", "show", "run", "--json").stdout)["num_steps"] == 4
    assert 7.9 < job.account().ledger().epsilon(1e-3).epsilon <= 8.0
    second = train(*("second" if name == "first" else name for name in NAMES), "--output_dir", "second")
    assert second.exit_code == 0, second.output  # with the noise that what is left allows
    noise = [event.noise_multiplier for event in job.account().entries["second"].charged.events]
    assert noise[0] > 10 * entry.charged.events[0].noise_multiplier
    assert job.account().ledger().epsilon(1e-3).epsilon <= 8.0
    both = train(*NAMES, "--spent", "run/privacy_journal.jsonl", "--output_dir", "third")
    assert "Expected data.budget or data.spent, got both" in both.output
    alone = train("--budget", "mails.db", "--output_dir", "third")
    assert "data.budget and data.budget_run together" in alone.output


REFUSED = {  # facts of the budget, flags -> message
    "another unit": (
        {"unit": "one person"},
        [],
        "unit to be one of 'one person', got unit='one record of the training",
    ),
    "another spender": ({"spenders": ["ben"]}, [], "spender to be one of 'ben', got spender='ana'"),
    "another delta": ({"delta": 1e-4}, [], "delta to be one of '0.0001', got dp_delta='0.001'"),
    "more than is left": ({"epsilon": 2.0}, ["--dp_epsilon", "9"], "of its 4 steps would fit"),
}


@pytest.mark.parametrize(("facts", "flags", "message"), REFUSED.values(), ids=REFUSED)
def test_a_dry_run_asks_the_budget(job, facts, flags, message):
    """What it refuses before the first step of training it refuses here; nothing is reserved."""
    other = Budget("other.db").create(**{**FACTS, **facts})
    names = ["--budget", "other.db", *NAMES[2:], *flags]
    for mode in (["--dry-run"], []):
        assert not Path("run").exists()
        result = train(*names, *mode)
        assert (result.exit_code, message in " ".join(result.output.split())) == (1, True), result.output
    assert other.account().number == 0


def test_an_interrupted_command_goes_on(job, monkeypatch):
    from text_job import at_events, interrupt_at

    with pytest.MonkeyPatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(3))
        assert train(*NAMES).exit_code == 1
    assert job.account().entries["first"].state == "reserved"
    assert json.loads(run("settle", "mails.db", "first", "run", "--spender", "ana", "--json").stdout)["steps"] == 3
    result = train(*NAMES, "--resume")
    assert result.exit_code == 0, result.output
    assert job.account().entries["first"].charged.num_steps == 4


def test_a_command_killed_before_its_first_step_goes_on_or_is_settled(job):
    """By its folder, or as unused; a folder that says nothing of this run does not settle it."""
    from text_job import at_events

    def killed(trainer, state):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        at_events(patch, on_train_begin=killed)
        assert train(*NAMES).exit_code == 1
    there = job.account().entries["first"]
    assert (there.state, there.charged.num_steps) == ("reserved", 4)
    Path("other").mkdir()
    wrong = run("settle", "mails.db", "first", "other", "--spender", "ana")
    assert (wrong.exit_code, "Nothing was settled" in wrong.output) == (1, True)
    assert json.loads(run("settle", "mails.db", "first", "run", "--spender", "ana", "--json").stdout)["steps"] == 0
    assert json.loads(run("settle", "mails.db", "first", "--unused", "--spender", "ana", "--json").stdout)["steps"] == 0
    result = train(*NAMES, "--resume")
    assert result.exit_code == 0, result.output
    assert job.account().entries["first"].charged.num_steps == 4
    assert not Path("run/checkpoint-key").exists()
