"""Differential privacy for PyTorch as pure functions.

sampling -> engines -> clipping -> noise -> accounting, and `dp_step(params, batch, state)` that runs them all.
"""

from dpfunc import accounting, clipping, distributed, engines, errors, lora, noise, sampling
from dpfunc.accounting import (
    Guarantee,
    Ledger,
    calibrate_batch_size,
    calibrate_noise,
    calibrate_steps,
    epsilon,
    remaining,
)
from dpfunc.batchnorm import count_batchnorm, replace_batchnorm
from dpfunc.checkpoint import load, save
from dpfunc.clipped import clipped_grad
from dpfunc.errors import BudgetExhausted, DPFuncError
from dpfunc.functional import functionalize, with_params
from dpfunc.journal import Journal
from dpfunc.noise import add_gaussian
from dpfunc.plan import Plan
from dpfunc.rng import Key, fold_in, insecure_key, secure_key
from dpfunc.state import StepState
from dpfunc.step import make_dp_step
from dpfunc.tree import take
from dpfunc.types import ClippedSum, Event, Schedule

__all__ = [
    "BudgetExhausted",
    "ClippedSum",
    "DPFuncError",
    "Event",
    "Guarantee",
    "Journal",
    "Key",
    "Ledger",
    "Plan",
    "Schedule",
    "StepState",
    "accounting",
    "add_gaussian",
    "calibrate_batch_size",
    "calibrate_noise",
    "calibrate_steps",
    "clipped_grad",
    "clipping",
    "count_batchnorm",
    "distributed",
    "engines",
    "epsilon",
    "errors",
    "fold_in",
    "functionalize",
    "insecure_key",
    "load",
    "lora",
    "make_dp_step",
    "noise",
    "remaining",
    "replace_batchnorm",
    "sampling",
    "save",
    "secure_key",
    "take",
    "with_params",
]
