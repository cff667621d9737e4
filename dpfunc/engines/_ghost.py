"""Norms first, sums in a second pass: no per-sample gradient is kept. Least memory, twice the time (ghost clipping).

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Li et al. 2022, Large Language Models Can Be Strong Differentially Private Learners, section 4.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dpfunc.engines import _numerics as numerics
from dpfunc.engines._levels import NoRules, PassResult, outside_levels
from dpfunc.engines._per_sample import DeferredGrad, Kept, PerSample, PerSampleGrad, Zeros, formed
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Params


class SwappedParameters(Protocol):
    """Tensors that replace the parameters of a module which swaps its parameters itself (`fully_shard`)."""

    def leaves(self, params: Params) -> dict[str, Tensor]:
        """The tensors that stand for these parameters, by name."""

    def reduced(self, name: str, total: Tensor) -> Tensor:
        """The part of the weighted sum of a parameter that this process keeps; may communicate."""


_NONE = torch.empty(0, device="cpu")


@dataclass
class Streamed(Kept):
    """Gradients of one pass: each is measured as soon as it is whole, summed if factors are known, and dropped.

    As in `PerSample`, one mark is all that the host reads. Where it is set, another pass measures with care: each
    gradient has a mark of its own, and is mended while it is there.

    Args:
        together: parameters whose gradients come in several pieces, which are kept until the pass ends.
        factors: of a second pass; None in the first. source: of parameters that a module swaps in itself.
        squares, sq_norms: squared norms, all in one tensor and by name. enough: false where they need care.
        unused: parameters without a gradient.
    """

    together: Set[str] = field(kw_only=True)
    careful: bool = field(kw_only=True)
    factors: Mapping[str, Tensor] | None = None
    source: SwappedParameters | None = None
    found: dict[str, numerics.Measured] = field(default_factory=dict)
    squares: Tensor = _NONE
    sq_norms: dict[str, Tensor] = field(default_factory=dict)
    enough: Tensor = _NONE
    marked: bool = False
    sums: dict[str, Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    unused: list[str] = field(default_factory=list)

    def take(self, name: str, grad: PerSampleGrad | DeferredGrad) -> None:
        """Use a gradient, or keep it for the others of the same parameter."""
        if self.counts.get(name) == 1 and name not in self.together and name not in self.used:
            self._use(name, formed(grad))
        else:
            super().take(name, grad)

    def _use(self, name: str, grad: PerSampleGrad) -> None:
        self.used.add(name)
        if isinstance(grad, Zeros):
            self.unused.append(name)
        only = PerSample(_NONE, {name: grad})
        if self.careful:
            self.sq_norms |= only.sq_norms()
            self.marked |= only.is_marked
        else:
            self.found[name] = grad.measure()
        if self.factors is not None:
            own = self.factors[name]
            self.sums[name] = only.weighted_sum({name: own})[name] if self.careful else grad.weighted_sum(own)
            if self.source is not None:
                with (
                    outside_levels(),
                    torch._C.DisableTorchFunction(),
                ):  # in the backward pass of a level, and of a mode
                    self.sums[name] = self.source.reduced(name, self.sums[name])

    def finish(self, result: PassResult) -> None:
        """Use what was kept, with the gradients by vmap and grad; squared norms of all parameters."""
        self.take_formed(result.rest)
        if not self.used.isdisjoint(self.pieces):
            raise NoRules("a parameter has uses without a rule that made-up rows do not have")
        for name, param in result.params.items():
            if name not in self.used:
                self._use(name, self.joined(name, param, len(result.losses_B)))
        if self.careful:
            self.squares = torch.cat(list(self.sq_norms.values()))
            return
        self.squares, self.enough = numerics.squares_to_clip(list(self.found.values()))
        self.sq_norms = dict(zip(self.found, self.squares.reshape(len(self.found), -1).unbind(0), strict=True))
        self.found = {}  # what the second pass needs are the squares

    def is_marked(self) -> bool:
        """Read the mark: true if a number needs care."""
        return self.marked or not bool(self.enough.all())

    def check_same(self, first: "Streamed") -> None:
        """Refuse gradients that are not those that the first pass has measured."""
        known = torch.cat([first.sq_norms[name] for name in self.sq_norms])
        alike = torch.isclose(self.squares, known, rtol=numerics.TOLERATED, atol=0.0, equal_nan=True)
        if not bool(alike.all()):
            each = zip(self.sq_norms, alike.reshape(len(self.sq_norms), -1), strict=True)
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
