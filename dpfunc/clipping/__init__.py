"""Clipping of per-sample gradients: rules, groupings and bounds."""

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
from dpfunc.clipping.telemetry import Statistic, Telemetry

__all__ = [
    "PSAC",
    "AllParameters",
    "Automatic",
    "Blocks",
    "ByName",
    "Flat",
    "PerLayer",
    "PerParameter",
    "Statistic",
    "Telemetry",
    "Threshold",
    "auto_v",
    "normalized",
]
