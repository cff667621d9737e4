"""Norms first, sums in a second pass: no per-sample gradient is kept. Least memory, twice the time (ghost clipping).

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Li et al. 2022, Large Language Models Can Be Strong Differentially Private Learners, section 4.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dpfunc.engines import _numerics as numerics
from dpfunc.engines._levels import PassResult
from dpfunc.engines._per_sample import DeferredGrad, Kept, PerSample, PerSampleGrad, formed
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Params


class SwappedParameters(Protocol):
    """Tensors that replace the parameters of a module which swaps its parameters itself (`fully_shard`)."""

    def leaves(self, params: Params) -> dict[str, Tensor]:
        """The tensors that stand for these parameters, by name."""

    def reduced(self, name: str, total: Tensor) -> Tensor:
        """The part of the weighted sum of a parameter that this process keeps; may communicate."""


_NO_LOSSES = torch.empty(0, device="cpu")  # of the gradients of one parameter, inside of a pass


@dataclass
class Measured(Kept):
    """Norms of the gradients of one pass. A gradient that comes in one piece is dropped when it is measured.

    As in `PerSample`, one mark is all that the host reads. Where it is set, another pass measures with care: each
    gradient has a mark of its own, and is mended while it is there.
    """

    together: Set[str] = frozenset()
    careful: bool = False
    found: dict[str, numerics.Measured] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    sq_norms: dict[str, Tensor] = field(default_factory=dict)
    marked: set[str] = field(default_factory=set)

    def single(self, name: str) -> bool:
        """True if all of the gradient of a parameter comes from one use."""
        return self.counts.get(name) == 1 and name not in self.together

    def take(self, name: str, grad: PerSampleGrad | DeferredGrad) -> None:
        """Measure a gradient, or keep it for the others of the same parameter."""
        if self.single(name):
            self._measure(name, formed(grad))
        else:
            super().take(name, grad)

    def _measure(self, name: str, grad: PerSampleGrad) -> None:
        if not self.careful:
            self.found[name] = grad.measure()
            return
        only = PerSample(_NO_LOSSES, {name: grad})
        self.sq_norms |= only.sq_norms()
        self.marked |= {name} if only.is_marked else set()

    def rest(self, result: PassResult) -> frozenset[str]:
        """Measure what was kept, with the gradients by vmap and grad; names that should have been kept and were not."""
        self.take_formed(result.rest)
        known = self.sq_norms if self.careful else self.found
        missed = frozenset(name for name in self.pieces if name in known)
        for name, param in result.params.items() if not missed else ():
            if name not in known:
                self.unused += [] if name in self.pieces else [name]
                self._measure(name, self.joined(name, param, len(result.losses_B)))
        return missed

    def finish(self) -> bool:
        """Squared norms of all parameters; read the mark: true if a number needs care."""
        if self.careful:
            return bool(self.marked)
        squares, enough = numerics.squares_to_clip(list(self.found.values()))
        self.sq_norms = dict(zip(self.found, squares.reshape(len(self.found), -1).unbind(0), strict=True))
        self.found = {}  # what the second pass needs are the squares
        return not bool(enough.all())


@dataclass
class Weighted(Kept):
    """Weighted sums of the gradients of a second pass, as it forms them."""

    measured: Measured = field(kw_only=True)
    factors: Mapping[str, Tensor] = field(kw_only=True)
    reduced: Callable[[str, Tensor], Tensor] = field(kw_only=True)
    sums: dict[str, Tensor] = field(default_factory=dict)
    found: dict[str, numerics.Measured] = field(default_factory=dict)

    def take(self, name: str, grad: PerSampleGrad | DeferredGrad) -> None:
        """Sum a gradient, or keep it for the others of the same parameter."""
        if self.measured.single(name) and name not in self.sums:
            self._sum(name, formed(grad))
        else:
            super().take(name, grad)

    def rest(self, result: PassResult) -> None:
        """Sum what was kept, with the gradients by vmap and grad."""
        self.take_formed(result.rest)
        for name, param in result.params.items():
            if name in self.sums and name in self.pieces:
                raise differs([name])
            if name not in self.sums:
                self._sum(name, self.joined(name, param, len(result.losses_B)))
        if self.found:
            squares, _ = numerics.squares_to_clip(list(self.found.values()))
            self._compare(squares, [self.measured.sq_norms[name] for name in self.found], self.found)

    def _sum(self, name: str, grad: PerSampleGrad) -> None:
        if not self.measured.careful:
            self.found[name] = grad.measure()
            self.sums[name] = self.reduced(name, grad.weighted_sum(self.factors[name]))
            return
        late = name not in self.measured.marked  # as in the first pass
        again = PerSample(_NO_LOSSES, {name: grad}, late=late)
        self._compare(again.sq_norms()[name], [self.measured.sq_norms[name]], [name])
        self.sums[name] = self.reduced(name, again.weighted_sum(self.factors)[name])

    def _compare(self, squares: Tensor, known: Sequence[Tensor], names: Collection[str]) -> None:
        """Refuse gradients that are not those that were measured."""
        alike = torch.isclose(squares, torch.cat(list(known)), rtol=numerics.TOLERATED, atol=0.0, equal_nan=True)
        if not bool(alike.all()):
            each = zip(names, alike.reshape(len(names), -1), strict=True)
            raise differs([name for name, own_B in each if not bool(own_B.all())])


def differs(names: Iterable[str]) -> UnsupportedModel:
    """The error if a second pass gives other gradients than the first one."""
    return UnsupportedModel(
        f"The gradients of {', '.join(map(repr, names))} differ between the two passes of this engine, so they would "
        "not be clipped by their norms. The loss depends on more than its inputs (a counter, random numbers of Python "
        'or NumPy: draw them by torch). Use engine="auto".'
    )


@dataclass(frozen=True)
class Ghost:
    """The gradients of B samples, of which only losses and norms exist; each sum is a pass of its own."""

    losses_B: Tensor
    norms: Mapping[str, Tensor] = field(repr=False)
    unused: Sequence[str]
    again: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = field(repr=False)
    needs_audit: bool = True
    aux: Any = None
    repeatable: ClassVar[bool] = False

    def sq_norms(self) -> dict[str, Tensor]:
        return dict(self.norms)

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted sums over the samples: name -> parameter shape."""
        return self.again(factors)
