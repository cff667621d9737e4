"""Errors of prefix sums of correlated noise, which optimisers make small.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from typing import Literal

import numpy as np

from dpfunc._utils.validation import integer, one_of
from dpfunc.noise.strategies.base import Array, Strategy, Toeplitz

Error = Literal["mean", "largest"]
ERRORS: tuple[Error, ...] = ("mean", "largest")


def weights_of(error: Error, num_steps: int) -> Array:
    """Weights (num_steps,) of B_k^2 in the squared error, for the first column B of the Toeplitz matrix A C^-1."""
    n = integer("num_steps", num_steps, minimum=1)
    if one_of("error", error, ERRORS) == "largest":
        return np.ones(n)
    return np.asarray((n - np.arange(n)) / n)


def prefix_errors(strategy: Strategy, num_steps: int) -> Array:
    """Squared errors of the prefix sums of a run: variances of `sum of (C^-1 z)_s over s <= t`, for each step t.

    They are of noise with standard deviation 1: multiply by the squared sensitivity to compare strategies at equal
    privacy. A learning rate that is constant makes the parameters such prefix sums.

    Args:
        strategy: of correlated noise. num_steps: steps of the run n, >= 1.

    Returns:
        (num_steps,): its mean is the mean squared error, `|A C^-1|_F^2 / n` with A the matrix of prefix sums, and its
        maximum the largest one.

    Raises:
        InvalidArgument: num_steps < 1.

    Guarantees:
        tests/noise/test_strategies.py::test_errors_of_prefix_sums_against_matrices.

    >>> from dpfunc.noise import BSR
    >>> print(f"{prefix_errors(BSR(), 16).max():.6f}")
    1.943879
    """
    n = integer("num_steps", num_steps, minimum=1)
    if isinstance(strategy, Toeplitz):
        return np.asarray(np.cumsum(np.cumsum(strategy.inverse(n)) ** 2))
    weights = np.zeros(n)  # of z_0 .. z_(n-1) in the sum
    errors = np.zeros(n)
    for step in range(n):
        row = strategy.row(n, step)
        weights[step + 1 - len(row) : step + 1] += row[::-1]
        errors[step] = weights @ weights
    return errors
