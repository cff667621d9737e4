"""BLT: a Toeplitz matrix whose coefficients are a sum of few geometric series, so that few buffers are kept.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpfunc._utils.memory import frozen
from dpfunc._utils.validation import checked, each, expect, integer, one_of, open_unit, positive
from dpfunc.noise.strategies.base import (
    Array,
    Recursion,
    Toeplitz,
    check_participation,
    most_participations,
    repeated,
)
from dpfunc.noise.strategies.errors import ERRORS, Error, weights_of

_VALUES = "a tuple of at least one value"


def _powers(bases: Array, count: int) -> Array:
    """`bases^k` for k < count, (bases, count): products of two tables, since float64 powers are slow."""
    size = int(np.ceil(np.sqrt(count)))
    k = np.arange(size)
    table = bases[:, None, None] ** (size * k)[:, None] * bases[:, None, None] ** k
    return np.asarray(table.reshape(len(bases), -1)[:, :count])


def _column(scales: Array, gaps: Array, num_steps: int) -> Array:
    """First column of C, for decays of 1 - gaps."""
    return np.concatenate([[1.0], scales @ _powers(1 - gaps, num_steps - 1)])


def _spectrum(scales: Array, gaps: Array) -> tuple[Array, Array]:
    """The same two of C^-1, which is a BLT with the opposite sign: `1, -sum_j b_j m_j^(k - 1)`.

    Its buffers are multiplied by diag(decays) less a matrix of rank 1, which is similar to a symmetric one.
    Polynomials would lose all digits: their zeros are near 1.
    """
    roots = np.sqrt(scales)
    values, vectors = np.linalg.eigh(np.diag(gaps) + np.outer(roots, roots))
    return (roots @ vectors) ** 2, values


def _sums(scales: Array, gaps: Array, num_steps: int) -> Array:
    """First column of A C^-1, A the matrix of prefix sums."""
    parts, values = _spectrum(scales, gaps)
    limit = 1 / (1 + (scales / gaps).sum())
    return np.asarray(limit + (parts / values) @ _powers(1 - values, num_steps))


@lru_cache(maxsize=64)
def _columns(strategy: "BLT", num_steps: int) -> tuple[Array, Array]:
    scales, gaps = np.array(strategy.scales), 1 - np.array(strategy.decays)
    parts, values = _spectrum(scales, gaps)
    inverse = np.concatenate([[1.0], -_column(parts, values, num_steps)[1:]])
    return frozen(_column(scales, gaps, num_steps)), frozen(inverse)


@dataclass(frozen=True)
@checked({"scales": each(positive, _VALUES), "decays": each(open_unit, _VALUES)})
class BLT(Toeplitz):
    """Buffered linear Toeplitz: `c_0 = 1`, `c_k = sum_j scales_j decays_j^(k - 1)`; d buffers of the parameters' size.

    Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024, arXiv 2404.16706; for several participations McMahan, Xu
    and Zhang 2024, arXiv 2408.08868. `optimal_buffers` finds the values.

    Args:
        scales: d >= 1 values > 0. decays: d values, 0 < decay < 1.

    Guarantees:
        tests/noise/test_strategies.py::test_buffers_release_what_the_rows_say.

    >>> BLT((0.5,), (0.5,)).coefficients(4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """

    scales: tuple[float, ...]
    decays: tuple[float, ...]

    def __post_init__(self) -> None:
        expect(len(self.scales) == len(self.decays), "as many decays as scales", "decays", self.decays)

    @property
    def bands(self) -> int | None:
        """None: C is not banded."""
        return None

    def coefficients(self, num_steps: int) -> Array:
        """First column of C, (num_steps,)."""
        return _columns(self, num_steps)[0]

    def inverse(self, num_steps: int) -> Array:
        """First column of C^-1, (num_steps,)."""
        return _columns(self, num_steps)[1]

    def recursion(self, num_steps: int) -> Recursion | None:
        """Its buffers: `w_t = z_t - scales s_t`, `s_(t+1) = decays s_t + w_t`."""
        return Recursion(1.0, -np.array(self.scales), np.diag(self.decays), np.ones(len(self.decays)))


def optimal_buffers(
    num_steps: int, buffers: int, error: Error = "largest", separation: int | None = None, participations: int = 1
) -> BLT:
    """The BLT with the least error of prefix sums at equal privacy, by L-BFGS over logarithms of scales and 1 - decays.

    It minimises the logarithm of `sensitivity^2 sum_k w_k B_k^2`, see `optimal_bands`; each of a few hundred trials
    takes time in proportion to n times the buffers.

    Args:
        num_steps: of the run n, >= 2. buffers: d, 1 <= d <= 8. error: `largest` or `mean` squared error.
        separation: steps between two participations of a record; None: num_steps. participations: at most, >= 1.

    Returns:
        `BLT`; the same object for the same arguments. A local optimum: that of a start which spreads decays over the
        length of the run.

    Raises:
        InvalidArgument: an argument outside its domain.

    Guarantees:
        published values (tests/noise/test_strategies.py::test_optimal_buffers_have_their_published_values).

    >>> from dpfunc.noise import prefix_errors
    >>> found = optimal_buffers(1000, 2)
    >>> print(f"{found.sensitivity(1000, 1000, 1) ** 2 * prefix_errors(found, 1000).max():.4f}")
    11.0308
    """
    integer("num_steps", num_steps, minimum=2)
    integer("buffers", buffers, minimum=1)
    expect(buffers <= 8, "buffers <= 8", "buffers", buffers, "More gain nothing that float64 can tell.")
    between = num_steps if separation is None else separation
    check_participation(num_steps, between, participations)
    times = most_participations(num_steps, between, participations)
    return _best(num_steps, buffers, one_of("error", error, ERRORS), between, times)


@lru_cache(maxsize=64)
def _best(num_steps: int, buffers: int, error: Error, between: int, times: int) -> BLT:
    from scipy.optimize import minimize

    weights = weights_of(error, num_steps)

    def loss(values: Array) -> float:
        scales, gaps = np.exp(values[:buffers]), np.exp(values[buffers:])
        moved = repeated(_column(scales, gaps, num_steps), between, times)
        return float(np.log(weights @ _sums(scales, gaps, num_steps) ** 2) + np.log(moved @ moved))

    gaps = np.logspace(np.log10(min(0.5, 5 / num_steps)), 0, buffers, endpoint=False)
    roots = np.sqrt(gaps)
    start = np.log(np.concatenate([min(1.2, 0.5 / roots.sum()) * roots, gaps]))
    least = np.log(0.01 / num_steps)
    found = minimize(
        loss, start, jac="3-point", method="L-BFGS-B",
        bounds=[(least, 0.0)] * buffers + [(least, -1e-3)] * buffers,
        options={"ftol": 1e-14, "gtol": 1e-8, "maxiter": 5000, "maxcor": 30},
    )  # fmt: skip
    order = np.argsort(found.x[buffers:])
    return BLT(tuple(np.exp(found.x[:buffers][order]).tolist()), tuple((1 - np.exp(found.x[buffers:][order])).tolist()))
