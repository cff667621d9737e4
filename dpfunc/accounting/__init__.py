"""Accounting: what was spent, what it means, and what is left."""

from dpfunc.accounting.calibrate import (
    Remaining,
    affordable_steps,
    calibrate,
    calibrate_batch_size,
    calibrate_noise,
    calibrate_steps,
    remaining,
)
from dpfunc.accounting.epsilon import epsilon
from dpfunc.accounting.guarantee import Guarantee
from dpfunc.accounting.ledger import Ledger
from dpfunc.accounting.schedules import schedule_ledger

__all__ = [
    "Guarantee",
    "Ledger",
    "Remaining",
    "affordable_steps",
    "calibrate",
    "calibrate_batch_size",
    "calibrate_noise",
    "calibrate_steps",
    "epsilon",
    "remaining",
    "schedule_ledger",
]
