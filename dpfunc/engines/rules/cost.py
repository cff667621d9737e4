"""Choice between forming the per-sample gradients of a matrix and keeping their factors: the faster one, by shapes.

A matrix of p x d numbers that is used at T positions, for one sample:

    formed    2 T p d operations, then each number is written once and read twice, for the norm and for the sum
    factors   the norm takes the smaller of 2 T^2 (p + d) (ghost) and 2 T p d (formed and dropped), the sum 2 T p d
"""

from __future__ import annotations

from dpfunc.engines.rules.table import Form

# Operations that a processor does while it writes a number to memory and reads it twice. Measured on two cores: 200
# operations a nanosecond, 10 bytes a nanosecond, fresh memory included.
OPERATIONS_A_NUMBER = 240


def norm_flops(positions: int, p: int, d: int) -> int:
    """Operations for the norm of one sample's gradient from its factors."""
    return 2 * positions * min(positions * (p + d), p * d)


def matrix_form(positions: int, p: int, d: int) -> Form:
    """Form of a matrix's gradients that takes less time.

    >>> matrix_form(positions=128, p=8, d=384), matrix_form(positions=128, p=1024, d=384)
    ('dense', 'factors')
    """
    return "dense" if OPERATIONS_A_NUMBER * p * d <= norm_flops(positions, p, d) else "factors"
