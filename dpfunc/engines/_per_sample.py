"""Per-sample gradients as values that know their norms and weighted sums, whether they exist in memory or not.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Axis letters: B samples, T positions, p and d the two sides of a matrix, V rows of a table, P numbers of a parameter.
Norms and sums are float32, float64 for float64 inputs, whatever the dtype of the model, autocast included.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from dpfunc.engines import _numerics as numerics
from dpfunc.engines._numerics import Measured, matrix_cost, to_accumulation_dtype

# Larger gradients (numbers of all samples) are not copied to be computed with others.
_SMALL = 2**15


class PerSampleGrad(Protocol):
    """The gradients of one parameter for B samples."""

    def dense(self) -> Tensor:
        """Form all gradients in memory: (B, *shape)."""

    def measure(self) -> Measured:
        """Norm of each sample's gradient, and its rounding."""

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """`sum_i factors_B[i] * grad_i`, of rows that are finite and have no parts that cancel; see `PerSample`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""


def _flat(grads_B: Tensor) -> Tensor:  # (B,) is (B, 1): a parameter may be a number
    return grads_B.reshape(len(grads_B), math.prod(grads_B.shape[1:]))


@dataclass(frozen=True)
class Dense:
    """B gradients in memory: (B, *shape)."""

    grads_B: Tensor

    def dense(self) -> Tensor:
        return self.grads_B

    def measure(self) -> Measured:
        return Measured(numerics.norms_of_rows(_flat(self.grads_B)))

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        flat_BP = to_accumulation_dtype(_flat(self.grads_B))
        return torch.mv(flat_BP.T, factors_B.to(flat_BP.dtype)).reshape(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grads_B.shape[1:]


_Kind = TypeVar("_Kind", bound=PerSampleGrad)


class DeferredGrad(NamedTuple):
    """Gradients kept as smaller factors; they are formed after the pass has freed its activations."""

    grad: PerSampleGrad


def formed(grad: PerSampleGrad | DeferredGrad) -> PerSampleGrad:
    """The gradients, formed if they were deferred."""
    return Dense(grad.grad.dense()) if isinstance(grad, DeferredGrad) else grad


@dataclass(frozen=True)
class Zeros:
    """The gradients of a parameter that the loss does not use."""

    num_samples: int
    like: Tensor

    def dense(self) -> Tensor:
        return self.weighted_sum(self.like).expand(self.num_samples, *self.like.shape)

    def measure(self) -> Measured:
        return Measured(to_accumulation_dtype(self.like.new_zeros(self.num_samples)))

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        return torch.zeros_like(self.like, dtype=numerics.accumulation_dtype(self.like.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.like.shape


@dataclass(frozen=True)
class Outer:
    """`grad_i = sum_t a[i, t] b[i, t]^T`, reshaped to `shape`: the gradients of a matrix applied at T positions."""

    a_BTp: Tensor
    b_BTd: Tensor
    shape: tuple[int, ...]

    def dense(self) -> Tensor:
        """B matrix products: 2 B T p d operations."""
        a_BTp, b_BTd = to_accumulation_dtype(self.a_BTp), to_accumulation_dtype(self.b_BTd)
        return torch.bmm(a_BTp.transpose(1, 2), b_BTd).reshape(len(a_BTp), *self.shape)

    @property
    def norm_key(self) -> object:
        """Key of those whose norms are measured together; None where the gradients are formed for the norm.

        The norm of a product of two vectors is that of the vectors. That of a sum of products, `sum_{t,u} (a_t . a_u)
        (b_t . b_u)`, takes fewer operations than the gradient where there are few positions: the ghost norm (Bu et al.
        2022, Scalable and Efficient Training of Large Convolutional Neural Networks with Differential Privacy,
        section 3).
        """
        _, positions, p = self.a_BTp.shape
        pays = positions == 1 or matrix_cost(positions, p, self.b_BTd.shape[2]).ghost_pays
        return (positions, numerics.accumulation_dtype(self.a_BTp.dtype), self.a_BTp.device) if pays else None

    def measure(self) -> Measured:
        if self.norm_key is not None:
            return measured_together([self])
        a_BTp, b_BTd = to_accumulation_dtype(self.a_BTp), to_accumulation_dtype(self.b_BTd)
        found = list[Measured]()
        for a, b in numerics.in_pieces(a_BTp.shape[2] * b_BTd.shape[2], a_BTp, b_BTd):
            norms_B = numerics.norms_of_rows(torch.bmm(a.transpose(1, 2), b).flatten(1))
            found.append(numerics.of_parts(norms_B, (numerics.lengths(a, 2) * numerics.lengths(b, 2)).sum(1)))
        return numerics.concatenated(found)

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """One matrix product over all samples and positions; the narrower side is scaled."""
        a_BTp, b_BTd = to_accumulation_dtype(self.a_BTp), to_accumulation_dtype(self.b_BTd)
        scale_B11 = factors_B.to(a_BTp.dtype)[:, None, None]
        a_BTp, b_BTd = (a_BTp * scale_B11, b_BTd) if a_BTp.shape[2] <= b_BTd.shape[2] else (a_BTp, b_BTd * scale_B11)
        larger = a_BTp if a_BTp.shape[2] >= b_BTd.shape[2] else b_BTd
        if larger.stride(0) < larger.stride(1):  # (T, B, d) in memory: it is not copied
            a_BTp, b_BTd = a_BTp.transpose(0, 1), b_BTd.transpose(0, 1)
        return (a_BTp.flatten(0, 1).T @ b_BTd.flatten(0, 1)).reshape(self.shape)


def measured_together(uses: Sequence[Outer]) -> Measured:
    """Norms of uses of one `norm_key`, those of one use after the other, by few operations whatever their number."""
    positions = uses[0].a_BTp.shape[1]
    if positions == 1:  # in float64: no square is lost, and nothing cancels
        sides = [*(use.a_BTp for use in uses), *(use.b_BTd for use in uses)]
        each = torch.cat([torch.linalg.vector_norm(side, dim=(1, 2), dtype=torch.float64) for side in sides])
        return Measured(each.unflatten(0, (2, -1)).prod(0).to(numerics.accumulation_dtype(sides[0].dtype)))
    size, found = max(1, numerics.SCRATCH // max(1, positions**2)), list[Measured]()
    numbers = max(max(use.a_BTp.shape[2], use.b_BTd.shape[2]) for use in uses)
    pieces = [pair for use in uses for pair in zip(use.a_BTp.split(size), use.b_BTd.split(size), strict=True)]
    while pieces:
        fitting = sum(end <= size for end in accumulate(len(a) for a, _ in pieces))
        of_a, of_b = (_pairs(own) for own in zip(*pieces[:fitting], strict=True))
        found.append(numerics.of_pairs(of_a, of_b, numbers))
        del pieces[:fitting]
    return numerics.concatenated(found)


def _pairs(sides: Sequence[Tensor]) -> Tensor:
    """`a_t . a_u` of all pairs of positions of all samples; those of a side of several uses are copied."""
    samples, positions = [len(side) for side in sides], sides[0].shape[1]
    dtype, known = numerics.accumulation_dtype(sides[0].dtype), dict[object, Tensor]()
    pairs_BTT = sides[0].new_empty(sum(samples), positions, positions, dtype=dtype)
    for side, out in zip(sides, pairs_BTT.split(samples), strict=True):
        key = (side.data_ptr(), side.shape, side.stride(), side.dtype)
        if key in known:
            out.copy_(known[key])
        else:
            values = to_accumulation_dtype(side)
            known[key] = torch.bmm(values, values.transpose(1, 2), out=out)
    return pairs_BTT


def _added_up(g_BTd: Tensor, slots_BT: Tensor, count: int) -> Tensor:
    """The rows of each sample, added into its slots: (B, count, d). A tenth of the time of `scatter_add`."""
    size, _, width = g_BTd.shape
    all_slots_BT = slots_BT + count * torch.arange(size, device=slots_BT.device)[:, None]
    sums_d = g_BTd.new_zeros(size * count, width).index_add_(0, all_slots_BT.flatten(), g_BTd.flatten(0, 1))
    return sums_d.reshape(size, count, width)


@dataclass(frozen=True)
class Gather:
    """`grad_i = sum_t e_{ids[i, t]} g[i, t]^T`: the gradients of a table of V rows. Look-ups of the same row add up."""

    ids_BT: Tensor
    g_BTd: Tensor
    shape: tuple[int, ...]

    def dense(self) -> Tensor:
        """Add the rows of each sample into a table of its own: (B, V, ...)."""
        tables_BVd = _added_up(to_accumulation_dtype(self.g_BTd), self.ids_BT, self.shape[0])
        return tables_BVd.reshape(len(tables_BVd), *self.shape)

    @cached_property
    def distinct(self) -> tuple[Tensor, Tensor]:
        """Ids and rows, those of equal ids of a sample added into the first of their places; the others have zeros.

        So no parts are left that cancel. In float64 where float32 would drift, since so many may be added one by one.
        """
        sorted_BT, rows_BTd = self.ids_BT.sort(dim=1).values, to_accumulation_dtype(self.g_BTd)
        places_BT = torch.searchsorted(sorted_BT, self.ids_BT.contiguous())
        wide_BTd = rows_BTd.double() if sorted_BT.shape[1] > numerics.LONG else rows_BTd
        return sorted_BT, _added_up(wide_BTd, places_BT, sorted_BT.shape[1]).to(rows_BTd)

    def measure(self) -> Measured:
        return Measured(numerics.norms_of_rows(self.distinct[1].flatten(1)), numerics.lengths(self.g_BTd, 2).sum(1))

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """One addition of rows into a table."""
        ids_BT, rows_BTd = self.distinct
        scaled_BTd = rows_BTd * factors_B.to(rows_BTd.dtype)[:, None, None]
        table_Vd = scaled_BTd.new_zeros(self.shape[0], scaled_BTd.shape[2])
        return table_Vd.index_add_(0, ids_BT.flatten(), scaled_BTd.flatten(0, 1)).reshape(self.shape)


@dataclass(frozen=True)
class Tied:
    """A table that is also a matrix: `Gather + Outer`, e.g. a tied embedding and head. The cross term is exact."""

    gather: Gather
    outer: Outer

    def dense(self) -> Tensor:
        return self.gather.dense() + self.outer.dense()

    def measure(self, of_matrix: Measured | None = None) -> Measured:
        """`|G|^2 + |O|^2 + 2 <G, O>`, where `<G, O> = sum_{t,s} a[s, id_t] (b_s . g_t)`."""
        a_BSV, b_BSd = to_accumulation_dtype(self.outer.a_BTp), to_accumulation_dtype(self.outer.b_BTd)
        ids_BT, g_BTd = self.gather.distinct
        ids_BST = ids_BT[:, None, :].expand(-1, a_BSV.shape[1], -1)
        cross_B = (a_BSV.gather(2, ids_BST) * torch.bmm(b_BSd, g_BTd.transpose(1, 2))).sum((1, 2))
        of_table, of_matrix = self.gather.measure(), of_matrix or self.outer.measure()
        norms_B = (of_table.norms_B.square() + of_matrix.norms_B.square() + 2 * cross_B).clamp(min=0.0).sqrt()
        off = numerics.ROUNDINGS * torch.finfo(cross_B.dtype).eps * math.sqrt(max(1, ids_BST.shape[1]))
        least_B = (of_table.norms_B + of_matrix.norms_B) * math.sqrt(off / numerics.TOLERATED)
        least_B = least_B if of_matrix.least_B is None else least_B + of_matrix.least_B
        return Measured(norms_B, of_table.parts_B + of_matrix.parts_B, least_B, of_matrix.lost_B)

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        return self.gather.weighted_sum(factors_B) + self.outer.weighted_sum(factors_B)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.gather.shape


def add(uses: Sequence[PerSampleGrad]) -> PerSampleGrad:
    """The gradient of a parameter that is used several times, exact in norm as well; uses of a kind are joined."""
    kinds = {type(use) for use in uses}
    if len(uses) == 1:
        return uses[0]
    if not kinds <= {Gather, Outer}:
        return Dense(torch.stack([use.dense() for use in uses]).sum(0))
    if len(kinds) == 1:
        return _joined(uses, 1)
    gathers = [use for use in uses if isinstance(use, Gather)]
    return Tied(_joined(gathers, 1), _joined([use for use in uses if isinstance(use, Outer)], 1))


def _joined(uses: Sequence[_Kind], axis: int) -> _Kind:
    """Gradients of one kind as one: of all samples (axis 0), or of all positions of each (1)."""
    names = [name for name, value in vars(uses[0]).items() if isinstance(value, Tensor)]
    cat = {name: torch.cat([vars(use)[name] for use in uses], axis) for name in names}
    return replace(uses[0], **cat)  # type: ignore[type-var]  # representations are dataclasses


def _with_tensors(grad: _Kind, change: Callable[[Tensor], Tensor]) -> _Kind:
    """The same with each of its tensors changed: rows taken, made wider."""
    parts = {name: value for name, value in vars(grad).items() if isinstance(value, (Tensor, Gather, Outer))}
    new = {name: change(v) if isinstance(v, Tensor) else _with_tensors(v, change) for name, v in parts.items()}
    return replace(grad, **new)  # type: ignore[type-var]  # representations are dataclasses


@dataclass(frozen=True)
class _Stack:
    """Gradients of some parameters, as one: those of B samples of the first, then of the second, and so on.

    Small gradients of equal shapes are measured and summed by one torch call for all: a call takes microseconds
    whatever it computes, a copy of few numbers less.
    """

    names: Sequence[str]
    grads: Sequence[PerSampleGrad]

    @cached_property
    def joined(self) -> PerSampleGrad:
        """All gradients as one; that of the only parameter where there is one."""
        return self.grads[0] if len(self.grads) == 1 else _joined(self.grads, 0)

    def weighted_sums(self, factors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sums of all parameters, by one product."""
        if len(self.grads) == 1:
            return [self.grads[0].weighted_sum(factors[0])]
        same = all(factors_B is factors[0] for factors_B in factors)
        factors_NB = factors[0].expand(len(factors), -1) if same else torch.stack(tuple(factors))
        if isinstance(self.joined, Outer):
            return _outer_sums(self.joined, factors_NB)
        formed_NBP = to_accumulation_dtype(self.joined.dense()).reshape(*factors_NB.shape, -1)
        sums_NP = torch.bmm(factors_NB.to(formed_NBP.dtype)[:, None], formed_NBP)
        return sums_NP.reshape(len(factors), *self.joined.shape).unbind(0)


def _outer_sums(outer: Outer, factors_NB: Tensor) -> Sequence[Tensor]:
    a, b = (to_accumulation_dtype(side) for side in (outer.a_BTp, outer.b_BTd))
    a_NBTp, b_NBTd = (side.reshape(*factors_NB.shape, *side.shape[1:]) for side in (a, b))
    scale_NB11 = factors_NB.to(a.dtype)[..., None, None]
    scaled = (a_NBTp * scale_NB11, b_NBTd) if a.shape[2] <= b.shape[2] else (a_NBTp, b_NBTd * scale_NB11)
    a_NBp, b_NBd = (side.flatten(1, 2) for side in scaled)
    return torch.bmm(a_NBp.transpose(1, 2), b_NBd).reshape(len(factors_NB), *outer.shape).unbind(0)


def _stack_key(grad: PerSampleGrad) -> object:
    """Key of gradients that can be stacked; None for those that are not stacked."""
    tensors = [value for value in vars(grad).values() if isinstance(value, Tensor)]
    if type(grad) not in (Outer, Dense) or not 0 < sum(value.numel() for value in tensors) <= _SMALL:
        return None
    return (type(grad), grad.shape, *((value.shape, value.dtype, value.device) for value in tensors))


def _norm_key(grad: PerSampleGrad) -> object:
    """Key of gradients that are measured together; None for those that are measured one at a time."""
    outer = grad.outer if isinstance(grad, Tied) else grad
    return outer.norm_key if isinstance(outer, Outer) else None


def _measure_stacks(grads: Sequence[PerSampleGrad]) -> list[Measured]:
    """Norms of gradients that are measured together."""
    if len(grads) == 1:
        return [grads[0].measure()]
    outers = [grad.outer if isinstance(grad, Tied) else grad for grad in grads]
    found = measured_together([outer for outer in outers if isinstance(outer, Outer)])
    if not any(isinstance(grad, Tied) for grad in grads):
        return [found]
    sizes = [len(outer.a_BTp) for outer in outers if isinstance(outer, Outer)]
    each = [Measured(*own) for own in zip(*(value.split(sizes) for value in found if value is not None), strict=True)]
    return [grad.measure(own) if isinstance(grad, Tied) else own for grad, own in zip(grads, each, strict=True)]


def _in_float64(grad: PerSampleGrad, rows: Tensor) -> PerSampleGrad:
    """Some samples, in float64."""
    return _with_tensors(grad, lambda values: values[rows].double() if values.is_floating_point() else values[rows])


def _measure_again(grad: PerSampleGrad, squares_B: Tensor, enough_B: Tensor, eps: float) -> Tensor:
    """Measure samples that have too few digits again, in float64; the mask of those whose parts cancel."""
    rows, cancels_B = (~enough_B).nonzero()[:, 0], torch.zeros_like(enough_B)
    if len(rows):
        squares, cancels = numerics.squares_of_float64(_in_float64(grad, rows).measure(), eps)
        squares_B[rows], cancels_B[rows] = squares.to(squares_B.dtype), cancels
    return cancels_B


def _careful_sum(grad: PerSampleGrad, factors_B: Tensor, cancels_B: Tensor) -> Tensor:
    """The sum without rows whose factor is 0, since 0 * inf is NaN; parts that cancel are added up sample by sample."""
    if isinstance(grad, Zeros):
        return grad.weighted_sum(factors_B)
    easy, hard = (((factors_B != 0) & mask_B).nonzero()[:, 0] for mask_B in (~cancels_B, cancels_B))
    total = _with_tensors(grad, lambda values: values[easy]).weighted_sum(factors_B[easy])
    for rows in hard.split(max(1, numerics.SCRATCH // max(1, math.prod(grad.shape)))) if len(hard) else ():
        formed = Dense(_in_float64(grad, rows).dense().to(total.dtype))
        total = total + formed.weighted_sum(factors_B[rows])
    return total


class _MeasuredNorms(NamedTuple):
    """Stacks in the order of measurement, with the names and squared norms of all their parameters, and the
    mask of the norms that are finite and have enough digits."""

    stacks: Sequence[_Stack]
    names: Sequence[str]
    squares: Tensor
    enough: Tensor
    eps: float


@dataclass(frozen=True)
class PerSample:
    """The gradients of all parameters for B samples.

    One mark is all that the host reads. It is set if a norm has too few digits, or is not finite. Only then are such
    samples measured again, in float64, and the sums taken with care. A norm without the mark is right within
    `TOLERATED`, and its gradient has no parts that cancel, whatever the other samples are: which way a batch takes
    changes results by rounding only, and the bound holds both ways.

    Args:
        needs_audit: false where each row was computed alone.
        late: results are as if the mark were not set; who gets them reads `is_marked` before they are used.
    """

    losses_B: Tensor
    grads: Mapping[str, PerSampleGrad]
    needs_audit: bool = True
    aux: Any = None
    late: bool = False
    _memo: list[_MeasuredNorms] = field(default_factory=list, repr=False, compare=False)
    repeatable: ClassVar[bool] = True  # weighted sums can be taken more than once

    @cached_property
    def _stacks(self) -> list[_Stack]:
        """All gradients, small ones of equal shapes as one; large ones first: a sum takes memory while it is made."""
        together: dict[object, list[str]] = {}
        for name, grad in self.grads.items():
            together.setdefault(_stack_key(grad) or name, []).append(name)
        stacks = [_Stack(names, [self.grads[name] for name in names]) for names in together.values()]
        return sorted(stacks, key=lambda stack: math.prod(stack.grads[0].shape), reverse=True)

    def _measured_norms(self) -> _MeasuredNorms:
        """Norms of all parameters, by few operations, without a read."""
        if not self._memo:
            together: dict[object, list[_Stack]] = {}
            for stack in self._stacks:
                together.setdefault(_norm_key(stack.joined) or stack.names[0], []).append(stack)
            several = (_measure_stacks([stack.joined for stack in stacks]) for stacks in together.values())
            found = [each for own in several for each in own]
            stacks = [stack for own in together.values() for stack in own]
            names = [name for stack in stacks for name in stack.names]
            eps = max(torch.finfo(each.norms_B.dtype).eps for each in found)
            self._memo.append(_MeasuredNorms(stacks, names, *numerics.squares_to_clip(found), eps))
        return self._memo[0]

    def unmarked(self) -> "PerSample":
        """The same as if the mark were not set."""
        return replace(self, late=True)

    @property
    def no_mark(self) -> Tensor:
        """False if some number needs the careful computation."""
        return self._measured_norms().enough.all()

    @cached_property
    def is_marked(self) -> bool:
        """Read the mark: True if some number needs the careful computation."""
        return not bool(self.no_mark)

    @cached_property
    def _norms(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Squared norms, and masks of samples whose parts cancel; no masks where all sums are taken as they are."""
        stacks, names, squares, enough, eps = self._measured_norms()
        shape, cancels = (len(names), len(squares) // len(names)), enough[:0]
        if not self.late and self.is_marked:
            sizes = [shape[1] * len(stack.names) for stack in stacks]
            parts = zip(stacks, squares.split(sizes), enough.split(sizes), strict=True)
            masks = torch.cat([_measure_again(stack.joined, own, mask, eps) for stack, own, mask in parts])
            cancels = masks if bool((masks | ~torch.isfinite(squares)).any()) else cancels
        by_name = dict(zip(names, squares.reshape(shape).unbind(0), strict=True))
        return by_name, dict(zip(names, cancels.reshape(shape).unbind(0), strict=True)) if len(cancels) else {}

    def sq_norms(self) -> dict[str, Tensor]:
        with numerics.exact(self.losses_B.device), torch.no_grad():
            return {name: self._norms[0][name] for name in self.grads}

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums by name; a factor of 0 removes its row, also one that is not finite."""
        found: dict[str, Tensor] = {}
        with numerics.exact(self.losses_B.device), torch.no_grad():
            cancels = self._norms[1]
            for stack in self._stacks:
                own = [factors[name] for name in stack.names]
                if cancels:
                    each = zip(stack.names, stack.grads, own, strict=True)
                    found |= {name: _careful_sum(grad, factors_B, cancels[name]) for name, grad, factors_B in each}
                else:
                    found.update(zip(stack.names, stack.weighted_sums(own), strict=True))
        return {name: found[name] for name in self.grads}


@dataclass
class Kept:
    """Gradients of one pass, formed or as factors, until all uses of each parameter are there."""

    counts: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[PerSampleGrad | DeferredGrad]] = field(default_factory=dict)

    def take(self, name: str, grad: PerSampleGrad | DeferredGrad) -> None:
        """Take the gradients of one use of a parameter, in the backward pass."""
        self.pieces.setdefault(name, []).append(grad)

    def take_formed(self, grads: Mapping[str, Tensor]) -> None:
        """Take gradients (B, *shape), by name."""
        for name, grads_B in grads.items():
            self.pieces.setdefault(name, []).append(Dense(grads_B))

    def joined(self, name: str, param: Tensor, num_samples: int) -> PerSampleGrad:
        """The whole gradient of a parameter; its pieces are removed from this object."""
        pieces = self.pieces.pop(name, [])
        pieces.reverse()
        found: list[PerSampleGrad] = []
        while pieces:
            found.append(formed(pieces.pop()))  # one after the other: factors are freed
        return add(found) if found else Zeros(num_samples, param)
