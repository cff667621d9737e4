"""The record that a run leaves: what it was, with the journal's steps, and what is not covered."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dpfunc import Ledger, Plan, clipping, make_dp_step, noise, release_mean, sampling, secure_key
from dpfunc.accounting.record import (
    COMPARED,
    ELSEWHERE,
    EXACT_SIZE,
    NOT_COVERED,
    OTHER_STEPS,
    ROWS,
    SOURCES,
    UNKNOWN,
    Record,
)
from dpfunc.checkpoint import Journal, journal_ledger, make_record
from dpfunc.checkpoint._format import state_from_dict, state_to_dict
from dpfunc.checkpoint.journal import as_charged
from dpfunc.cli.main import main
from dpfunc.engines.loop import loop as engine_of_loop
from dpfunc.errors import InvalidArgument, LedgerConflict, StateReused
from dpfunc.evidence import certify, check
from dpfunc.rng import insecure_key
from dpfunc.state import resumed
from dpfunc.types import Event, Schedule


def run(plan, key, steps=2, **init):
    dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), plan)
    params, data = {"w": torch.zeros(2)}, torch.ones(plan.sampler.dataset_size, 2)
    state = dp_step.init(params, key, **init)
    for _ in range(steps):
        _, state, _ = dp_step(params, data[plan.draw(state, state.step)], state)
    return dp_step, state


def plan(**changes):
    values = {"noise_multiplier": 2.0, "num_steps": 5, "delta": 1e-3, "epsilon": 3.0, **changes}
    return Plan(values.pop("sampler", sampling.Poisson(100, 0.1)), clipping.Flat(1.5), **values)


def test_a_record_says_what_the_run_was():
    before = datetime.now(UTC).replace(microsecond=0)
    dp_step, state = run(plan(), secure_key())
    record = make_record(dp_step, state, unit="one patient")
    assert record == Record.from_json(record.to_json())
    assert record.epsilon == plan().ledger(2).epsilon(1e-3).epsilon
    assert record.ledger == plan().ledger(2)
    assert (record.unit, record.noise_key, record.mechanism) == ("one patient", "secret", "Gaussian")
    assert (record.max_grad_norm, record.clip, record.sampler) == (1.5, "Flat", "Poisson")
    assert (record.global_step, record.num_steps, record.epoch) == (2, 5, 0.2)
    assert before <= datetime.fromisoformat(record.date) <= datetime.now(UTC)
    assert record.date.endswith("+00:00")
    assert record.versions["python"] == platform.python_version()
    assert record.versions["torch"] == torch.__version__
    said = make_record(dp_step, state, unit="one row", not_covered=["accuracy on private test records"]).not_covered
    assert said[:2] == (EXACT_SIZE, "accuracy on private test records")
    for unit in ("", "  ", "one\nrow"):
        with pytest.raises(InvalidArgument, match="unit"):
            make_record(dp_step, state, unit=unit)


@dataclass(frozen=True)
class Louder(noise.Gaussian):
    """More noise than the plan's multiplier says."""

    factor: float = 3.0

    def events(self, run, start, stop):
        return super().events(self.louder(run), start, stop)

    def mechanism(self, run):
        return super().mechanism(self.louder(run))

    def louder(self, run):
        return run._replace(noise_multiplier=self.factor * run.noise_multiplier)


def test_noise_of_a_user_is_named_with_its_own_scale():
    record = make_record(*run(plan(noise=Louder()), secure_key()), unit="one patient")
    assert (record.mechanism, record.noise_multiplier) == (f"{__name__}.Louder(factor=3.0)", 6.0)
    assert {event.noise_multiplier for event in record.ledger.events} == {6.0}


@pytest.mark.parametrize("sampler", [sampling.ShuffledOnce(100, 25), sampling.CyclicPoisson(100, 0.1, 4)], ids=repr)
def test_correlated_noise_is_recorded_and_checked(sampler, tmp_path):
    """By its strategy, with the noise multiplier of its event; `dpfunc ledger check` computes it again."""
    own = plan(noise=noise.Correlated(noise.BandMF((1.0, 0.5))), sampler=sampler, adjacency="zero_out", epsilon=None)
    dp_step, state = run(own, secure_key())
    record = make_record(dp_step, state, unit="one row")
    assert record.mechanism.startswith("Correlated(strategy=BandMF(")
    assert record.noise_multiplier == own.events(0, 1)[0].noise_multiplier
    assert record.ledger == own.ledger()
    (tmp_path / "privacy_accounting.json").write_text(record.to_json())
    result = CliRunner().invoke(main, ["ledger", "check", str(tmp_path / "privacy_accounting.json")])
    assert result.exit_code == 0, result.output


def test_a_record_is_of_the_newest_state_and_of_its_plan():
    """An older state, or the plan of another phase, has a smaller epsilon than was spent."""
    dp_step, state = run(plan(), secure_key())
    begin = state._replace(step=0, charged=0, ledger=Ledger())
    with pytest.raises(StateReused, match=r"Expected the newest state of the run, after 2 steps, got state.step=0"):
        make_record(dp_step, begin, unit="one patient")
    other, _ = run(plan(noise_multiplier=9.0), secure_key())
    with pytest.raises(InvalidArgument, match="Expected a state of this plan"):
        make_record(other, state, unit="one patient")


def facts(*parts, through=lambda state: state):
    """Noise source, rows and batches in the record of a run of stretches, each with options of its own."""
    own, params, data = plan(), {"w": torch.zeros(2)}, torch.ones(100, 2)
    state, dp_step = None, None
    for options in parts:
        dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), own, **options)
        state = dp_step.init(params, secure_key()) if state is None else through(state)
        _, state, _ = dp_step(params, data[own.draw(state, state.step)], state)
    record = make_record(dp_step, state, unit="one row")
    assert OTHER_STEPS not in record.not_covered
    return record.noise_source, record.rows, record.batches


@dataclass(frozen=True)
class OwnEngine:
    """An engine of a user, which computes as that of dpfunc."""

    inner: Any = field(default_factory=engine_of_loop)

    def __call__(self, *args, **options):
        return self.inner(*args, **options)


SECURE, DEVICE, BOTH = (SOURCES[name] for name in ("secure", "device", "both"))
STRETCHES = {
    "batches": ([{"verify_batch": False}, {}], (SECURE, ROWS[0], ELSEWHERE)),
    "batches at the end": ([{}, {"verify_batch": False}], (SECURE, ROWS[0], ELSEWHERE)),
    "noise": ([{"noise_source": "device"}, {}], (BOTH, ROWS[0], COMPARED)),
    "noise of three": ([{}, {"noise_source": "device"}, {"noise_source": "device"}], (BOTH, ROWS[0], COMPARED)),
    "rows alone": ([{"engine": "loop"}, {"engine": "loop"}], (SECURE, ROWS[1], COMPARED)),
    "rows alone at first": ([{"engine": "loop"}, {}], (SECURE, ROWS[0], COMPARED)),
    "rows of a user": ([{"engine": OwnEngine()}, {"engine": "loop"}], (SECURE, ROWS[2], COMPARED)),
    "one source": ([{"noise_source": "device"}] * 2, (DEVICE, ROWS[0], COMPARED)),
}


@pytest.mark.parametrize("name", STRETCHES)
def test_settings_of_all_steps_and_not_of_the_last(name):
    """Also of those before a checkpoint; of an older one, which does not say them, nothing is claimed."""
    parts, expected = STRETCHES[name]

    def loaded(state, *without):
        values = json.loads(json.dumps(state_to_dict(state)))
        return resumed(state_from_dict({n: v for n, v in values.items() if n not in without}, plan(), {}))

    assert facts(*parts) == facts(*parts, through=loaded) == expected
    assert facts(*parts, through=lambda state: loaded(state, "facts")) == UNKNOWN


def test_steps_of_another_process_claim_nothing(tmp_path):
    """A run is interrupted after a release; or a second process, before it has repeated what the first one released."""
    own, params, data, states = plan(), {"w": torch.zeros(2)}, torch.ones(100, 2), []
    journal = Journal(tmp_path / "journal.jsonl", own)
    dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), own, journal=journal)
    state = dp_step.init(params, secure_key())
    for _ in range(3):
        _, state, _ = dp_step(params, data[own.draw(state, state.step)], state)
        states.append(state)
    first, second, third = states
    assert as_charged(third, own, journal.path, dp_step.facts) == third
    after = as_charged(second, own, journal.path, (DEVICE, *dp_step.facts[1:]))
    assert (after.step, after.ledger, after.facts) == (3, third.ledger, (BOTH, *dp_step.facts[1:]))
    begun = first._replace(charged=3, ledger=third.ledger)
    assert as_charged(begun, own, journal.path, dp_step.facts).facts == UNKNOWN


def test_settings_are_not_those_of_earlier_phases(tmp_path):
    """Whose key may be guessable, and whose batches may be drawn elsewhere: the certificate says that nothing shows it."""
    with pytest.warns(UserWarning, match="known to everybody"):
        _, first = run(plan(epsilon=None), insecure_key(52201))
    dp_step, state = run(plan(epsilon=None), secure_key(), steps=1, ledger=first.ledger)
    record = make_record(dp_step, state, unit="one row")
    assert (record.noise_key, OTHER_STEPS in record.not_covered) == ("secret", True)
    met = {}
    for name, ledger in (("one", None), ("two", first.ledger)):
        own = plan(epsilon=None)
        journal = Journal(tmp_path / name / "journal.jsonl", own)
        dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), own, journal=journal)
        state = dp_step.init({"w": torch.zeros(2)}, secure_key(), ledger)
        _, state, _ = dp_step({"w": torch.zeros(2)}, torch.ones(len(own.draw(state, 0)), 2), state)
        (tmp_path / name / "privacy_accounting.json").write_text(make_record(dp_step, state, unit="row").to_json())
        assumptions = json.loads(certify(tmp_path / name).read_bytes())["assumptions"]
        met[name] = [each["met"] for each in assumptions][:7]
        assert all(finding.agrees for finding in check(tmp_path / name / "certificate.json"))
    assert met == {"one": [True] * 7, "two": [None] * 7}


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
@pytest.mark.parametrize("bound", [True, False])
def test_the_number_of_records(adjacency, bound):
    """Under add/remove it is private; whether it is published depends on what the caller says, not on the records."""
    dp_step, state = run(plan(adjacency=adjacency), secure_key(), num_records=100)
    record = make_record(dp_step, state, unit="one row", public_bound=bound)
    assert (EXACT_SIZE in record.not_covered) == (adjacency == "add_remove" and not bound)
    assert record.dataset_size_is == ("public bound on the number of records" if bound else "number of records")
    assert record.not_covered[-len(NOT_COVERED) :] == NOT_COVERED


def test_settings_of_the_last_step_and_bounds_of_groups_as_one():
    noise = Schedule(((2, 2.0), (3, 4.0)))
    for steps, sigma in ((2, 2.0), (3, 4.0)):
        with pytest.warns(UserWarning, match="known to everybody"):
            dp_step, state = run(plan(noise_multiplier=noise, epsilon=None), insecure_key(52001 + steps), steps)
        record = make_record(dp_step, state, unit="one row")
        assert (record.noise_multiplier, record.noise_key) == (sigma, "guessable")
    rule = clipping.Flat({"w": 3.0, "v": 4.0}, groups=clipping.PerParameter())
    own = Plan(sampling.Poisson(100, 0.1), rule, noise_multiplier=2.0, num_steps=5, delta=1e-3)
    dp_step = make_dp_step(lambda params, batch: (params["w"] + params["v"]) * batch[:, 0], own)
    state = dp_step.init({"w": torch.zeros(()), "v": torch.zeros(())}, secure_key())
    record = make_record(dp_step, state, unit="one row")
    assert (record.max_grad_norm, record.global_step, record.epsilon) == (5.0, 0, 0.0)


def test_a_record_of_all_that_was_spent(tmp_path):
    """A released mean after the run, in its journal: one record and one certificate count both; the state's ledger alone
    is refused there, and a ledger that lacks a step, or is of other neighbours, everywhere."""
    own = plan()
    journal = Journal(tmp_path / "journal.jsonl", own)
    dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), own, journal=journal)
    params, data = {"w": torch.zeros(2)}, torch.ones(100, 2)
    state = dp_step.init(params, secure_key())
    for _ in range(5):
        _, state, _ = dp_step(params, data[own.draw(state, state.step)], state)
    mean = release_mean(
        torch.ones(100), bound=1.0, noise_multiplier=9.0, dataset_size=100, delta=1e-3, key=secure_key(),
        ledger=state.ledger, journal=journal.path,
    )  # fmt: skip
    whole = make_record(dp_step, state, unit="one patient", ledger=mean.ledger)
    assert whole.ledger == own.ledger().record(Event(1.0, 9.0, 1)) == journal_ledger(journal.path)
    assert whole.epsilon == whole.ledger.epsilon(1e-3).epsilon > own.ledger().epsilon(1e-3).epsilon
    assert whole.epsilon_rdp == whole.ledger.epsilon(1e-3, "rdp").epsilon
    for ledger in (own.ledger(4), Ledger((*mean.ledger.events,), "zero_out")):
        with pytest.raises(LedgerConflict, match="all that was spent"):
            make_record(dp_step, state, unit="one patient", ledger=ledger)
    file = tmp_path / "privacy_accounting.json"
    file.write_text(make_record(dp_step, state, unit="one patient").to_json())
    with pytest.raises(InvalidArgument, match="of all that the journal has"):
        certify(tmp_path)
    file.write_text(whole.to_json())
    assert all(finding.agrees for finding in check(certify(tmp_path)))
    shown = CliRunner().invoke(main, ["ledger", "show", str(tmp_path), "--json"])
    runs = {row["run"]: row["num_steps"] for row in json.loads(shown.stdout)["runs"]}
    assert [*runs.values()] == [5, 1]
    assert whole.run in runs
    result = CliRunner().invoke(main, ["ledger", "check", str(tmp_path)])
    assert result.exit_code == 0, result.output
