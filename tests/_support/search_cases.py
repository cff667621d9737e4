"""The record of a search, and searches whose runs are made up: a key decides the score, and a file is the model."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from types import SimpleNamespace

import record_cases

from dpfunc.accounting import Ledger, RunCount
from dpfunc.accounting.record import (
    EXACT_SIZE,
    NOT_COVERED,
    SCORES,
    SEARCH_NOT_COVERED,
    SECRET,
    SETTINGS,
    SIZES,
    SelectionRecord,
    search_cost,
)
from dpfunc.rng import stream
from dpfunc.types import Event

WEIGHTS = b"weights of the best run"
RUNS, LEDGERS, SPENT = RunCount(8.0, 1.0), (Ledger((Event(1.0, 20.0, 10),)),) * 2, Ledger()
RECORD = SelectionRecord(
    date="2026-01-02T03:04:05+00:00",
    run="0123456789abcdef",
    unit="one patient",
    epsilon=search_cost(RUNS, LEDGERS, 6.0, 1e-5, SPENT).epsilon,
    delta=1e-5,
    target_epsilon=3.0,
    runs=RUNS,
    candidates=(
        {"learning_rate": 0.1, "batch_size": 100, "steps": 10},
        {"learning_rate": 0.3, "batch_size": 100, "steps": 10},
    ),
    ledgers=LEDGERS,
    score=SCORES[0],
    score_noise=6.0,
    chosen=1,
    chosen_score=88.5,
    spent=SPENT,
    noise_key=SECRET,
    dataset_size=100,
    dataset_size_is=SIZES[0],
    versions={"dpfunc": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    not_covered=(EXACT_SIZE, *SEARCH_NOT_COVERED, *NOT_COVERED),
    settings={name: getattr(record_cases.RECORD, name) for name in SETTINGS},
    weights=(hashlib.sha256(WEIGHTS).hexdigest(),),
)
NOTHING = {"chosen": None, "chosen_score": None, "settings": None, "weights": ()}  # was released


def search_record(**changes):
    """`RECORD` with other values."""
    return dataclasses.replace(RECORD, **changes)


def own(**changes):
    """A record with other facts, and the epsilon that follows from them."""
    found = search_record(**changes)
    cost = search_cost(found.runs, found.ledgers, found.score_noise, found.delta, found.spent)
    return dataclasses.replace(found, epsilon=cost.epsilon)


# each candidate costs more than the score, and the second one most
FOUND = own(score_noise=60.0, ledgers=(Ledger((Event(1.0, 20.0, 10),)), Ledger((Event(1.0, 20.0, 11),))))


def left(folder, record=FOUND):
    """What a search leaves: its record, the weights of its best run, and the job."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "job.json").write_text('{"job": {}}')
    (folder / "privacy_accounting.json").write_text(record.to_json())
    return folder


class MadeUpRuns:
    """Runs without training, in the place of `train_candidate` and `score`.

    Args:
        interrupted: number of the run in which Ctrl-C comes. failing: numbers of runs that fail. error: of these.
    """

    def __init__(self, monkeypatch, interrupted=None, failing=(), error=None):
        from dpfunc.train import _search_runs as search  # which imports torch

        self.scores, self.keys, self.interrupted, self.failing = [], [], interrupted, failing
        self.error = error or FloatingPointError("no number")
        monkeypatch.setattr(search, "train_candidate", self.train)
        monkeypatch.setattr(search, "score", lambda prepared, model, records: model.value)

    def train(self, candidate, folder, key):
        number = len(self.keys)
        self.keys.append(bytes(key.secret))
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "a.safetensors").write_text(self.keys[-1].hex())
        (folder / "privacy_journal.jsonl").write_text("one line")
        spent = candidate.plan.ledger()
        (folder / "privacy_accounting.json").write_text(
            record_cases.record(ledger=spent, adjacency=spent.adjacency).to_json()
        )
        os.utime(folder / "model" / "a.safetensors", (1e9, 1e9))  # as if it were long ago
        os.utime(folder / "model", (1e9, 1e9))
        if number == self.interrupted:
            raise KeyboardInterrupt
        if number in self.failing:
            raise self.error
        self.scores.append(100 * float(stream(key).random()))
        return SimpleNamespace(value=self.scores[-1])
