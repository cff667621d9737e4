"""Clipping of per-sample gradients: rules, groupings and bounds."""

from dpfunc.clipping.automatic import Automatic, auto_v, normalized
from dpfunc.clipping.flat import Flat
from dpfunc.clipping.groups import AllParameters, Blocks, ByName, PerLayer, PerParameter
from dpfunc.clipping.psac import PSAC
from dpfunc.clipping.telemetry import Statistic, Telemetry
from dpfunc.clipping.threshold import Threshold

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
