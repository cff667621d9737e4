"""One traced step, and what a compiled one must know of it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from torch.utils.weak import WeakIdKeyDictionary

from dpfunc.checks import shorten
from dpfunc.engines.layout import Layout
from dpfunc.engines.tracing.places import Key, Traced
from dpfunc.engines.tracing.trace import Trace
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Batch, LossFn, Params

Unproven = Literal["audit", "vmap", "refuse"]
"""A step that is not proven: compare more rows with rows alone; compute all rows alone; or raise."""

UNPROVEN: tuple[Unproven, ...] = ("audit", "vmap", "refuse")


class Result(Protocol):
    """What an engine returns."""

    @property
    def doubts(self) -> tuple[str, ...]: ...


R = TypeVar("R", bound=Result)


def unproven_message(doubts: Sequence[str]) -> str:
    """The doubts in words, and what usually causes them."""
    return (
        f"It cannot be shown that the samples of this batch do not influence each other: {shorten(list(dict.fromkeys(doubts)))}."
        " Likely causes: a statistic of the batch (BatchNorm in training mode, a mean over the tokens of the batch, "
        "in-batch negatives), routing or sorting over the whole batch, Python numbers taken from tensors. Compute each "
        'loss from its own row alone; or use engine="vmap" or "loop", which compute each row alone.'
    )


def refuse_unproven(doubts: Sequence[str]) -> None:
    """A step with doubts is not released.

    Raises:
        UnsupportedModel: naming them.
    """
    if doubts:
        raise UnsupportedModel(unproven_message(doubts))


@dataclass
class Memory:
    """What was seen of loss functions.

    Nothing here is trusted: each step checks what it uses of it.

    Args:
        wrong: expansions that are not over the samples, though their size says so. tried: to do without such expansions
            did not help.
    """

    wrong: MutableMapping[LossFn, set[Key]] = field(default_factory=WeakIdKeyDictionary)
    tried: MutableMapping[LossFn, bool] = field(default_factory=WeakIdKeyDictionary)

    def traced(self, loss_fn: LossFn, num_samples: int, compute: Callable[[Traced], R]) -> R:
        """A step with a trace of its own."""
        wrong = self.wrong.setdefault(loss_fn, set())
        first = Traced(Trace(num_samples, recording=True), wrong)
        error: UnsupportedModel | None = None
        result: R | None = None
        try:
            result = compute(first)
        except UnsupportedModel as found:
            error = found
        if result is not None and (not result.doubts or loss_fn in self.tried):
            return result
        for less in (first.guessed - first.exact, first.guessed) if loss_fn not in self.tried else ():
            other = self._without(wrong | less, num_samples, compute) if less else None
            if other is not None:
                wrong |= less
                return other
        self.tried[loss_fn] = True
        if result is None:
            raise error or UnsupportedModel("The step could not be traced.")
        return result

    @staticmethod
    def _without(wrong: set[Key], num_samples: int, compute: Callable[[Traced], R]) -> R | None:
        """The step without some expansions over the samples; None if it is not proven either."""
        try:
            result = compute(Traced(Trace(num_samples, recording=True), wrong))
        except UnsupportedModel:
            return None
        return None if result.doubts else result

    def recalled(
        self, loss_fn: LossFn, params: Params, batch: Batch, engine: _Traceable
    ) -> dict[Key, Layout | None]:
        """Where the samples are in each use, by one traced step that is proven.

        Raises:
            UnsupportedModel: it is not, or uses of a parameter lie differently.
        """
        places = Traced(Trace(_size(batch)), self.wrong.setdefault(loss_fn, set()))
        refuse_unproven(engine._run(loss_fn, params, batch, places).doubts)
        if places.unclear:
            names = sorted({key[0] for key in places.unclear})
            raise UnsupportedModel(
                f"The uses of {shorten(names)} hold their samples in different ways, which a compiled step cannot tell "
                "apart. Use compile=False."
            )
        return places.known


class _Traceable(Protocol):
    def _run(self, loss_fn: LossFn, params: Params, batch: Batch, places: Traced) -> Result: ...


def _size(batch: Batch) -> int:
    from dpfunc.tree import batch_size

    return batch_size(batch)
