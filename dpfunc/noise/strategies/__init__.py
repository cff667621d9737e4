"""Strategies of correlated noise: their matrices, sensitivities and errors, in float64 and without torch.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from dpfunc.noise.strategies.banded import BandMF, optimal_bands
from dpfunc.noise.strategies.base import Recursion, Strategy, Toeplitz
from dpfunc.noise.strategies.buffered import BLT, optimal_buffers
from dpfunc.noise.strategies.errors import prefix_errors
from dpfunc.noise.strategies.lambda_cgd import LambdaCGD
from dpfunc.noise.strategies.square_root import BISR, BSR

__all__ = [
    "BISR",
    "BLT",
    "BSR",
    "BandMF",
    "LambdaCGD",
    "Recursion",
    "Strategy",
    "Toeplitz",
    "optimal_bands",
    "optimal_buffers",
    "prefix_errors",
]
