"""Differential privacy for PyTorch as pure functions.

May import: cli and below. Trusted: no.

sampling -> engines -> clipping -> noise -> accounting, and `dp_step(params, batch, state)` that runs them all.

A name is imported when it is first used: accounting and the command `dpfunc` do not wait for torch.
"""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc import accounting, clipping, distributed, engines, errors, lora, noise, recipes, sampling
    from dpfunc.accounting import (
        Guarantee,
        Ledger,
        calibrate_batch_size,
        calibrate_noise,
        calibrate_steps,
        epsilon,
        remaining,
    )
    from dpfunc.batches import take
    from dpfunc.budget import Budget
    from dpfunc.checkpoint import Journal, load, save
    from dpfunc.clipped import clipped_grad
    from dpfunc.errors import BudgetExhausted, DPFuncError
    from dpfunc.functional import count_batchnorm, functionalize, replace_batchnorm, with_params
    from dpfunc.noise import add_gaussian
    from dpfunc.plan import Plan
    from dpfunc.rehearsal import rehearse
    from dpfunc.release import release_mean
    from dpfunc.rng import Key, fold_in, insecure_key, secure_key
    from dpfunc.state import StepState
    from dpfunc.step import make_dp_step
    from dpfunc.types import ClippedSum, Event, Schedule

__all__ = [
    "Budget", "BudgetExhausted", "ClippedSum", "DPFuncError", "Event", "Guarantee", "Journal", "Key", "Ledger",
    "Plan", "Schedule", "StepState", "accounting", "add_gaussian", "calibrate_batch_size", "calibrate_noise",
    "calibrate_steps", "clipped_grad", "clipping", "count_batchnorm", "distributed", "engines", "epsilon", "errors",
    "fold_in", "functionalize", "insecure_key", "load", "lora", "make_dp_step", "noise", "recipes", "rehearse",
    "release_mean", "remaining", "replace_batchnorm", "sampling", "save", "secure_key", "take", "with_params",
]  # fmt: skip

_HOMES = {
    "accounting": "Guarantee Ledger calibrate_batch_size calibrate_noise calibrate_steps epsilon remaining",
    "batches": "take",
    "budget": "Budget",
    "checkpoint": "Journal load save",
    "clipped": "clipped_grad",
    "errors": "BudgetExhausted DPFuncError",
    "functional": "count_batchnorm functionalize replace_batchnorm with_params",
    "noise": "add_gaussian",
    "plan": "Plan",
    "rehearsal": "rehearse",
    "release": "release_mean",
    "rng": "Key fold_in insecure_key secure_key",
    "state": "StepState",
    "step": "make_dp_step",
    "types": "ClippedSum Event Schedule",
}  # module -> the public names that it defines


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports names that do not exist
    __getattr__ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
