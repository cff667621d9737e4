"""Noise: from a ClippedSum to something that may be published.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from dpfunc.noise.correlated import Correlated
from dpfunc.noise.gaussian import Gaussian, add_gaussian, gaussian, noise_std
from dpfunc.noise.mechanism import Mechanism, Noise, Run, Turn
from dpfunc.noise.strategies import (
    BISR,
    BLT,
    BSR,
    BandMF,
    LambdaCGD,
    Recursion,
    Strategy,
    Toeplitz,
    optimal_bands,
    optimal_buffers,
    prefix_errors,
)

DEFAULT: Noise = Gaussian()
"""The noise of a plan that names none."""

__all__ = [
    "BISR",
    "BLT",
    "BSR",
    "BandMF",
    "Correlated",
    "Gaussian",
    "LambdaCGD",
    "Mechanism",
    "Noise",
    "Recursion",
    "Run",
    "Strategy",
    "Toeplitz",
    "Turn",
    "add_gaussian",
    "gaussian",
    "noise_std",
    "optimal_bands",
    "optimal_buffers",
    "prefix_errors",
]
