"""BandMF: a banded Toeplitz matrix whose coefficients an optimiser chose.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from dpfunc._utils.validation import checked, count, each, expect, one_of, real
from dpfunc.noise.strategies.base import (
    Array,
    Recursion,
    Toeplitz,
    banded_recursion,
    inverted,
    padded,
)
from dpfunc.noise.strategies.errors import ERRORS, Error, weights_of
from dpfunc.noise.strategies.square_root import BSR


@dataclass(frozen=True)
@checked({"weights": each(partial(real, domain="finite weights"), "a tuple of at least one weight")})
class BandMF(Toeplitz):
    """Banded matrix factorisation: C has these values on its diagonals; Choquette-Choo et al. 2023, arXiv 2306.08153.

    With at most as many bands as there are steps between two participations of a record, k participations cost what k
    releases of independent noise cost; with samples that are drawn in cycles, sampling counts too (Theorem 4 there).
    `optimal_bands` finds the values.

    Args:
        weights: c_0, c_1, ..; c_0 > 0 and finite ones.

    Guarantees:
        tests/noise/test_strategies.py::test_optimal_bands_have_their_published_values.

    >>> BandMF((0.8, 0.6)).sensitivity(512, separation=2, participations=9)
    3.0
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        expect(self.weights[0] > 0, "c_0 > 0, or C has no inverse", "weights[0]", self.weights[0])

    @property
    def bands(self) -> int | None:
        """The number of values."""
        return len(self.weights)

    def coefficients(self, num_steps: int) -> Array:
        """First column of C, (num_steps,)."""
        return padded(np.array(self.weights), num_steps)

    def inverse(self, num_steps: int) -> Array:
        """First column of C^-1, (num_steps,)."""
        return inverted(self.weights, num_steps)

    def recursion(self, num_steps: int) -> Recursion | None:
        """The last bands - 1 releases as buffers."""
        return banded_recursion(np.array(self.weights))


def optimal_bands(num_steps: int, bands: int, error: Error = "mean") -> BandMF:
    """The banded Toeplitz matrix with columns of norm 1 and the least error of prefix sums, by L-BFGS.

    It minimises `log(sum_k w_k B_k^2) + log |c|^2` over c_0 .. c_(bands - 1), where B is the first column of A C^-1 and
    `w_k` is `(n - k) / n` for the mean and 1 for the largest error. Values are public: a plan has them, and a resumed
    run does not optimise again. A call takes milliseconds for a thousand steps.

    Args:
        num_steps: of the run n. bands: 1 <= bands <= num_steps. error: `mean` or `largest` squared error.

    Returns:
        `BandMF`; the same object for the same arguments.

    Raises:
        InvalidArgument: an argument outside its domain.

    Guarantees:
        published values (tests/noise/test_strategies.py::test_optimal_bands_have_their_published_values); no random
        change of the values is better (test_optima_are_optima).

    >>> from dpfunc.noise import prefix_errors
    >>> print(f"{prefix_errors(optimal_bands(512, 8), 512).mean():.4f}")
    37.8356
    """
    most = count("num_steps", num_steps)
    expect(count("bands", bands) <= most, f"bands <= num_steps, which is {most}", "bands", bands)
    return _best(num_steps, bands, one_of("error", error, ERRORS))


@lru_cache(maxsize=64)
def _best(num_steps: int, bands: int, error: Error) -> BandMF:
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    weights = weights_of(error, num_steps)

    def loss(column: Array) -> tuple[float, Array]:
        sums = lfilter([1.0], column, np.ones(num_steps))
        weighted = weights * sums
        total, square = weighted @ sums, column @ column
        # dB = -B * C^-1 * dc, where * is the product of power series
        change = lfilter([1.0], column, sums)
        slope = np.array([-2 * (weighted[k:] @ change[: num_steps - k]) for k in range(bands)])
        return float(np.log(total) + np.log(square)), slope / total + 2 * column / square

    start = BSR(bands).coefficients(bands)
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-16, "gtol": 1e-11, "maxiter": 5000})
    return BandMF(tuple((found.x / np.linalg.norm(found.x)).tolist()))
