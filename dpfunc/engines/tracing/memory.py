"""Traced steps, and the knowledge that a compiled step needs of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc._utils.validation import shorten
from dpfunc.engines.guards.lockstep import refused_by_all
from dpfunc.engines.guards.modes import unseen
from dpfunc.engines.guards.replicated import check_replicated
from dpfunc.engines.tracing.credit import Misplaced
from dpfunc.engines.tracing.entries import part
from dpfunc.engines.tracing.places import Key, Traced
from dpfunc.engines.tracing.trace import Trace
from dpfunc.engines.uses.sample_axis import Layout
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Batch, LossFn, Params

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Unproven = Literal["audit", "vmap", "refuse"]
"""A step that is not proven: compare more rows with rows alone; compute all rows alone; or raise."""

UNPROVEN: tuple[Unproven, ...] = ("audit", "vmap", "refuse")


class Result(Protocol):
    """The return value of an engine."""

    @property
    def doubts(self) -> tuple[str, ...]: ...

    @property
    def losses_B(self) -> Tensor: ...

    def sq_norms(self) -> Mapping[str, Tensor]: ...


def check_norms(result: Result, params: Params, meshes: Sequence[DeviceMesh]) -> None:
    """Check, of split layers, that all processes have the same losses, and norms of what each holds whole.

    Raises:
        UnsupportedModel: see `check_replicated`.
    """
    if meshes:
        with unseen():
            norms = {name: norms_B.sqrt() for name, norms_B in result.sq_norms().items()}
            check_replicated(result.losses_B, norms, params, meshes)


R = TypeVar("R", bound=Any)


def unproven_message(doubts: Sequence[str]) -> str:
    """Message that lists the doubts and their usual causes."""
    return (
        "It cannot be shown that the samples of this batch do not influence each other: "
        f"{shorten(list(dict.fromkeys(doubts)))}. Likely causes: a statistic of the batch (BatchNorm in training mode, "
        "a mean over the tokens of the batch, in-batch negatives), routing or sorting over the whole batch, Python "
        "numbers taken from tensors. Compute each loss from its own row alone; "
        'or use engine="vmap" or "loop", which compute each row alone.'
    )


def refuse_unproven(doubts: Sequence[str]) -> None:
    """Refuse a step with doubts; also on processes in lockstep with one that has doubts.

    Raises:
        UnsupportedModel: naming them.
    """
    with refused_by_all():
        if doubts:
            raise UnsupportedModel(unproven_message(doubts))


@dataclass
class Memory:
    """Observations of loss functions from earlier steps.

    No proof relies on them: each step checks what it uses of them.

    Args:
        wrong: expansions that are not over the samples, though their size says so. reads: the first value of rows that
            was given to Python, as a doubt. outside: memory that was not seen being made, by key.
    """

    wrong: MutableMapping[LossFn, set[tuple[Key, int]]] = field(default_factory=WeakIdKeyDictionary)
    reads: MutableMapping[LossFn, str] = field(default_factory=WeakIdKeyDictionary)
    outside: MutableMapping[LossFn, dict[int, StorageWeakRef]] = field(default_factory=WeakIdKeyDictionary)

    def traced(self, loss_fn: LossFn, params: Params, num_samples: int, compute: Callable[[Traced], R]) -> R:
        """Compute a step with a trace of its own.

        Numbers that an earlier step gave to Python may be kept there, so that its doubt is that of all later steps.
        """
        wrong = self.wrong.setdefault(loss_fn, set())
        places = Traced(Trace(num_samples, recording=True), wrong)
        try:
            while True:
                try:
                    result = compute(places)
                    break
                except Misplaced as error:  # a guess by shape, which the gradient has shown to be wrong
                    wrong.add(error.args[0])
                    places = Traced(Trace(num_samples, recording=True), wrong)
        finally:
            if places.trace.reads:
                self.reads.setdefault(loss_fn, f"{places.trace.reads[0]}, which may be kept")
        check_norms(result, params, places.trace.meshes)
        kept = (self.reads[loss_fn],) if loss_fn in self.reads and not places.trace.reads else ()
        return replace(
            result,
            doubts=(*result.doubts, *kept),
            strange=self._strange(loss_fn, params, places.trace),
            coarse=places.trace.coarse,
        )

    def _strange(self, loss_fn: LossFn, params: Params, trace: Trace) -> bool:
        """True if a tensor came from where the trace does not look (another thread, another library), unlike before."""
        known = self.outside.get(loss_fn)
        own = {part(param).untyped_storage()._cdata for param in params.values()}
        seen = {key: reference for key, reference in trace.strangers.items() if key not in own}
        self.outside[loss_fn] = {**(known or {}), **seen}
        return known is not None and any(key not in known or _freed(known[key]) for key in seen)

    def recalled(self, loss_fn: LossFn, params: Params, batch: Batch, engine: _Traceable) -> dict[Key, Layout | None]:
        """Find where the samples are in each use, by one traced step that is proven.

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


def _freed(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


class _Traceable(Protocol):
    def _run(self, loss_fn: LossFn, params: Params, batch: Batch, places: Traced) -> Result: ...


def _size(batch: Batch) -> int:
    from dpfunc.batches import batch_size

    return batch_size(batch)
