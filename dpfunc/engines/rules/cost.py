"""Cost of a use by shapes: gradients formed and kept, or factors, with a norm that is a ghost norm, or formed too.

A matrix of p x d numbers that is used at T positions, for one sample:

    formed    2 T p d operations, then each number is written once and read twice, for the norm and for the sum
    factors   the norm takes the smaller of 2 T^2 (p + d) (ghost) and 2 T p d (formed and dropped), the sum 2 T p d
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpfunc.engines.numerics import SCRATCH
from dpfunc.engines.rules.table import Form

# Operations that a processor does while it writes a number to memory and reads it twice. Measured on two cores: 200
# operations a nanosecond, 10 bytes a nanosecond, fresh memory included.
_OPERATIONS_A_NUMBER = 240
# The same for a number that is written and read once, in memory that is used again.
_OPERATIONS_A_DROPPED_NUMBER = 100
# Operations of a convolution while a product of small matrices does one.
_OPERATIONS_A_SMALL_PRODUCT = 2
# The same for a sample's share of a call from Python.
_OPERATIONS_A_CALL = 20_000
# Kept gradients may be this much larger than the factors that they stand for, if they are not small anyway.
_MAX_SIZE_RATIO = 2


def norm_flops(positions: int, p: int, d: int) -> int:
    """Operations for the norm of one sample's gradient from its factors."""
    return 2 * positions * min(positions * (p + d), p * d)


def matrix_form(positions: int, p: int, d: int) -> Form:
    """Form of a matrix's gradients that takes less time.

    >>> matrix_form(positions=128, p=8, d=384), matrix_form(positions=128, p=1024, d=384)
    ('dense', 'factors')
    """
    return "dense" if _OPERATIONS_A_NUMBER * p * d <= norm_flops(positions, p, d) else "factors"


@dataclass(frozen=True)
class KernelCost:
    """Operations of one sample's gradient of a kernel.

    Args:
        positions: T, over all images of the sample. cells: of the side that the kernel moves over.
        shape: of the kernel. stride: on each axis. groups: of channels. num_samples: B.

    >>> early = KernelCost(1024, 1024, shape=(64, 64, 3, 3), stride=(1, 1), groups=1, num_samples=32)
    >>> late = KernelCost(16, 16, shape=(512, 512, 3, 3), stride=(1, 1), groups=1, num_samples=32)
    >>> early.form(), late.form(), late.ghost_pays()
    ('dense', 'factors', True)
    """

    positions: int
    cells: int
    shape: Sequence[int]
    stride: Sequence[int]
    groups: int
    num_samples: int

    @property
    def numbers(self) -> int:
        """Number of elements of the gradient of one sample."""
        return math.prod(self.shape)

    def dropped(self) -> int:
        """Operations for the norm of a gradient that is formed and not kept."""
        return 2 * self.positions * self.numbers + _OPERATIONS_A_DROPPED_NUMBER * self.numbers

    def ghost(self) -> int:
        """Operations for the ghost norm: products of positions with positions on both sides."""
        pairs = self.positions**2 * self.groups
        still = 2 * _OPERATIONS_A_SMALL_PRODUCT * self.positions**2 * self.shape[0]
        return still + _OPERATIONS_A_DROPPED_NUMBER * pairs + min(self.by_cells(), self.unfolded())

    def by_cells(self) -> int:
        """Operations for products of windows, as sums over the taps of products of cells, one axis after the other.

        Taps read the cells of one residue modulo the stride; the cells of each are multiplied with each other.
        """
        residues = [min(step, taps) for step, taps in zip(self.stride, self.shape[2:], strict=True)]
        cells, parts = self.cells // math.prod(self.stride), math.prod(residues)
        products = 2 * _OPERATIONS_A_SMALL_PRODUCT * cells**2 * self.shape[1] * self.groups
        passes = sum(-(-taps // count) for taps, count in zip(self.shape[2:], residues, strict=True))
        added = self.groups * (cells**2 + cells * (cells + self.positions) * passes // 2 + self.positions**2)
        return parts * (products + _OPERATIONS_A_DROPPED_NUMBER * added + _OPERATIONS_A_CALL * (2 + passes))

    def unfolded(self) -> int:
        """Operations for products of windows that are copied."""
        copied = self.positions * math.prod(self.shape[1:]) * self.groups
        return 2 * _OPERATIONS_A_SMALL_PRODUCT * self.positions * copied + _OPERATIONS_A_DROPPED_NUMBER * copied

    def ghost_pays(self) -> bool:
        """True if the ghost norm takes fewer operations."""
        return self.ghost() < self.dropped()

    def form(self) -> Form:
        """Form that takes less time, if its memory is small or not much larger than that of the factors."""
        small = self.num_samples * self.numbers <= SCRATCH
        factors = self.positions * self.shape[0] + self.cells * self.shape[1] * self.groups
        a_number = _OPERATIONS_A_DROPPED_NUMBER if small else _OPERATIONS_A_NUMBER
        cheaper = a_number * self.numbers <= min(self.ghost(), self.dropped())
        return "dense" if cheaper and (small or self.numbers <= _MAX_SIZE_RATIO * factors) else "factors"
