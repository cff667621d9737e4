"""The automatic engine: the fast engine in steps that are proven, engines that compute each row alone in others."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace

from torch.utils.weak import WeakIdKeyDictionary

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.validation import one_of, shorten
from dpfunc.batches import batch_size, rows, signature
from dpfunc.engines.bookkeeping import Bookkeeping, bookkeeping
from dpfunc.engines.caught_grads import GroupwiseSums
from dpfunc.engines.guards.lockstep import failed, in_lockstep, on_any_rank, refused_by_all
from dpfunc.engines.guards.loss import refuse_unproven
from dpfunc.engines.guards.python_state import note_kept, refuse_kept
from dpfunc.engines.guards.reference_probe import equal_to_loop
from dpfunc.engines.guards.row_independence import check_isolated
from dpfunc.engines.loop import loop
from dpfunc.engines.per_sample import PerSample
from dpfunc.engines.tracing.trace import state_before
from dpfunc.engines.vmap import vmap
from dpfunc.errors import UnsupportedModel
from dpfunc.types import UNPROVEN, Batch, Engine, GroupFactors, LossFn, Params, PerSampleGrads, Unproven

_log = logging.getLogger("dpfunc")

# Consecutive steps without a proof after which the fast engine is not tried again for rows of this shape.
_MAX_UNPROVEN = 2


@dataclass(frozen=True)
class Decision:
    """Engine that computed the last step of a loss function, and why.

    Args:
        engine: its name. reason: in words. proven: nothing of one sample reaches what is credited to another: by the
            trace of the step, or because each row was computed alone.

    >>> Decision("bookkeeping", "traced", True)
    Decision(engine='bookkeeping', reason='traced', proven=True)
    """

    engine: str
    reason: str
    proven: bool = True


@dataclass
class _History:
    """Earlier steps of a loss function on rows of one shape: those without a proof, and the engine for rows alone."""

    failures: int = 0
    alone: Engine | None = None
    name: str = ""
    reason: str = ""

    def proved(self) -> None:
        """Forget the failures before a step that was proven."""
        self.failures = 0

    def failed(self) -> None:
        """Count a step that was not proven."""
        self.failures += 1

    def settle(self, alone: Engine, name: str, reason: str) -> None:
        """Compute rows alone with this engine from now on."""
        self.alone, self.name, self.reason = alone, name, reason


@dataclass(frozen=True)
class Auto:
    """Engine that `auto` returns, with its history of each loss function."""

    fast: Bookkeeping = field(repr=False)
    unproven: Unproven = "vmap"
    _histories: MutableMapping[LossFn, dict[tuple[object, ...], _History]] = field(
        default_factory=WeakIdKeyDictionary, repr=False, compare=False
    )
    _decisions: MutableMapping[LossFn, Decision] = field(default_factory=WeakIdKeyDictionary, repr=False, compare=False)
    _group_factors: GroupFactors | None = field(default=None, repr=False, compare=False)

    def groupwise(self, group_factors: GroupFactors) -> Auto:
        """The same engine for one step, which sums each clip group as soon as its gradients are known."""
        return replace(self, _group_factors=group_factors)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSampleGrads:
        """Gradients by the fast engine if the step is proven, else by one that computes rows alone."""
        if not batch_size(batch):
            return loop()(loss_fn, params, batch)
        shapes = () if in_lockstep() else signature(batch)  # all processes need the same history
        history = self._histories.setdefault(loss_fn, {}).setdefault(shapes, _History())
        if history.alone is not None and history.failures >= _MAX_UNPROVEN:
            return self._alone(loss_fn, params, batch, history, history.reason)
        result, reason = self._attempt(loss_fn, params, batch)
        doubts = () if result is None else result.evidence.doubts
        impossible, doubted = on_any_rank(params, result is None, bool(doubts))
        found = None if impossible else result
        if found is not None and not doubted:
            history.proved()
            self._decide(loss_fn, Decision("bookkeeping", "the trace of each step shows that rows stay apart"))
            return found
        reason = reason or shorten(list(dict.fromkeys(doubts))) or "another process could not"
        return self._without_proof(loss_fn, params, batch, history, found, reason)

    def _without_proof(
        self,
        loss_fn: LossFn,
        params: Params,
        batch: Batch,
        history: _History,
        found: PerSample | GroupwiseSums | None,
        reason: str,
    ) -> PerSampleGrads:
        """Gradients of a step without a proof: those that were found, to be audited, or those of rows alone.

        Raises:
            UnsupportedModel: steps without a proof are to be refused.
        """
        if self.unproven == "refuse":
            refuse_unproven([reason])
        if self.unproven == "audit" and found is not None:
            self._decide(loss_fn, Decision("bookkeeping", f"audited, not proven: {reason}", proven=False))
            return found
        history.failed()
        return self._alone(loss_fn, params, batch, history, reason)

    def _attempt(self, loss_fn: LossFn, params: Params, batch: Batch) -> tuple[PerSample | GroupwiseSums | None, str]:
        """Gradients by the fast engine; or None, and the reason. Refuses a loss that keeps numbers of its rows."""
        fast = self.fast if self._group_factors is None else self.fast.groupwise(self._group_factors)
        result: PerSample | GroupwiseSums | None = None
        reason = ""
        try:
            result = fast(loss_fn, params, batch)
        except (UnsupportedModel, RuntimeError) as error:
            failed(error)
            refuse_out_of_memory(error)
            reason = f"bookkeeping cannot: {str(error).splitlines()[0]}"
        with refused_by_all():
            refuse_kept(loss_fn)
        return result, reason

    def _alone(self, loss_fn: LossFn, params: Params, batch: Batch, history: _History, reason: str) -> PerSampleGrads:
        """Compute rows alone, by vmap or a loop, and log it; refuse a loss that mixes rows."""
        if history.alone is not None:
            self._decide(loss_fn, Decision(history.name, f"rows alone, since {reason}"))
            return history.alone(loss_fn, params, batch)
        before = state_before(loss_fn, params, rows(batch, 0, 1), alone=True) if self.fast.watches(loss_fn) else ()
        check_isolated(loss_fn, params, batch)
        name, result = "vmap", None
        try:
            result = vmap()(loss_fn, params, batch)
        except (UnsupportedModel, RuntimeError) as error:
            failed(error)
            refuse_out_of_memory(error)
            name, reason = "loop", f"{reason}; vmap cannot: {str(error).splitlines()[0]}"
        (impossible,) = on_any_rank(params, result is None)
        if result is None or impossible or not equal_to_loop(loss_fn, params, batch, vmap()):
            name, result = "loop", loop()(loss_fn, params, batch)
        if before:
            note_kept(loss_fn, before, reason)
        with refused_by_all():
            refuse_kept(loss_fn)
        history.settle(vmap() if name == "vmap" else loop(), name, reason)
        self._decide(loss_fn, Decision(name, f"rows alone, since {reason}"))
        return result

    def _decide(self, loss_fn: LossFn, decision: Decision) -> None:
        before = self._decisions.get(loss_fn)
        if before is None or before.engine != decision.engine or before.proven != decision.proven:
            level = logging.INFO if decision.engine == "bookkeeping" and decision.proven else logging.WARNING
            _log.log(level, "engine %s: %s", decision.engine, decision.reason)
        self._decisions[loss_fn] = decision

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> Engine:
        """An engine for batches like this one, that can be compiled: the fast one, or one that computes rows alone."""
        try:
            return self.prepare_proven(loss_fn, params, batch)
        except (UnsupportedModel, RuntimeError) as error:
            refuse_out_of_memory(error)
            if self.unproven == "refuse" or any(is_dtensor(param) for param in params.values()):
                raise  # vmap cannot do it either
            self._decide(
                loss_fn, Decision("vmap", f"rows alone, since bookkeeping cannot: {str(error).splitlines()[0]}")
            )
            return vmap()

    def prepare_proven(self, loss_fn: LossFn, params: Params, batch: Batch) -> Engine:
        """The fast engine for batches like this one, that can be compiled.

        Raises:
            UnsupportedModel: the step is not proven.
        """
        prepared = self.fast.prepare(loss_fn, params, batch)
        self._decide(loss_fn, Decision("bookkeeping", "the trace of what was compiled shows that rows stay apart"))
        return prepared

    def decision(self, loss_fn: LossFn) -> Decision | None:
        """Engine of the last step of a loss function, and why; None before its first batch."""
        return self._decisions.get(loss_fn)


def auto(memory_budget: int | None = None, unproven: Unproven = "vmap") -> Auto:
    """Book-keeping in each step whose trace proves that samples stay apart, else vmap, else a loop over single samples.

    Every step is traced (`dpfunc.engines.tracing`): the axis of the samples is followed through all operations, forward
    and backward. A step in which this fails is not released on the word of an earlier one: by default its rows are
    computed alone. What computed the last step is logged where it changes (logger "dpfunc") and given by
    `decision(loss_fn)`.

    Args:
        memory_budget: see `bookkeeping`.
        unproven: what to do with a step that is not proven: `"vmap"` computes each row alone, by vmap or a loop;
            `"refuse"` raises; `"audit"` takes the fast engine if rows that are drawn at random and computed alone, at
            least 8 and one in 8, agree with it in `clipped_grad` and `make_dp_step`.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: rows influence each other; the message names them.

    Guarantees:
        no step is released whose gradients differ from those of rows alone
        (tests/engines/tracing/test_isolation_zoo.py).

    >>> import torch
    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> engine = auto()
    >>> engine(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])).sq_norms()["w"]
    tensor([25.,  1.])
    >>> engine.decision(loss_fn).engine
    'bookkeeping'
    """
    return Auto(bookkeeping(memory_budget, unproven="audit"), one_of("unproven", unproven, UNPROVEN))
