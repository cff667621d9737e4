"""`dpfunc ledger show` and `dpfunc ledger check`: records, journals, ledgers and folders of runs."""

from __future__ import annotations

import json
import math

import pytest
from forgeries import altered, resigned
from journal_cases import line, written
from record_cases import LEDGER, RECORD, record
from text_job import run as invoke

from dpfunc.accounting import Ledger
from dpfunc.accounting.record import EXACT_SIZE, NOT_COVERED
from dpfunc.types import Event

SAMPLED = Ledger((Event(0.01, 0.5, 200),))


def run(*arguments):
    return invoke("ledger", *arguments)


def words(result):
    """What was printed, with lines and borders of tables taken away."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of ten steps: record and journal."""
    place = tmp_path / "run"
    place.mkdir()
    (place / "privacy_accounting.json").write_text(RECORD.to_json())
    written(place / "privacy_journal.jsonl", *(line(step) for step in range(10)))
    return place


def rewrite(folder, **changes):
    (folder / "privacy_accounting.json").write_text(record(**changes).to_json())


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("name", ["", "privacy_accounting.json"])
def test_a_record_is_shown_with_what_it_covers(folder, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", str(width))
    result = run("show", folder / name)
    assert result.exit_code == 0, result.output
    shown = words(result)
    budget = "at delta 1e-05, within the budget 3"
    for text in ("one patient", budget, "10 of 10", "(add_remove)", "5 times", "secret", "torch 2.13.0"):
        assert text in shown
    covered, not_covered = shown.split("Not covered by this epsilon:")
    assert "may be published: - the trained parameters" in covered
    assert all(sentence in not_covered for sentence in NOT_COVERED)


def test_a_record_as_json(folder):
    """As it was written; with another delta it is computed anew."""
    values = json.loads(run("show", folder, "--json").stdout)
    assert values["epsilon"] == RECORD.epsilon
    assert values["covered"]
    assert values["not_covered"] == [EXACT_SIZE, *NOT_COVERED]
    values = json.loads(run("show", folder, "--delta", 1e-6, "--json").stdout)
    assert values["epsilon"] == LEDGER.epsilon(1e-6).epsilon
    assert run("show", folder, "--method", "tilted").exit_code == 0


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_changed_record_is_refused(folder, command):
    """Also one that is older than digests."""
    path, values = folder / "privacy_accounting.json", json.loads(RECORD.to_json())
    old = {"epsilon": 2.6, "delta": 1e-5, "global_step": 10, "ledger": values["ledger"]}
    for changed, message in (
        ({**values, "epsilon": 0.1}, "Expected a record with the digest of its values"),
        ({**values, "schema": "dpfunc.accounting/1"}, "before version 2 files had no digest"),
        ({**values, "schema": "dpfunc.accounting/5"}, "Use the version of dpfunc that wrote it"),
        (old, "which is none of them. The journal of a run"),
    ):
        path.write_text(json.dumps(changed))
        result = run(command, folder, "--delta", 1e-5)
        assert result.exit_code == 1
        assert message in result.stderr


def test_what_agrees(folder):
    result = run("check", folder)
    assert result.exit_code == 0, result.output
    assert "All agrees." in result.stdout
    assert "WRONG" not in result.stdout
    assert "all its steps are counted" in words(result)
    values = json.loads(run("check", folder, "--json").stdout)
    assert values["agrees"] is True
    assert {row["check"] for row in values["checks"]} == {
        "epsilon", "journal", "key", "delta", "sampling", "not covered", "accountant", "epsilon_rdp", "settings", "sampler",
        "steps", "budget",
    }  # fmt: skip


WRONG = {
    "sampling probability": {"sampling_prob": 0.25},
    "epsilon": {"epsilon": RECORD.epsilon * 0.999},
    "key": {"noise_key": "guessable"},
    "delta": {"dataset_size": 10**5, "expected_batch_size": 1e5},
    "sampling": {"sampling_prob": 0.5, "expected_batch_size": 50.0, "noise_multiplier": 6.0},
    "budget": {"target_epsilon": 2.0},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_agree(folder, name):
    rewrite(folder, **WRONG[name])
    result = run("check", folder, "--json")
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert name.partition(" ")[0] in [row["check"] for row in values["checks"] if not row["agrees"]]
    assert values["agrees"] is False
    assert "Do not publish the claim" in run("check", folder).stdout
    assert ("guess" in run("show", folder).output) == (name == "key")


# What no file shows: the word of who wrote the record, as `dpfunc ledger check --help` says.
CLAIMED = {
    "date": "when it was written",
    "unit": "what a row is",
    "target_epsilon": "the budget; an epsilon above it is found",
    "max_grad_norm": "noise is relative to it",
    "num_steps": "what was planned",
    "epoch": "counted by the loop",
    "versions": "of what wrote it",
}


def test_a_record_in_which_one_leaf_was_changed_is_found(folder):
    """Each leaf, with fitting digests: refused, or found; or it is one of the few that nothing shows."""
    path, missed = folder / "privacy_accounting.json", []
    for name, place, values in altered(json.loads(RECORD.to_json())):
        if place[-1] == "digest":
            continue
        path.write_text(resigned(values))
        if run("check", folder).exit_code == 0:
            missed.append((place[0], name))
    assert {first for first, _ in missed} <= set(CLAIMED), missed


FORGED = {
    "the approximation that is no bound": {
        "ledger": SAMPLED, "epsilon": SAMPLED.epsilon(1e-5, "gdp-approximation").epsilon,
        "accountant": "gdp-approximation", "sampling_prob": 0.01, "expected_batch_size": 1.0, "noise_multiplier": 0.5,
    },
    "a bound that is too large": {"epsilon": RECORD.epsilon * 1.01},
    "an independent bound": {"epsilon_rdp": 0.1},
    "another sampler": {"sampler": "RandomAllocation", "ledger": SAMPLED},
    "an unknown sampler": {"sampler": "Magic"},
    "an unknown mechanism": {"mechanism": "a better one"},
    "an unknown source": {"noise_source": "secure"},
    "an unknown engine": {"rows": "kept apart"},
    "an unknown rule": {"clip": "none"},
    "an unknown accountant": {"accountant": "mine"},
    "another note": {"note": "exact, and below the truth"},
    "a sentence less": {"not_covered": (EXACT_SIZE, *NOT_COVERED[1:])},
    "a sentence more at the end": {"not_covered": (EXACT_SIZE, *NOT_COVERED, "nothing else")},
    "a size that is said to be a bound": {"dataset_size_is": "public bound on the number of records"},
    "another run": {"run": "b"},
    "fewer steps of its own": {"global_step": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_records_are_found(folder, name):
    rewrite(folder, **FORGED[name])
    result = run("check", folder)
    assert result.exit_code == 1, result.output
    assert "WRONG" in result.stdout


def test_records_by_each_accountant_agree(folder):
    """Whatever upper bound found it; and of a journal that is not there nothing is compared."""
    (folder / "privacy_journal.jsonl").unlink()
    (folder / "privacy_journal.jsonl.head").unlink()
    own = {"ledger": SAMPLED, "sampling_prob": 0.01, "expected_batch_size": 1.0, "noise_multiplier": 0.5}
    for method in ("auto", "tilted", "prv", "rdp"):
        found, rdp = SAMPLED.epsilon(1e-5, method), SAMPLED.epsilon(1e-5, "rdp").epsilon
        own |= {"epsilon": found.epsilon, "accountant": found.method, "note": found.note, "epsilon_rdp": rdp}
        rewrite(folder, **own, target_epsilon=None)
        assert run("check", folder).exit_code == 0, method


def test_a_journal_with_more_steps_than_the_record(folder):
    written(folder / "privacy_journal.jsonl", *(line(step) for step in range(12)))
    assert "beside privacy_accounting.json has 2 steps that it does not count" in run("show", folder).stderr
    written(folder / "z_journal.jsonl", *(line(step) for step in range(5)))  # an older copy hides no step
    assert "beside privacy_accounting.json has 2 steps that it does not count" in run("show", folder).stderr
    result = run("check", folder)
    assert result.exit_code == 1
    assert "2 of its steps are not counted" in words(result)


def test_claims_that_are_larger_smaller_or_infinite(folder):
    result = run("check", folder, "--epsilon", 3.0)
    assert result.exit_code == 0
    assert "the claim is an upper bound" in words(result)
    assert run("check", folder, "--epsilon", 2.5).exit_code == 1
    assert run("check", folder, "--delta", 1e-6).exit_code == 1  # its epsilon at a smaller delta is larger
    rewrite(folder, epsilon=math.inf, target_epsilon=None)
    assert json.loads(run("check", folder, "--json").stdout)["claimed_epsilon"] is None
    assert json.loads(run("show", folder, "--json").stdout)["epsilon"] is None


@pytest.mark.parametrize("options", [("--epsilon", "nan"), ("--epsilon", -1.0), ("--delta", "nan")])
def test_claims_that_are_no_numbers_are_refused(folder, options):
    for shape in ([], ["--json"]):
        result = run("check", folder, *options, *shape)
        assert (result.exit_code, type(result.exception), result.stdout) == (1, SystemExit, "")
        assert f"got {options[0][2:]}={options[1]}." in result.stderr


def test_a_journal_has_no_claim_and_no_delta_of_its_own(folder, tmp_path):
    path = folder / "privacy_journal.jsonl"
    assert run("check", path, "--epsilon", 2.6, "--delta", 1e-5).exit_code == 0
    assert run("check", path, "--epsilon", 2.5, "--delta", 1e-5).exit_code == 1
    for options in ((), ("--epsilon", 2.6)):
        assert run("check", path, *options).exit_code == 2
    (folder / "privacy_accounting.json").unlink()
    result = run("show", folder)
    assert result.exit_code == 2
    assert "privacy_journal.jsonl' has no delta of its own" in words(result)
    assert "2.594" in run("show", folder, "--delta", 1e-5).stdout
    written(folder / "other_journal.jsonl", line(0))
    assert "with 2 of them. Name the file." in run("show", folder).stderr
    result = run("show", tmp_path)
    assert (result.exit_code, "Expected the folder of a run" in result.stderr) == (1, True)


def test_a_record_cannot_write_to_the_terminal(folder):
    """Markup is printed as it is; control characters are refused."""
    rewrite(folder, unit="[bold red]one row[/]")
    assert "[bold red]one row[/]" in run("show", folder).stdout
    text = RECORD.to_json().replace("one patient", "one\\u001b[2Jpatient")
    (folder / "privacy_accounting.json").write_text(text)
    result = run("show", folder)
    assert result.exit_code == 1
    assert "\x1b" not in result.output


def test_the_record_of_a_checkpoint_is_not_that_of_the_run(folder):
    part = folder / "checkpoint-10"
    part.mkdir()
    (part / "privacy_accounting.json").write_text(RECORD.to_json())
    for command in ("show", "check"):
        result = run(command, part)
        assert result.exit_code == 0
        assert "record of a checkpoint" in result.stderr


def test_each_line_says_which_run_it_belongs_to(folder):
    """Two runs of one journal, and what was counted besides; as text and as values."""
    path = folder / "privacy_journal.jsonl"
    first, other = line(0)["run"], {"run": "ff" * 8}
    with_earlier = LEDGER.compose(Ledger((Event(0.5, 4.0, 2),)))
    rewrite(folder, ledger=with_earlier, epsilon=with_earlier.epsilon(1e-5).epsilon)
    assert "earlier runs" in words(run("show", folder))
    runs = json.loads(run("show", folder, "--json").stdout)["runs"]
    assert [(row["run"], row["num_steps"]) for row in runs] == [(first, 10), ("earlier runs", 2)]
    written(path, *(line(step) for step in range(10)), *({**line(step), **other} for step in range(3)))
    found = json.loads(run("show", path, "--delta", 1e-5, "--json").stdout)
    assert {row["run"]: row["num_steps"] for row in found["runs"]} == {first: 10, "ff" * 8: 3}
    assert sum(row["num_steps"] for row in found["events"]) == 13
    shown = words(run("show", path, "--delta", 1e-5))
    assert first in shown
    assert "ff" * 8 in shown
