"""Accounting of released steps: ledgers, epsilon, and the noise or steps that a budget allows.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from dpfunc.accounting._trade_off import TradeOff, delta_at
from dpfunc.accounting.accountant import Guarantee
from dpfunc.accounting.calibration import (
    BudgetLeft,
    affordable_steps,
    calibrate,
    calibrate_batch_size,
    calibrate_noise,
    calibrate_steps,
    epsilon_left,
    remaining,
)
from dpfunc.accounting.events import ZCDP, Laplace, Opaque
from dpfunc.accounting.ledger import Ledger, compose, epsilon, schedule_ledger
from dpfunc.accounting.mechanisms import (
    DiscreteGaussian,
    DiscreteLaplace,
    Exponential,
    MixtureOfGaussians,
    RandomizedResponse,
    Tree,
)
from dpfunc.accounting.requirements import (
    DELTA_TABLE,
    EPSILON_TABLE,
    BatchChoice,
    DeltaMeaning,
    EpsilonMeaning,
    Requirements,
    explain_delta,
    explain_epsilon,
    privacy_requirements,
    suggest_delta,
)
from dpfunc.accounting.selection import RunCount, calibrate_search, selection_epsilon
from dpfunc.types import Allocated, Capped, Event

__all__ = [
    "DELTA_TABLE",
    "EPSILON_TABLE",
    "ZCDP",
    "Allocated",
    "BatchChoice",
    "BudgetLeft",
    "Capped",
    "DeltaMeaning",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "EpsilonMeaning",
    "Event",
    "Exponential",
    "Guarantee",
    "Laplace",
    "Ledger",
    "MixtureOfGaussians",
    "Opaque",
    "RandomizedResponse",
    "Requirements",
    "RunCount",
    "TradeOff",
    "Tree",
    "affordable_steps",
    "calibrate",
    "calibrate_batch_size",
    "calibrate_noise",
    "calibrate_search",
    "calibrate_steps",
    "compose",
    "delta_at",
    "epsilon",
    "epsilon_left",
    "explain_delta",
    "explain_epsilon",
    "privacy_requirements",
    "remaining",
    "schedule_ledger",
    "selection_epsilon",
    "suggest_delta",
]
