"""Clipping of per-sample gradients: rules, groupings and bounds.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from dpfunc.clipping.adaptive import Adaptive, count_share
from dpfunc.clipping.rules import (
    PSAC,
    AllParameters,
    Automatic,
    Blocks,
    ByName,
    Flat,
    PerLayer,
    PerParameter,
    Threshold,
    auto_v,
    normalized,
)
from dpfunc.clipping.scheduled import Scheduled
from dpfunc.clipping.telemetry import Statistic, Telemetry

__all__ = [
    "PSAC",
    "Adaptive",
    "AllParameters",
    "Automatic",
    "Blocks",
    "ByName",
    "Flat",
    "PerLayer",
    "PerParameter",
    "Scheduled",
    "Statistic",
    "Telemetry",
    "Threshold",
    "auto_v",
    "count_share",
    "normalized",
]
