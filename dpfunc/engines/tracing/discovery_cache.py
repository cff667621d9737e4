"""Steps that discover their sample axes, and the cache of what was discovered about each loss function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc._utils.validation import shorten
from dpfunc.batches import batch_size
from dpfunc.engines.evidence import Evidence
from dpfunc.engines.guards.lockstep import in_lockstep, refused_by_all
from dpfunc.engines.guards.loss import refuse_unproven
from dpfunc.engines.guards.modes import unseen
from dpfunc.engines.guards.python_state import note_kept, python_state, refuse_kept
from dpfunc.engines.guards.replicated import check_replicated
from dpfunc.engines.tracing.any_values import AnyValuesTrace
from dpfunc.engines.tracing.backward import Unsettled
from dpfunc.engines.tracing.credit import WrongGuess
from dpfunc.engines.tracing.entries import part
from dpfunc.engines.tracing.readers import FirstRead
from dpfunc.engines.tracing.sample_axis_discovery import CachedSampleAxes, DiscoveryRecorder, Key
from dpfunc.engines.tracing.trace import Trace, state_before
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Batch, LossFn, Params

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Result(Protocol):
    """Per-sample gradients of a traced engine: the part that is used here."""

    @property
    def losses_B(self) -> Tensor: ...

    def sq_norms(self) -> Mapping[str, Tensor]: ...


def _check_norms(result: _Result, params: Params, meshes: Sequence[DeviceMesh]) -> None:
    """Check, for split layers, that all processes have the same losses and the same norms of replicated parameters.

    Raises:
        UnsupportedModel: see `check_replicated`.
    """
    if meshes:
        with unseen():
            norms = {name: norms_B.sqrt() for name, norms_B in result.sq_norms().items()}
            check_replicated(result.losses_B, norms, params, meshes)


_R = TypeVar("_R", bound=Any)


@dataclass
class DiscoveryCache:
    """Observations about loss functions from earlier steps.

    No proof relies on them: each step checks those that it uses.

    Args:
        wrong: guesses of sample axes by size that gradients have shown to be wrong. reads: the first number of rows
            that was given to Python, as a doubt. outside: memory that was made without an operation of the step, by
            key. settled: the last backward pass was proven by its forward pass. watched: losses that were told
            something of a batch, whose state is compared from then on.
    """

    wrong: MutableMapping[LossFn, set[tuple[Key, int]]] = field(default_factory=WeakIdKeyDictionary)
    reads: MutableMapping[LossFn, str] = field(default_factory=WeakIdKeyDictionary)
    outside: MutableMapping[LossFn, dict[int, StorageWeakRef]] = field(default_factory=WeakIdKeyDictionary)
    settled: MutableMapping[LossFn, bool] = field(default_factory=WeakIdKeyDictionary)
    watched: MutableMapping[LossFn, bool] = field(default_factory=WeakIdKeyDictionary)

    def run_with_rediscovery(
        self, loss_fn: LossFn, params: Params, batch: Batch, compute: Callable[[DiscoveryRecorder], _R]
    ) -> _R:
        """Compute a step with a trace of its own, again if a gradient shows that a guess of a sample axis was wrong.

        Python may keep numbers that an earlier step gave to it, so all later steps have the doubt of that step.

        Raises:
            UnsupportedModel: the loss was told something of the batch, and what it keeps has changed.
        """
        wrong = self.wrong.setdefault(loss_fn, set())
        before = self._state_before(loss_fn, params, batch)
        while True:
            whole, allowed = self.settled.get(loss_fn, False), math.inf if before else 0
            trace = Trace(batch_size(batch), recording=True, whole=whole, allowed=allowed)
            discovery = DiscoveryRecorder(trace, wrong)
            try:
                result = compute(discovery)
                if before or not trace.noticed:  # else the loss has caught it
                    break
            except (FirstRead, RuntimeError):  # TorchScript makes the second of the first
                if before or not trace.noticed:
                    raise
            except WrongGuess as error:  # a guess by shape, which the gradient has shown to be wrong
                wrong.add(error.args[0])
            except Unsettled:
                self.settled[loss_fn] = False
            finally:  # of each attempt: what it gave to Python may be kept for the next one
                if trace.reads:
                    self.reads.setdefault(loss_fn, f"{trace.reads[0]}, which may be kept")
                if trace.noticed and before:
                    note_kept(loss_fn, before, next(iter(trace.reads), "all() or any() of them"))
                elif trace.noticed:
                    self.watched[loss_fn] = True
                    before = self._state_before(loss_fn, params, batch)
        with refused_by_all():
            refuse_kept(loss_fn)
        self.settled[loss_fn] = trace.settled
        _check_norms(result, params, trace.meshes)
        kept = (self.reads[loss_fn],) if loss_fn in self.reads and not trace.reads else ()
        return replace(
            result,
            evidence=Evidence(
                doubts=(*trace.doubts, *kept),
                random_calls=tuple(trace.random_calls),
                untraced=self._has_untraced(loss_fn, params, trace),
                coarse=trace.coarse,
            ),
        )

    def _state_before(self, loss_fn: LossFn, params: Params, batch: Batch) -> tuple[object, ...]:
        """The state of a loss that is watched; nothing for others, which an error stops at their first read."""
        if in_lockstep():  # a step that begins again on one process only would never end
            return python_state(loss_fn)
        return state_before(loss_fn, params, batch) if loss_fn in self.watched else ()

    def _has_untraced(self, loss_fn: LossFn, params: Params, trace: Trace) -> bool:
        """True if a tensor was made without an operation of the step (by another thread or library), unlike before."""
        known = self.outside.get(loss_fn)
        own = {part(param).untyped_storage()._cdata for param in params.values()}
        found = {key: reference for key, reference in trace.untraced_memory.items() if key not in own}
        self.outside[loss_fn] = {**(known or {}), **found}
        return known is not None and any(key not in known or known[key].expired() for key in found)

    def discover(
        self, loss_fn: LossFn, num_samples: int, compute: Callable[[DiscoveryRecorder], _Result]
    ) -> CachedSampleAxes:
        """Find the sample axis of each use, by one traced step that is proven without looking at its numbers.

        Raises:
            UnsupportedModel: it is not, or uses of a parameter have different sample axes.
        """
        wrong = self.wrong.setdefault(loss_fn, set())
        while True:
            discovery = DiscoveryRecorder(AnyValuesTrace(num_samples), wrong)
            try:
                compute(discovery)
                break
            except WrongGuess as error:
                wrong.add(error.args[0])
        refuse_unproven(discovery.trace.doubts)
        if discovery.unclear:
            names = sorted({key[0] for key in discovery.unclear})
            raise UnsupportedModel(
                f"The uses of {shorten(names)} hold their samples in different ways, which a compiled step cannot tell "
                "apart. Use compile=False."
            )
        return CachedSampleAxes(discovery.known)
