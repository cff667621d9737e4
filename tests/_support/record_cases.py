"""A record of a run, and others like it."""

from __future__ import annotations

import dataclasses

from dpfunc.accounting import Ledger
from dpfunc.accounting.record import COMPARED, EXACT_SIZE, NOT_COVERED, SECRET, SIZES, Record
from dpfunc.types import Event

LEDGER = Ledger((Event(1.0, 5.0, 10),))
RECORD = Record(
    run="a",  # as in journal_cases
    date="2026-01-02T03:04:05+00:00",
    unit="one patient",
    adjacency="add_remove",
    epsilon=LEDGER.epsilon(1e-5).epsilon,
    delta=1e-5,
    target_epsilon=3.0,
    accountant="gaussian",
    note="exact",
    epsilon_rdp=LEDGER.epsilon(1e-5, "rdp").epsilon,
    ledger=LEDGER,
    mechanism="Gaussian",
    noise_multiplier=5.0,
    noise_source="AES-128-CTR stream of a 256-bit key",
    noise_key=SECRET,
    max_grad_norm=1.0,
    clip="Flat",
    rows="each row computed alone",
    batches=COMPARED,
    sampler="Poisson",
    sampling_prob=1.0,
    expected_batch_size=100.0,
    dataset_size=100,
    dataset_size_is=SIZES[0],
    global_step=10,
    num_steps=10,
    epoch=10.0,
    versions={"dpfunc": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    not_covered=(EXACT_SIZE, *NOT_COVERED),
)


def record(**changes):
    """`RECORD` with other values."""
    return dataclasses.replace(RECORD, **changes)
