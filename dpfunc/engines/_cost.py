"""Cost model of a use of a parameter: operations and bytes by shapes, and what is chosen by them; nothing is timed.

The gradient of one sample is a sum of products; T positions, a matrix of p x d numbers:

    formed   2 T p d operations; each number is written once, and read for the norm and for the weighted sum
    dropped  the same; the norm is measured and the gradient dropped; the weighted sum is a product of 2 T p d again
    ghost    2 T^2 (p + d) operations for the norm, without the gradient; and the same weighted sum

The last two keep factors, the gradient of the result and the input, until the factors of the clip rule are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dpfunc.engines._numerics import SCRATCH

_Representation = Literal["formed", "dropped", "ghost"]

# Measured on two cores: 200 operations a nanosecond, 10 bytes a nanosecond, fresh memory included.
_A_FRESH_NUMBER = 240  # operations while a number is written to fresh memory and read twice
_A_NUMBER = 100  # the same for a number in memory that is used again: of small gradients
_A_SMALL_PRODUCT = 2  # operations of a convolution while a product of small matrices does one
_A_CALL = 20_000  # operations during a sample's share of a call from Python
BUDGET = 2**30  # bytes of the gradients of one use that may be formed
_MAX_SIZE_RATIO = 2  # of gradients of kernels and tables to their factors, if they are kept and not small anyway


@dataclass(frozen=True)
class Choice:
    """Representation of the gradients of one use, chosen by its costs."""

    representation: _Representation
    operations: int
    num_bytes: int


@dataclass(frozen=True)
class Costs:
    """Costs of one sample's gradient."""

    product: int
    ghost: int
    numbers: int
    factors: int
    limited: bool = False

    @property
    def dropped(self) -> int:
        """Operations for the norm of a gradient that is formed and not kept."""
        return self.product + _A_NUMBER * self.numbers

    @property
    def ghost_pays(self) -> bool:
        """True if the ghost norm takes fewer operations than one that is measured."""
        return self.ghost < self.dropped

    def choose(self, num_samples: int, budget: float = math.inf) -> Choice:
        """The representation that takes the fewest operations within a budget."""
        formed_bytes, factor_bytes = (4 * num_samples * numbers for numbers in (self.numbers, self.factors))
        small = num_samples * self.numbers <= SCRATCH
        formed = self.product + (_A_NUMBER if small else _A_FRESH_NUMBER) * self.numbers
        measured = self.product + min(self.dropped, self.ghost)
        too_large = formed_bytes > budget and factor_bytes < formed_bytes
        too_large |= self.limited and not small and self.numbers > _MAX_SIZE_RATIO * self.factors
        if formed <= measured and not too_large:
            return Choice("formed", num_samples * formed, formed_bytes)
        return Choice("ghost" if self.ghost_pays else "dropped", num_samples * measured, factor_bytes)


def summed(numbers: int, positions: int = 1) -> Costs:
    """Costs of a gradient that is a sum over positions: of a bias, a norm. It is always formed."""
    return Costs(numbers * positions, _A_FRESH_NUMBER * numbers * (1 + positions), numbers, numbers * positions)


def matrix(positions: int, p: int, d: int) -> Costs:
    """Costs of a matrix p x d that is applied at some positions."""
    pairs = positions**2
    return Costs(2 * positions * p * d, 2 * pairs * (p + d) + _A_NUMBER * pairs, p * d, positions * (p + d))


def table(lookups: int, rows: int, d: int) -> Costs:
    """Costs of a table of rows: a look-up moves d numbers; for the norm, look-ups of the same row are added first."""
    moved = _A_NUMBER * lookups * d
    return Costs(moved, 2 * moved, rows * d, lookups * (d + 2), limited=True)  # an index has 8 bytes


@dataclass(frozen=True)
class Kernel:
    """The kernel of a convolution, for one sample."""

    positions: int
    cells: int
    shape: Sequence[int]
    stride: Sequence[int]
    groups: int

    def costs(self) -> Costs:
        """Costs with the cheaper way to the products of windows with windows."""
        pairs, numbers = self.positions**2, math.prod(self.shape)
        still = 2 * _A_SMALL_PRODUCT * pairs * self.shape[0]
        ghost = still + _A_NUMBER * pairs * self.groups + min(self.by_cells(), self.unfolded())
        factors = self.positions * self.shape[0] + self.cells * self.shape[1] * self.groups
        return Costs(2 * self.positions * numbers, ghost, numbers, factors, limited=True)

    def by_cells(self) -> int:
        """Operations for products of windows, as sums over the taps of products of cells, one axis after the other.

        Taps read the cells of one residue modulo the stride; the cells of each are multiplied with each other.
        """
        residues = [min(step, taps) for step, taps in zip(self.stride, self.shape[2:], strict=True)]
        cells, parts = self.cells // math.prod(self.stride), math.prod(residues)
        products = 2 * _A_SMALL_PRODUCT * cells**2 * self.shape[1] * self.groups
        passes = sum(-(-taps // count) for taps, count in zip(self.shape[2:], residues, strict=True))
        added = self.groups * (cells**2 + cells * (cells + self.positions) * passes // 2 + self.positions**2)
        return parts * (products + _A_NUMBER * added + _A_CALL * (2 + passes))

    def unfolded(self) -> int:
        """Operations for products of windows that are copied."""
        copied = self.positions * math.prod(self.shape[1:]) * self.groups
        return 2 * _A_SMALL_PRODUCT * self.positions * copied + _A_NUMBER * copied
