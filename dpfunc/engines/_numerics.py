"""Sums and norms in float32 or better, with bounds of their rounding errors; and their costs, by which one is chosen.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Costs are operations and bytes of a use of a parameter, by shapes; nothing is timed. The gradient of one sample is a sum
of products; T positions, a matrix of p x d numbers:

    formed   2 T p d operations; each number is written once, and read for the norm and for the weighted sum
    dropped  the same; the norm is measured and the gradient dropped; the weighted sum is a product of 2 T p d again
    ghost    2 T^2 (p + d) operations for the norm, without the gradient; and the same weighted sum

The last two keep factors, the gradient of the result and the input, until the factors of the clip rule are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

_PIECE = 2**12  # rounding of a float32 sum grows with its length; pieces of this length keep it near 1e-7
SCRATCH = 2**22  # numbers that may be formed at a time where a result is made only to be measured: 16 MiB of float32
LONG = 1024  # look-ups of a sample that are added one by one in float32; with more, the drift could be too large
ROUNDINGS = 4  # sums of products are off by fewer units of rounding, relative to the sum of their magnitudes
_TINY = 1e-10  # norms that matter nowhere
_CANCELS = 64  # parts that are this much larger than their sum are added up sample by sample
TOLERATED = 2.0**-13  # relative error of a squared norm that clipping.rules.SLACK pays for
# Relative differences of a value that is computed twice: float64, float32, and 16 bits or autocast.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
COARSE = 0.1


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms and sums: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_accumulation_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(accumulation_dtype(tensor.dtype))


def tolerance_of(*dtypes: torch.dtype) -> float:
    """The relative difference that rounding may make in the coarsest of dtypes, or under autocast."""
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return COARSE
    return max(TOLERANCES.get(dtype, COARSE) for dtype in dtypes)


@contextmanager
def _precision(
    device: torch.device, products: str, tf32: bool, autocast: bool, dtype: torch.dtype | None = None
) -> Iterator[None]:
    before, kind = torch.get_float32_matmul_precision(), device.type
    cast = torch.autocast(kind, dtype, autocast) if autocast or torch.is_autocast_enabled(kind) else nullcontext()
    if before != products:
        torch.set_float32_matmul_precision(products)
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32) if kind == "cuda" else nullcontext(), cast:
            yield
    finally:
        if before != products:
            torch.set_float32_matmul_precision(before)


def exact(device: torch.device) -> AbstractContextManager[None]:
    """Norms and sums are float32 whatever the model runs in: no autocast, no shortened products (TF32, bfloat16)."""
    return nullcontext() if is_exact(device) else _precision(device, "highest", tf32=False, autocast=False)


def is_exact(device: torch.device) -> bool:
    """True where `exact` changes nothing."""
    shortened = torch.is_autocast_enabled("cpu") or torch.get_float32_matmul_precision() != "highest"
    return device.type == "cpu" and not shortened


def precision_now(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Function that gives contexts with the autocast and the products that are chosen now."""
    kind, products, tf32 = device.type, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: _precision(device, products, tf32, autocast, dtype)


def lengths(tensor: Tensor, dim: int) -> Tensor:
    """Norms along one axis, in the dtype of sums."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dim, dtype=accumulation_dtype(tensor.dtype))
    return norms


def norms_of_rows(flat_BP: Tensor) -> Tensor:
    """Norms of rows, of long ones in pieces."""
    in_pieces = flat_BP.shape[1] // _PIECE * _PIECE
    if in_pieces <= _PIECE:
        return lengths(flat_BP, 1)
    pieces_BN = lengths(torch.unflatten(flat_BP[:, :in_pieces], 1, (-1, _PIECE)), 2)
    if in_pieces < flat_BP.shape[1]:
        pieces_BN = torch.cat([pieces_BN, lengths(flat_BP[:, in_pieces:], 1)[:, None]], 1)
    return lengths(pieces_BN, 1)


def in_pieces(numbers: int, *sides: Tensor, limit: int = SCRATCH) -> Iterator[tuple[Tensor, ...]]:
    """Some samples of each side at a time, one at least: those of which no more than `limit` numbers are formed."""
    return zip(*(side.split(max(1, limit // max(1, numbers))) for side in sides), strict=True)


class Measured(NamedTuple):
    """Norms of the gradients of samples, and what rounding may do to them; without a reach, nothing.

    A gradient is a sum of parts. Both the squared norm, where it is one of products of pairs of parts, and a sum over
    samples have a rounding error relative to the size of the parts; where they cancel, it may be larger than the
    gradient, and another sample's presence would change the gradient by more than the bound allows.

    Args:
        reach_B: sums of the norms of the parts. least_B: norms from which digits suffice: smaller ones are measured
            again in float64, and if they are smaller than that `least_B` too, the parts are added up on their own
            before the sum over samples. lost_B: what underflow may have taken from the norm.
    """

    norms_B: Tensor
    reach_B: Tensor | None = None
    least_B: Tensor | None = None
    lost_B: Tensor | None = None

    @property
    def parts_B(self) -> Tensor:
        """Sums of the norms of the parts; without a reach there is one part."""
        return self.norms_B if self.reach_B is None else self.reach_B

    @property
    def room_B(self) -> Tensor | None:
        """Size (B,) of the rounding that depends on the order of additions, and of what is lost; added to norms."""
        if self.reach_B is None:
            return None
        rounding = ROUNDINGS * torch.finfo(self.reach_B.dtype).eps
        return rounding * self.reach_B if self.lost_B is None else torch.add(self.lost_B, self.reach_B, alpha=rounding)


def concatenated(found: Sequence[Measured]) -> Measured:
    """Norms that were measured in the same way, as one."""
    return Measured(*(_joined(found, name) for name in Measured._fields))


def of_parts(norms_B: Tensor, reach_B: Tensor) -> Measured:
    """Norms of gradients that were formed, from parts that are added one by one in the sum over samples."""
    return Measured(norms_B, reach_B, reach_B / _CANCELS)


def of_pairs(a_BTT: Tensor, b_BTT: Tensor, numbers: int) -> Measured:
    """Norms of `sum_t a_t b_t^T`, from the products of all pairs of positions on both sides, which are overwritten.

    Args:
        numbers: of the larger side; a square below the smallest normal number may count as 0, and beside a very large
            factor that can be all.
    """
    roots_2BT = torch.stack([pairs_BTT.diagonal(dim1=1, dim2=2) for pairs_BTT in (a_BTT, b_BTT)]).sqrt()
    sq_norms_B, reach_B = a_BTT.mul_(b_BTT).sum((1, 2)), (roots_2BT[0] * roots_2BT[1]).sum(1)
    precision = torch.finfo(reach_B.dtype)
    lost_B = math.sqrt(numbers * precision.tiny) * roots_2BT.sum((0, 2))
    # What is lost and is tiny is no reason to measure a norm again: it may be that of 0. With these weights the squared
    # norm is off by TOLERATED at most where it is at least `least_B`.
    squared = ROUNDINGS * precision.eps
    weighted_B = torch.add(reach_B, (lost_B - _TINY).clamp(min=0.0), alpha=1 / squared)
    least_B = weighted_B / min(_CANCELS, math.sqrt(TOLERATED / squared))
    return Measured(sq_norms_B.clamp(min=0.0).sqrt(), reach_B, least_B, lost_B)


def squares_to_clip(found: Sequence[Measured]) -> tuple[Tensor, Tensor]:
    """Squared norms to clip by, safe under rounding, and the mask of those that are finite and have enough digits."""
    norms_B, room_B, least_B = (_joined(found, name) for name in ("norms_B", "room_B", "least_B"))
    sq_norms_B: Tensor = (norms_B if room_B is None else norms_B + room_B).square()
    finite_B = sq_norms_B < math.inf
    return sq_norms_B, finite_B if least_B is None else finite_B & (norms_B >= least_B)


def _joined(found: Sequence[Measured], name: str) -> Any:
    """Values of all samples, zero where there are none; None where there are none at all."""
    values = [getattr(each, name) for each in found]
    if len(found) == 1 or all(value is None for value in values):
        return values[0]
    if any(value is None for value in values):
        zero, both = found[0].norms_B.new_zeros(()), zip(found, values, strict=True)
        values = [zero.expand_as(each.norms_B) if value is None else value for each, value in both]
    return torch.cat(values)


def squares_of_float64(measured: Measured, eps: float) -> tuple[Tensor, Tensor]:
    """Squared norms that were measured in float64, safe in sums with this `eps`; the mask of samples that cancel."""
    norms_B, reach_B, least_B, _ = measured
    if reach_B is not None:
        own = math.sqrt(ROUNDINGS * torch.finfo(torch.float64).eps)
        norms_B = torch.hypot(norms_B, own * reach_B) + ROUNDINGS * eps * reach_B
    return norms_B.square(), torch.zeros_like(norms_B) > 0 if least_B is None else measured.norms_B < least_B


_Representation = Literal["formed", "dropped", "ghost"]

# Measured on two cores: 200 operations a nanosecond, 10 bytes a nanosecond, fresh memory included.
_A_FRESH_NUMBER = 240  # operations while a number is written to fresh memory and read twice
_A_NUMBER = 100  # the same for a number in memory that is used again: of small gradients
_A_SMALL_PRODUCT = 2  # operations of a convolution while a product of small matrices does one
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


def sum_cost(numbers: int, positions: int = 1) -> Costs:
    """Costs of a gradient that is a sum over positions: of a bias, a norm. It is always formed."""
    return Costs(numbers * positions, _A_FRESH_NUMBER * numbers * (1 + positions), numbers, numbers * positions)


def matrix_cost(positions: int, p: int, d: int) -> Costs:
    """Costs of a matrix p x d that is applied at some positions."""
    pairs = positions**2
    return Costs(2 * positions * p * d, 2 * pairs * (p + d) + _A_NUMBER * pairs, p * d, positions * (p + d))


def table_cost(lookups: int, rows: int, d: int) -> Costs:
    """Costs of a table of rows: a look-up moves d numbers; for the norm, look-ups of the same row are added first."""
    moved = _A_NUMBER * lookups * d
    return Costs(moved, 2 * moved, rows * d, lookups * (d + 2), limited=True)  # an index has 8 bytes


def kernel_cost(positions: int, cells: int, moves: int, shape: Sequence[int], groups: int) -> Costs:
    """Costs of the kernel of a convolution; products of windows with windows are sums of those of cells over taps."""
    numbers, pairs, met = math.prod(shape), positions**2, cells**2 // moves
    products = 2 * _A_SMALL_PRODUCT * (pairs * shape[0] + met * shape[1] * groups)
    ghost = products + _A_NUMBER * groups * (met + math.prod(shape[2:]) * pairs)
    factors = positions * shape[0] + cells * shape[1] * groups
    return Costs(2 * positions * numbers, ghost, numbers, factors, limited=True)
