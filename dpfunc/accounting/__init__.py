"""What the released steps cost: ledgers, epsilon, and the noise or steps that a budget allows."""

from dpfunc.accounting.accountant import epsilon
from dpfunc.accounting.calibration import calibrate, calibrate_batch_size, calibrate_noise
from dpfunc.accounting.guarantee import Guarantee
from dpfunc.accounting.ledger import Ledger, compose
from dpfunc.accounting.schedules import schedule_ledger
from dpfunc.accounting.steps import Remaining, affordable_steps, calibrate_steps, remaining

__all__ = [
    "Guarantee",
    "Ledger",
    "Remaining",
    "affordable_steps",
    "calibrate",
    "calibrate_batch_size",
    "calibrate_noise",
    "calibrate_steps",
    "compose",
    "epsilon",
    "remaining",
    "schedule_ledger",
]
