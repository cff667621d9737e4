"""Sums and norms in float32 or better, with bounds of their rounding errors; and their costs, by which one is chosen.

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
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeVar

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
    """True if products are not shortened anyway, and `exact` would change nothing."""
    cast = torch.is_autocast_enabled("cpu")
    return device.type == "cpu" and not cast and torch.get_float32_matmul_precision() == "highest"


def precision_now(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Function that gives contexts with the autocast and the products that are chosen now."""
    kind, products, tf32 = device.type, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: _precision(device, products, tf32, autocast, dtype)


def without_dropped(factors_B: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Take the rows with factor 0 out of factors and tensors, since 0 * inf is NaN."""
    if not any_dropped(factors_B):
        return (factors_B, *tensors)
    kept_B = factors_B != 0
    return (factors_B[kept_B], *(tensor[kept_B] for tensor in tensors))


def lengths(tensor: Tensor, dim: int) -> Tensor:
    """Norms along one axis, in the dtype of sums."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dim, dtype=accumulation_dtype(tensor.dtype))
    return norms


def sq_sum(flat_BP: Tensor) -> Tensor:
    """Squared norms of rows, summed in pieces."""
    in_pieces = flat_BP.shape[1] // _PIECE * _PIECE
    rest_B = lengths(flat_BP[:, in_pieces:], 1).square()
    if not in_pieces:
        return rest_B
    pieces_BN = lengths(torch.unflatten(flat_BP[:, :in_pieces], 1, (-1, _PIECE)), 2)
    return rest_B + pieces_BN.square().sum(1)


def in_pieces(
    measure: Callable[..., tuple[Tensor, ...]], numbers: int, *sides: Tensor, limit: int = SCRATCH
) -> tuple[Tensor, ...]:
    """Values (B,) that are measured on some samples at a time, one at least."""
    size = max(1, limit // max(1, numbers))
    if size >= len(sides[0]):
        return measure(*sides)
    pieces = [measure(*piece) for piece in zip(*(torch.split(side, size) for side in sides), strict=True)]
    return tuple(torch.cat(values) for values in zip(*pieces, strict=True))


def safe_sq_norms(
    sq_norms_B: Tensor, reach_B: Tensor, cancels: list[Tensor], *, additions: int = 0, lost_B: Tensor | None = None
) -> Tensor:
    """Squared norms to clip by, safe under rounding; puts the mask of samples whose parts cancel into `cancels`.

    A sum over all samples has a rounding error relative to the size of its terms. Where the parts of a sample are much
    larger than its gradient (`reach_B`, the sum of their norms, against the norm), another sample's presence would
    change it by more than the bound allows. The parts of such samples are added up on their own first. The rounding
    error that depends on the order of additions is added to the norm.
    """
    norms_B, eps = sq_norms_B.sqrt(), torch.finfo(reach_B.dtype).eps
    drifts = 2 * TOLERATED / (eps * max(1, additions))
    cancels[:] = [reach_B > min(_CANCELS, drifts) * norms_B]
    safe_B = norms_B + ROUNDINGS * eps * reach_B
    return (safe_B if lost_B is None else safe_B + lost_B).square()


def of_pairs(a_BTT: Tensor, p: int, b_BTT: Tensor, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms of `sum_t a_t b_t^T`, from the products of all pairs of positions on both sides."""
    a_BT, b_BT = (products_BTT.diagonal(dim1=1, dim2=2).sqrt() for products_BTT in (a_BTT, b_BTT))
    # Each square below the smallest normal number may count as 0. Beside a very large factor, that can be all.
    lost_a, lost_b = (math.sqrt(size * torch.finfo(a_BT.dtype).tiny) for size in (p, d))
    lost_B = lost_a * (b_BT.sum(1) + lost_b) + lost_b * a_BT.sum(1)
    return (a_BTT * b_BTT).sum((1, 2)), (a_BT * b_BT).sum(1), lost_B


def mended_pairs(
    paired: tuple[Tensor, ...], measure: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms from products of pairs, mended where too few digits are left or they overflowed.

    Those are measured on the gradients in float64.
    What is lost in squares and is tiny is added to the norm, and is no reason to measure it again: it may be that of 0.
    """
    sq_norms_B, reach_B, lost_B = paired
    rounding_B = ROUNDINGS * torch.finfo(reach_B.dtype).eps * reach_B.square()
    more_B = torch.where(lost_B > _TINY, lost_B, 0.0)
    added_B = more_B * (2 * reach_B + more_B)  # the norm is at most the sum of those of its parts
    doubtful_B = ~((rounding_B + added_B <= TOLERATED * sq_norms_B) & torch.isfinite(sq_norms_B))
    if any_set(doubtful_B):
        measured, reach = measure(doubtful_B)
        sq_norms_B = sq_norms_B.index_put((doubtful_B,), measured.to(sq_norms_B.dtype))
        reach_B = reach_B.index_put((doubtful_B,), reach.to(reach_B.dtype))
        lost_B = torch.where(doubtful_B, 0.0, lost_B)
    return sq_norms_B, reach_B, lost_B


def cancelling_samples(cancels: list[Tensor], measure: Callable[[], Tensor]) -> Tensor | None:
    """Mask (B,) of samples whose parts cancel; None without any. `measure` computes the norms if they were not yet."""
    if not cancels:
        measure()
    return cancels[0] if any_set(cancels[0]) else None


# Marks by which the host decides what is computed next: a norm that lost its digits, parts that cancel, a row that is
# dropped. They are set for few samples in few steps; a host that reads them one by one waits for the device each time.
_Result = TypeVar("_Result")

_LONGEST_PAUSE = 63
_unread: ContextVar[list[tuple[Tensor | None, Tensor]] | None] = ContextVar("dpfunc_unread_marks", default=None)


def any_dropped(factors_B: Tensor) -> bool:
    """True if a factor is 0; the factors of all parameters of a group are one tensor, which is looked at once."""
    unread = _unread.get()
    if unread is None:
        return bool((factors_B == 0).any())
    if not any(factors_B is known for known, _ in unread):
        unread.append((factors_B, factors_B == 0))
    return False


def any_set(marks: Tensor) -> bool:
    """True if a mark (bool) is set. Inside of `ReadTogether`: False, and it is read later."""
    unread = _unread.get()
    if unread is None:
        return bool(marks.any())
    unread.append((None, marks))
    return False


@dataclass
class ReadTogether:
    """Compute as if no mark were set and read all marks once; if one is set, compute again and read each.

    A result is always the one that reading each mark gives, bit for bit. Where marks are set in each step, computing
    twice would cost more than reading: after a failure some steps read each mark, after the next one twice as many.
    """

    pause: int = 1
    left: int = 0

    def __call__(self, compute: Callable[[], _Result]) -> _Result:
        """The result of a function that has no effects, called once or twice."""
        if self.left:
            self.left -= 1
            return compute()
        unread: list[tuple[Tensor | None, Tensor]] = []
        token = _unread.set(unread)
        try:
            result = compute()
        finally:
            _unread.reset(token)
        by_device: dict[torch.device, list[Tensor]] = {}
        for _, marks in unread:
            by_device.setdefault(marks.device, []).append(marks.flatten())
        if not any(bool(torch.cat(each).any()) for each in by_device.values()):  # one read for each device
            self.pause = 1
            return result
        del result  # its memory is needed again
        self.left, self.pause = self.pause, min(2 * self.pause + 1, _LONGEST_PAUSE)
        return compute()


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
