"""BSR and BISR: bands of the square root of the matrix of prefix sums, and bands of its inverse.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpfunc._utils.memory import frozen
from dpfunc._utils.validation import checked, count, integer, optional
from dpfunc.noise.strategies.base import (
    Array,
    Recursion,
    Toeplitz,
    banded_recursion,
    inverted,
    padded,
)


@lru_cache(maxsize=64)
def _root(num_steps: int, factor: float) -> Array:
    """Coefficients of `(1 - x)^factor` for a factor of 1/2 or -1/2: the square root of prefix sums has -1/2."""
    k = np.arange(1, integer("num_steps", num_steps, minimum=1))
    return frozen(np.concatenate([[1.0], np.cumprod((k - 1 - factor) / k)]))


@dataclass(frozen=True)
@checked({"bands": optional(count)})
class BSR(Toeplitz):
    """Banded square root: the first `bands` diagonals of `A^(1/2)`, A the matrix of prefix sums.

    `c_k = binom(2 k, k) / 4^k` for k < bands: 1, 1/2, 3/8, 5/16, ... Kalinin and Lampert 2024, arXiv 2405.13763, who
    take about as many bands as there are steps between two participations of a record.

    Args:
        bands: >= 1; None is all of them, the square root factorisation.

    Guarantees:
        published values (tests/noise/test_strategies.py::test_square_roots_have_their_published_values).

    >>> BSR(3).coefficients(4)
    array([1.   , 0.5  , 0.375, 0.   ])
    >>> print(f"{BSR(32).sensitivity(512, separation=64, participations=8) ** 2:.6f}")
    17.335803
    """

    bands: int | None = None

    def coefficients(self, num_steps: int) -> Array:
        """First column of C, (num_steps,)."""
        return padded(_root(min(num_steps, self.bands or num_steps), -0.5), num_steps)

    def inverse(self, num_steps: int) -> Array:
        """First column of C^-1, (num_steps,)."""
        if self.bands is None or self.bands >= num_steps:
            return _root(num_steps, 0.5)
        return inverted(tuple(_root(self.bands, -0.5).tolist()), num_steps)

    def recursion(self, num_steps: int) -> Recursion | None:
        """The last bands - 1 releases as buffers; None without bands."""
        return None if self.bands is None else banded_recursion(_root(self.bands, -0.5))


@dataclass(frozen=True)
@checked({"inverse_bands": lambda name, value: count("bands", value)})
class BISR(Toeplitz):
    """Banded inverse square root: C^-1 has the first `bands` diagonals of `A^(-1/2)`, A the matrix of prefix sums.

    The weights of the last noise are 1, -1/2, -1/8, -1/16, -5/128, ... Each release draws the noise of so many steps
    again, and nothing is kept. Kalinin, McKenna, Upadhyay and Lampert 2025, arXiv 2505.12128.

    Args:
        inverse_bands: >= 1; 1 is independent noise.

    Guarantees:
        published values (tests/noise/test_strategies.py::test_square_roots_have_their_published_values).

    >>> BISR(3).row(512, step=100)
    array([ 1.   , -0.5  , -0.125])
    >>> print(f"{BISR(4).sensitivity(512, separation=64, participations=8) ** 2:.6f}")
    12.979220
    """

    inverse_bands: int

    @property
    def bands(self) -> int | None:
        """C itself is banded for one band alone."""
        return 1 if self.inverse_bands == 1 else None

    def coefficients(self, num_steps: int) -> Array:
        """First column of C, (num_steps,)."""
        return inverted(tuple(_root(self.inverse_bands, 0.5).tolist()), num_steps)

    def inverse(self, num_steps: int) -> Array:
        """First column of C^-1, (num_steps,)."""
        return padded(_root(self.inverse_bands, 0.5), num_steps)

    def recursion(self, num_steps: int) -> Recursion | None:
        """None: `row` is short."""
        return None
