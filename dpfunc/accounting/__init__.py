"""Accounting of released steps: ledgers, epsilon, and the noise or steps that a budget allows."""

from dpfunc.accounting.accountant import epsilon
from dpfunc.accounting.calibration import calibrate, calibrate_batch_size, calibrate_noise
from dpfunc.accounting.guarantee import Guarantee
from dpfunc.accounting.ledger import Ledger, compose
from dpfunc.accounting.reading import (
    DELTA_TABLE,
    EPSILON_TABLE,
    DeltaReading,
    EpsilonReading,
    read_delta,
    read_epsilon,
    suggest_delta,
)
from dpfunc.accounting.requirements import BatchChoice, Requirements, privacy_requirements
from dpfunc.accounting.schedules import schedule_ledger
from dpfunc.accounting.steps import Remaining, affordable_steps, calibrate_steps, remaining

__all__ = [
    "DELTA_TABLE",
    "EPSILON_TABLE",
    "BatchChoice",
    "DeltaReading",
    "EpsilonReading",
    "Guarantee",
    "Ledger",
    "Remaining",
    "Requirements",
    "affordable_steps",
    "calibrate",
    "calibrate_batch_size",
    "calibrate_noise",
    "calibrate_steps",
    "compose",
    "epsilon",
    "privacy_requirements",
    "read_delta",
    "read_epsilon",
    "remaining",
    "schedule_ledger",
    "suggest_delta",
]
