"""Differential privacy for PyTorch as pure functions.

May import: cli and below. Privacy depends on it: no.

sampling -> engines -> clipping -> noise -> accounting, and `dp_step(params, batch, state)` that runs them all.

A name is imported when it is first used: accounting and the command `dpfunc` do not wait for torch.
"""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc import accounting as accounting
    from dpfunc import budget as budget
    from dpfunc import checkpoint as checkpoint
    from dpfunc import clipped as clipped
    from dpfunc import clipping as clipping
    from dpfunc import distributed as distributed
    from dpfunc import engines as engines
    from dpfunc import errors as errors
    from dpfunc import evidence as evidence
    from dpfunc import functional as functional
    from dpfunc import lora as lora
    from dpfunc import noise as noise
    from dpfunc import recipes as recipes
    from dpfunc import rng as rng
    from dpfunc import sampling as sampling
    from dpfunc import state as state
    from dpfunc import types as types
    from dpfunc import updates as updates
    from dpfunc.accounting import Ledger, epsilon
    from dpfunc.batches import take
    from dpfunc.budget import Budget
    from dpfunc.checkpoint import Journal, load, save
    from dpfunc.functional import functionalize, with_params
    from dpfunc.plan import Plan
    from dpfunc.rehearsal import rehearse
    from dpfunc.release import release_mean
    from dpfunc.rng import secure_key
    from dpfunc.step import make_dp_step
    from dpfunc.updates import set_grads

__all__ = [
    "Budget", "Journal", "Ledger", "Plan", "epsilon", "functionalize", "load", "make_dp_step", "rehearse",
    "release_mean", "save", "secure_key", "set_grads", "take", "with_params",
]  # fmt: skip

_HOMES = {
    "accounting": "Ledger epsilon",
    "batches": "take",
    "budget": "Budget",
    "checkpoint": "Journal load save",
    "functional": "functionalize with_params",
    "plan": "Plan",
    "rehearsal": "rehearse",
    "release": "release_mean",
    "rng": "secure_key",
    "step": "make_dp_step",
    "updates": "set_grads",
}  # module -> the public names that it defines


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports names that do not exist
    __getattr__ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
