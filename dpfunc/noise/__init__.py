"""Noise: from a ClippedSum to something that may be published."""

from dpfunc.noise.gaussian import Gaussian, add_gaussian, gaussian, noise_std
from dpfunc.noise.mechanism import Mechanism, Noise
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

__all__ = [
    "BISR",
    "BLT",
    "BSR",
    "BandMF",
    "Gaussian",
    "LambdaCGD",
    "Mechanism",
    "Noise",
    "Recursion",
    "Strategy",
    "Toeplitz",
    "add_gaussian",
    "gaussian",
    "noise_std",
    "optimal_bands",
    "optimal_buffers",
    "prefix_errors",
]
