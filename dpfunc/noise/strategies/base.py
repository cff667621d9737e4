"""What a strategy of correlated noise brings, and what all that are Toeplitz share.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

With the lower triangular matrix C of a strategy, a run releases `x + C^-1 z`: x are the sums of its steps, z is
independent Gaussian noise. It costs what one release of `C x + z` costs, which moves by `sensitivity`.
"""

from abc import abstractmethod
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dpfunc._utils.memory import frozen
from dpfunc._utils.validation import expect, integer

Array = NDArray[np.float64]


class Recursion(NamedTuple):
    """Noise w = C^-1 z by m buffers: `s_0 = 0`, `w_t = scale z_t + read s_t`, `s_(t+1) = keep s_t + write w_t`.

    Args:
        scale: of new noise. read: (m,). keep: (m, m). write: (m,).
    """

    scale: float
    read: Array
    keep: Array
    write: Array


class Strategy(Protocol):
    """The matrix C of correlated noise for runs of n steps: public values, in float64. Implement it for your own.

    As a frozen dataclass among the public names of `dpfunc.noise` it can be saved in a plan.
    """

    @property
    @abstractmethod
    def bands(self) -> int | None:
        """Number of diagonals of C that are not 0, the same for all n; None where C is not banded."""

    def row(self, num_steps: int, step: int) -> Array:
        """Row `step` of C^-1: weights of z_step, z_(step-1), .., at most step + 1, without zeros at the end."""

    def sensitivity(self, num_steps: int, separation: int, participations: int) -> float:
        """Norm by which one record moves C x at most: never below the truth.

        It takes part in at most `participations` steps, of which each two are at least `separation` steps apart, and
        adds a vector of norm 1 at most to each, of any direction. `sensitivity(n, n, 1)` is the largest column's.
        """

    @abstractmethod
    def recursion(self, num_steps: int) -> Recursion | None:
        """C^-1 z by a few buffers; None where there is no such recursion."""


class Toeplitz(Strategy):
    """A strategy whose matrix has one value on each diagonal: `C[i, j] = c[i - j]`."""

    @abstractmethod
    def coefficients(self, num_steps: int) -> Array:
        """First column of C, (num_steps,)."""

    @abstractmethod
    def inverse(self, num_steps: int) -> Array:
        """First column of C^-1, (num_steps,)."""

    def row(self, num_steps: int, step: int) -> Array:
        """Row `step` of C^-1, see `Strategy`."""
        check_step(num_steps, step)
        return np.trim_zeros(self.inverse(num_steps)[: step + 1], "b")

    def sensitivity(self, num_steps: int, separation: int, participations: int) -> float:
        """The multi-participation sensitivity, see `Strategy`.

        With coefficients >= 0 that do not rise, a record does most in the steps 0, b, 2 b, .. with the separation b:
        the norm of the sum of these columns, Kalinin and Lampert 2024, arXiv 2405.13763, Theorem 2. Columns that do not
        overlap (at most b bands, or one participation) are orthogonal, and their squared norms add up. Else the first
        holds for a matrix of larger entries: the least that does not rise, above |c|.

        Guarantees:
            equal to a search over all participations where this is exact, and never below it else
            (tests/noise/test_strategies.py::test_sensitivity_against_all_participations).
        """
        check_participation(num_steps, separation, participations)
        return _sensitivity(self, num_steps, separation, participations)


def check_step(num_steps: int, step: int) -> None:
    """Raise an error unless 0 <= step < num_steps."""
    expect(integer("step", step) < num_steps, f"step < num_steps, which is {num_steps}", "step", step)


def check_participation(num_steps: int, separation: int, participations: int) -> None:
    """Raise an error unless all three are integers from 1."""
    integer("num_steps", num_steps, minimum=1)
    integer("separation", separation, minimum=1)
    integer("participations", participations, minimum=1)


def most_participations(num_steps: int, separation: int, participations: int) -> int:
    """Steps among `num_steps` in which a record can take part."""
    return min(participations, -(-num_steps // separation))


def _sensitivity(strategy: Any, num_steps: int, separation: int, participations: int) -> float:
    column = np.abs(strategy.coefficients(num_steps))
    k = most_participations(num_steps, separation, participations)
    if k == 1 or len(np.trim_zeros(column, "b")) <= separation:
        norms = np.cumsum(column**2)[::-1]  # of each column
        return float(np.sqrt(norms[: k * separation : separation].sum()))
    above = np.maximum.accumulate(column[::-1])[::-1]
    return float(np.linalg.norm(repeated(above, separation, k)))


def repeated(column: Array, separation: int, times: int) -> Array:
    """Sum of the columns 0, b, 2 b, .. of a Toeplitz matrix, `times` of them; b is the separation."""
    rows = -(-len(column) // separation)
    sums = np.zeros((rows, separation))
    sums.flat[: len(column)] = column
    sums = np.cumsum(sums, axis=0)
    sums[times:] = sums[times:] - sums[: max(rows - times, 0)]
    return np.asarray(sums.ravel()[: len(column)])


def unit(num_steps: int) -> Array:
    """First column of the identity."""
    column = np.zeros(integer("num_steps", num_steps, minimum=1))
    column[0] = 1.0
    return column


def padded(values: Array, num_steps: int) -> Array:
    """The first `num_steps` values, with zeros where there are less."""
    column = np.zeros(integer("num_steps", num_steps, minimum=1))
    kept = values[:num_steps]
    column[: len(kept)] = kept
    return column


@lru_cache(maxsize=64)
def inverted(diagonals: tuple[float, ...], num_steps: int) -> Array:
    """First column of the inverse of a lower triangular Toeplitz matrix, from the values on its first diagonals."""
    from scipy.signal import lfilter

    return frozen(np.asarray(lfilter([1.0], np.trim_zeros(np.array(diagonals[:num_steps]), "b"), unit(num_steps))))


def banded_recursion(column: Array) -> Recursion:
    """The recursion of a matrix with few diagonals: its buffers are the last w_t, the latest first."""
    size = len(column) - 1
    return Recursion(1 / column[0], -column[1:] / column[0], np.eye(size, k=-1), np.eye(size, 1)[:, 0])
