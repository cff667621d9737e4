"""Per-sample gradients as values that know their norms and weighted sums, whether they exist in memory or not.

Axis letters: B samples, T positions, p and d the two sides of a matrix, V rows of a table, P numbers of a parameter.
Norms and sums are float32, float64 for float64 inputs, whatever the dtype of the model, autocast included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from dpfunc.engines import _numerics as numerics
from dpfunc.engines._numerics import matrix, to_accumulation_dtype

# Larger gradients (numbers of all samples) are not copied to be computed with others.
_SMALL = 2**15


class PerSampleGrad(Protocol):
    """The gradients of one parameter for B samples."""

    def dense(self) -> Tensor:
        """Form all gradients in memory: (B, *shape)."""

    def sq_norms(self) -> Tensor:
        """Squared L2 norm of each sample's gradient: (B,)."""

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """`sum_i factors_B[i] * grad_i`; a factor of 0 removes its row, also one that is not finite."""

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

    def sq_norms(self) -> Tensor:
        return numerics.sq_sum(_flat(self.grads_B))

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        factors_B, grads_B = numerics.without_dropped(factors_B, self.grads_B)
        flat_BP = to_accumulation_dtype(_flat(grads_B))
        return (factors_B.to(flat_BP.dtype) @ flat_BP).reshape(grads_B.shape[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grads_B.shape[1:]


class Late(NamedTuple):
    """Factors, smaller than their gradients, which are formed when the activations of the pass are gone."""

    grad: PerSampleGrad


def formed(grad: PerSampleGrad | Late) -> PerSampleGrad:
    """Gradients that were to be formed late are formed."""
    return Dense(grad.grad.dense()) if isinstance(grad, Late) else grad


@dataclass(frozen=True)
class Zeros:
    """The gradients of a parameter that the loss does not use."""

    num_samples: int
    like: Tensor

    def dense(self) -> Tensor:
        return self.weighted_sum(self.like).expand(self.num_samples, *self.like.shape)

    def sq_norms(self) -> Tensor:
        return to_accumulation_dtype(self.like.new_zeros(self.num_samples))

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
    cancels: list[Tensor] = field(default_factory=list, repr=False, compare=False)
    products: list[tuple[Tensor, Tensor]] | None = field(default=None, repr=False, compare=False)

    def dense(self) -> Tensor:
        """B matrix products: 2 B T p d operations."""
        products_Bpd = to_accumulation_dtype(self.a_BTp).transpose(1, 2) @ to_accumulation_dtype(self.b_BTd)
        return products_Bpd.reshape(-1, *self.shape)

    def sq_norms(self) -> Tensor:
        """Measured on the products, or as `sum_{t,u} (a_t . a_u)(b_t . b_u)` where that takes fewer operations.

        The second form, the ghost norm (Bu et al. 2022, Scalable and Efficient Training of Large Convolutional Neural
        Networks with Differential Privacy, section 3), loses its digits where the products cancel: then the first.
        """
        if self.a_BTp.shape[1] == 1:
            return _of_one_product(self.a_BTp[:, 0], self.b_BTd[:, 0])
        a_BTp, b_BTd = to_accumulation_dtype(self.a_BTp), to_accumulation_dtype(self.b_BTd)
        if not matrix(a_BTp.shape[1], a_BTp.shape[2], b_BTd.shape[2]).ghost_pays:
            return numerics.safe_sq_norms(*self._measured(a_BTp, b_BTd), self.cancels)
        sq_norms_B, reach_B, lost_B = numerics.mended_pairs(
            self._ghost(a_BTp, b_BTd),
            lambda doubtful_B: self._measured(a_BTp[doubtful_B].double(), b_BTd[doubtful_B].double()),
        )
        return numerics.safe_sq_norms(sq_norms_B, reach_B, self.cancels, lost_B=lost_B)

    @staticmethod
    def _measured(a_BTp: Tensor, b_BTd: Tensor) -> tuple[Tensor, Tensor]:
        """Squared norms of the formed gradients, and the sums of the norms of all positions."""
        reach_B = (numerics.lengths(a_BTp, 2) * numerics.lengths(b_BTd, 2)).sum(1)

        def form(a: Tensor, b: Tensor) -> tuple[Tensor]:
            return (numerics.sq_sum((a.transpose(1, 2) @ b).flatten(1)),)

        (sq_norms_B,) = numerics.in_pieces(form, a_BTp.shape[2] * b_BTd.shape[2], a_BTp, b_BTd)
        return sq_norms_B, reach_B

    def _ghost(self, a_BTp: Tensor, b_BTd: Tensor) -> tuple[Tensor, ...]:

        def pair(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            a_BTT = self._products_of_a(a) if a is a_BTp else _products(a)
            return numerics.of_pairs(a_BTT, a.shape[2], _products(b), b.shape[2])

        return numerics.in_pieces(pair, a_BTp.shape[1] ** 2, a_BTp, b_BTd)

    def _products_of_a(self, a_BTp: Tensor) -> Tensor:
        """`a a^T` of each sample, or those that a gradient with the same `a` has left; they are taken once."""
        if self.products and self.products[0][0] is self.a_BTp:
            return self.products.pop()[1]
        products_BTT = _products(a_BTp)
        if self.products is not None:
            self.products[:] = [(self.a_BTp, products_BTT)]
        return products_BTT

    def cancelling(self) -> Tensor | None:
        """Mask (B,) of samples whose products cancel; None without any."""
        return None if self.a_BTp.shape[1] == 1 else numerics.cancelling_samples(self.cancels, self.sq_norms)

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """One matrix product over all samples and positions; the narrower side is scaled."""
        cancels_B = self.cancelling()
        if cancels_B is not None:
            easy_B, hard_B = torch.where(cancels_B, 0, factors_B), torch.where(cancels_B, factors_B, 0)
            formed = Dense(replace(self, a_BTp=self.a_BTp[hard_B != 0], b_BTd=self.b_BTd[hard_B != 0]).dense())
            rest = replace(self, cancels=[torch.zeros_like(cancels_B)])
            return rest.weighted_sum(easy_B) + formed.weighted_sum(hard_B[hard_B != 0])
        factors_B, a_BTp, b_BTd = numerics.without_dropped(
            factors_B, to_accumulation_dtype(self.a_BTp), to_accumulation_dtype(self.b_BTd)
        )
        scale_B11 = factors_B.to(a_BTp.dtype)[:, None, None]
        a_BTp, b_BTd = (a_BTp * scale_B11, b_BTd) if a_BTp.shape[2] <= b_BTd.shape[2] else (a_BTp, b_BTd * scale_B11)
        larger = a_BTp if a_BTp.shape[2] >= b_BTd.shape[2] else b_BTd
        if larger.stride(0) < larger.stride(1):  # (T, B, d) in memory: it is not copied
            a_BTp, b_BTd = a_BTp.transpose(0, 1), b_BTd.transpose(0, 1)
        return (a_BTp.flatten(0, 1).T @ b_BTd.flatten(0, 1)).reshape(self.shape)


def _of_one_product(a_Bp: Tensor, b_Bd: Tensor) -> Tensor:
    """Squared norms `|a|^2 |b|^2` of products of two vectors, in float64: no square is lost, and nothing cancels."""
    norms_B: Tensor = torch.linalg.vector_norm(a_Bp, dim=1, dtype=torch.float64)
    norms_B = norms_B * torch.linalg.vector_norm(b_Bd, dim=1, dtype=torch.float64)
    dtype = numerics.accumulation_dtype(a_Bp.dtype)
    return (norms_B * (1 + numerics.ROUNDINGS * torch.finfo(dtype).eps)).square().to(dtype)


def _products(a_BTp: Tensor) -> Tensor:
    """`a_t . a_u` of all pairs of positions of each sample."""
    return a_BTp @ a_BTp.transpose(1, 2)


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
    cancels: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def _rows(self) -> Tensor:
        """In float64 where so many equal rows may be added one by one that float32 would drift."""
        return self.g_BTd.double() if self.ids_BT.shape[1] > numerics.LONG else to_accumulation_dtype(self.g_BTd)

    def dense(self) -> Tensor:
        """Add the rows of each sample into a table of its own: (B, V, ...)."""
        tables_BVd = _added_up(to_accumulation_dtype(self.g_BTd), self.ids_BT, self.shape[0])
        return tables_BVd.reshape(-1, *self.shape)

    def _merged(self) -> tuple[Tensor, Tensor]:
        """The same numbers with equal ids added into one slot; slots that are not needed have some id, and zeros."""
        g_BTd = self._rows()
        sorted_BT, order_BT = self.ids_BT.sort(dim=1)
        starts_BT = torch.cat([sorted_BT.new_zeros(len(sorted_BT), 1), (sorted_BT.diff(dim=1) != 0).long()], dim=1)
        slots_BT = torch.zeros_like(self.ids_BT).scatter(1, order_BT, starts_BT.cumsum(1))
        ids_BT = self.ids_BT[:, :1].expand_as(self.ids_BT).scatter(1, slots_BT, self.ids_BT)
        return ids_BT, _added_up(g_BTd, slots_BT, slots_BT.shape[1])

    def sq_norms(self) -> Tensor:
        """Squared norms after rows of the same id are added up."""
        if not self.ids_BT.numel():
            return to_accumulation_dtype(self.g_BTd.new_zeros(len(self.g_BTd)))
        reach_B = numerics.lengths(self.g_BTd, 2).sum(1)
        sq_norms_B = numerics.sq_sum(self._merged()[1].flatten(1)).to(reach_B.dtype)
        return numerics.safe_sq_norms(sq_norms_B, reach_B, self.cancels, additions=self.ids_BT.shape[1])

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """One addition of rows into a table; where rows of a sample cancel, they are added up before."""
        ids_BT, g_BTd = self.ids_BT, self._rows()
        if self.ids_BT.numel() and numerics.cancelling_samples(self.cancels, self.sq_norms) is not None:
            ids_BT, g_BTd = self._merged()
        factors_B, ids_BT, g_BTd = numerics.without_dropped(factors_B, ids_BT, g_BTd)
        scaled_BTd = g_BTd * factors_B.to(g_BTd.dtype)[:, None, None]
        table_Vd = scaled_BTd.new_zeros(self.shape[0], scaled_BTd.shape[2])
        table_Vd = table_Vd.index_add_(0, ids_BT.flatten(), scaled_BTd.flatten(0, 1)).reshape(self.shape)
        return table_Vd.to(numerics.accumulation_dtype(self.g_BTd.dtype))


@dataclass(frozen=True)
class Tied:
    """A table that is also a matrix: `Gather + Outer`, e.g. a tied embedding and head. The cross term is exact."""

    gather: Gather
    outer: Outer
    cancels: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def dense(self) -> Tensor:
        return self.gather.dense() + self.outer.dense()

    def sq_norms(self) -> Tensor:
        """`|G|^2 + |O|^2 + 2 <G, O>`, where `<G, O> = sum_{t,s} a[s, id_t] (b_s . g_t)`."""
        g_BTd, a_BSV, b_BSd = (
            to_accumulation_dtype(self.gather.g_BTd),
            to_accumulation_dtype(self.outer.a_BTp),
            to_accumulation_dtype(self.outer.b_BTd),
        )
        ids_BST = self.gather.ids_BT[:, None, :].expand(-1, a_BSV.shape[1], -1)
        cross_B = (a_BSV.gather(2, ids_BST) * (b_BSd @ g_BTd.transpose(1, 2))).sum((1, 2))
        gather_B, outer_B = self.gather.sq_norms(), self.outer.sq_norms()
        parts_B, total_B = (gather_B.sqrt() + outer_B.sqrt()).square(), gather_B + outer_B + 2 * cross_B
        rounding_B = numerics.ROUNDINGS * torch.finfo(total_B.dtype).eps * parts_B * math.sqrt(max(1, ids_BST.shape[1]))
        doubtful_B = ~(rounding_B <= numerics.TOLERATED * total_B)
        safe_B = torch.where(doubtful_B, total_B.clamp(min=0.0) + rounding_B, total_B)
        return numerics.safe_sq_norms(safe_B, parts_B.sqrt(), self.cancels)

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """Sum of both parts; gradients of samples in which the parts cancel are formed first."""
        cancels_B = numerics.cancelling_samples(self.cancels, self.sq_norms)
        if cancels_B is not None:
            easy_B, hard_B = torch.where(cancels_B, 0, factors_B), torch.where(cancels_B, factors_B, 0)
            return self._sum(easy_B) + Dense(self.dense()).weighted_sum(hard_B)
        return self._sum(factors_B)

    def _sum(self, factors_B: Tensor) -> Tensor:
        return self.gather.weighted_sum(factors_B) + self.outer.weighted_sum(factors_B)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.gather.shape


def add(uses: Sequence[PerSampleGrad]) -> PerSampleGrad:
    """The gradient of a parameter that is used several times, exact in norm as well; uses of a kind are joined."""
    if len(uses) == 1:
        return uses[0]
    outers = [use for use in uses if isinstance(use, Outer)]
    gathers = [use for use in uses if isinstance(use, Gather)]
    if len(outers) + len(gathers) < len(uses):
        return Dense(torch.stack([use.dense() for use in uses]).sum(0))
    if not gathers:
        return _joined_outer(outers)
    if not outers:
        return _joined_gather(gathers)
    return Tied(_joined_gather(gathers), _joined_outer(outers))


def _joined_gather(uses: Sequence[Gather]) -> Gather:
    return Gather(torch.cat([use.ids_BT for use in uses], 1), torch.cat([use.g_BTd for use in uses], 1), uses[0].shape)


def _joined_outer(uses: Sequence[Outer]) -> Outer:
    return Outer(torch.cat([use.a_BTp for use in uses], 1), torch.cat([use.b_BTd for use in uses], 1), uses[0].shape)


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
        if len(self.grads) == 1:
            return self.grads[0]
        outers = [grad for grad in self.grads if isinstance(grad, Outer)]
        if not outers:
            return Dense(torch.cat([grad.dense() for grad in self.grads]))
        a, b = torch.cat([each.a_BTp for each in outers]), torch.cat([each.b_BTd for each in outers])
        return Outer(a, b, outers[0].shape)

    def sq_norms(self) -> dict[str, Tensor]:
        norms_NB = self.joined.sq_norms().chunk(len(self.names))
        return dict(zip(self.names, norms_NB, strict=True))

    def weighted_sums(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = [factors[name] for name in self.names]
        sums = self._together(own) if len(own) > 1 else None
        if sums is None:
            sums = [grad.weighted_sum(factors_B) for grad, factors_B in zip(self.grads, own, strict=True)]
        return dict(zip(self.names, sums, strict=True))

    def _together(self, factors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Sums of all parameters by one product; None where samples are dropped, or have parts that cancel."""
        same = all(factors_B is factors[0] for factors_B in factors)
        factors_NB = factors[0][None] if same else torch.stack(tuple(factors))
        if numerics.any_dropped(factors[0] if same else factors_NB):
            return None
        if isinstance(self.joined, Outer):
            if self.joined.cancelling() is not None:
                return None
            return _outer_sums(self.joined, factors_NB, len(self.names))
        formed = to_accumulation_dtype(self.joined.dense())
        grads_NBP = formed.reshape(len(self.names), len(formed) // len(self.names), -1)
        sums_NP = (factors_NB.to(formed.dtype)[:, None] @ grads_NBP)[:, 0]
        sums: Sequence[Tensor] = sums_NP.reshape(len(self.names), *formed.shape[1:]).unbind(0)
        return sums


def _outer_sums(outer: Outer, factors_NB: Tensor, number: int) -> Sequence[Tensor]:
    a, b = (to_accumulation_dtype(side) for side in (outer.a_BTp, outer.b_BTd))
    a_NBTp, b_NBTd = (side.reshape(number, -1, *side.shape[1:]) for side in (a, b))
    scale_NB11 = factors_NB.to(a.dtype)[..., None, None]
    scaled = (a_NBTp * scale_NB11, b_NBTd) if a.shape[2] <= b.shape[2] else (a_NBTp, b_NBTd * scale_NB11)
    a_NBp, b_NBd = (side.flatten(1, 2) for side in scaled)
    return (a_NBp.transpose(1, 2) @ b_NBd).reshape(number, *outer.shape).unbind(0)


def _key(grad: PerSampleGrad) -> object:
    """Key of gradients that can be stacked; None for those that stay alone."""
    if type(grad) is Outer and grad.a_BTp.numel() + grad.b_BTd.numel() <= _SMALL:
        a, b = grad.a_BTp, grad.b_BTd
        return (Outer, grad.shape, a.shape, b.shape, a.dtype, b.dtype, a.device)
    if type(grad) is Dense and 0 < grad.grads_B.numel() <= _SMALL:
        return (Dense, grad.grads_B.shape, grad.grads_B.dtype, grad.grads_B.device)
    return None


@dataclass(frozen=True)
class PerSample:
    """The gradients of all parameters for B samples."""

    losses_B: Tensor
    grads: Mapping[str, PerSampleGrad]
    alone: bool = False
    aux: Any = None
    repeatable: ClassVar[bool] = True

    @cached_property
    def _stacks(self) -> list[_Stack]:
        """All gradients, small ones of equal shapes as one; large ones first: a sum takes memory while it is made."""
        together: dict[object, list[str]] = {}
        for name, grad in self.grads.items():
            together.setdefault(_key(grad) or name, []).append(name)
        stacks = [_Stack(names, [self.grads[name] for name in names]) for names in together.values()]
        return sorted(stacks, key=lambda stack: math.prod(stack.grads[0].shape), reverse=True)

    def sq_norms(self) -> dict[str, Tensor]:
        with numerics.exact(self.losses_B.device):
            found = {name: norms_B for stack in self._stacks for name, norms_B in stack.sq_norms().items()}
        return {name: found[name] for name in self.grads}

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with numerics.exact(self.losses_B.device):
            found = {name: total for stack in self._stacks for name, total in stack.weighted_sums(factors).items()}
        return {name: found[name] for name in self.grads}


@dataclass
class Kept:
    """Gradients of one pass, formed or as factors, until all uses of each parameter are there."""

    counts: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[PerSampleGrad | Late]] = field(default_factory=dict)

    def take(self, name: str, grad: PerSampleGrad | Late) -> None:
        """Take the gradients of one use of a parameter, in the backward pass."""
        self.pieces.setdefault(name, []).append(grad)

    def take_formed(self, grads: Mapping[str, Tensor]) -> None:
        """Take gradients (B, *shape), by name."""
        for name, grads_B in grads.items():
            self.pieces.setdefault(name, []).append(Dense(grads_B))

    def joined(self, name: str, param: Tensor, num_samples: int) -> PerSampleGrad:
        """All of the gradient of a parameter; the pieces are given away."""
        pieces = self.pieces.pop(name, [])
        pieces.reverse()
        found: list[PerSampleGrad] = []
        while pieces:
            found.append(formed(pieces.pop()))  # one after the other: factors are freed
        return add(found) if found else Zeros(num_samples, param)
