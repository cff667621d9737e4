"""The fast engine where it is right, the plain ones where it is not: decided on the first batch, by comparison."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

from torch.utils.weak import WeakIdKeyDictionary

from dpfunc.checks import shorten
from dpfunc.engines.bookkeeping import bookkeeping
from dpfunc.engines.isolation import rows_differ
from dpfunc.engines.loop import loop
from dpfunc.engines.probe import Probe, take_probe
from dpfunc.engines.vmap import vmap
from dpfunc.errors import UnsupportedModel
from dpfunc.tree import batch_size
from dpfunc.types import Batch, Engine, LossFn, Params, PerSampleGrads

log = logging.getLogger("dpfunc")


@dataclass(frozen=True)
class Decision:
    """Which engine was chosen for a loss function, and why.

    >>> Decision("bookkeeping", "agrees with single samples", vmap())  # doctest: +ELLIPSIS
    Decision(engine='bookkeeping', reason='agrees with single samples')
    """

    engine: str
    reason: str
    run: Engine = field(repr=False)


@dataclass(frozen=True)
class Auto:
    """See `auto`."""

    fast: Callable[[], Engine]
    _decisions: MutableMapping[LossFn, Decision] = field(default_factory=WeakIdKeyDictionary, repr=False, compare=False)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSampleGrads:
        """The gradients, by the engine that was decided on with the first batch."""
        if not batch_size(batch):
            return loop()(loss_fn, params, batch)
        return self._decided(loss_fn, params, batch)(loss_fn, params, batch)

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> Engine:
        """Decide now; an engine for batches like this one, that can be compiled."""
        engine = self._decided(loss_fn, params, batch)
        prepared: Engine = getattr(engine, "prepare", lambda *args: engine)(loss_fn, params, batch)
        return prepared

    def _decided(self, loss_fn: LossFn, params: Params, batch: Batch) -> Engine:
        known = self.decision(loss_fn)
        if known is not None:
            return known.run
        probe = take_probe(loss_fn, params, batch)
        if not bool(probe.usable_B.any()):
            return loop()  # nothing to compare with: the next batch decides
        decision = _decide(loss_fn, probe, self.fast())
        level = logging.INFO if decision.engine == "bookkeeping" else logging.WARNING
        log.log(level, "engine %s: %s", decision.engine, decision.reason)
        if rows_differ(batch):  # otherwise it holds for these rows, and the next batch decides anew
            self._decisions[loss_fn] = decision
        return decision.run

    def decision(self, loss_fn: LossFn) -> Decision | None:
        """What was decided for a loss function; None before its first batch."""
        return self._decisions.get(loss_fn)


def _decide(loss_fn: LossFn, probe: Probe, fast: Engine) -> Decision:
    agrees = "its gradients equal those of single samples"
    reasons = []
    for name, engine in (("bookkeeping", fast), ("vmap", vmap())):
        try:
            differing = probe.differing(loss_fn, engine)
        except (UnsupportedModel, RuntimeError) as error:
            reasons.append(f"{name} cannot: {str(error).splitlines()[0]}")
            continue
        if not differing:
            return Decision(name, "; ".join([*reasons, agrees]), engine)
        reasons.append(f"{name} differs from single samples in {shorten(differing)}")
    return Decision("loop", "; ".join(reasons), loop())


def auto(memory_budget: int | None = None) -> Auto:
    """Book-keeping where it agrees with single samples, else vmap, else a loop over single samples.

    With the first batch of a loss function, the losses of up to eight rows are compared with those of each row alone
    (the proof of privacy needs rows that do not influence each other), and the gradients of two samples with ordinary
    autograd on each alone; all that with slightly moved parameters and without dropout. What was decided is logged
    (logger "dpfunc") and given by `decision(loss_fn)`.

    Args:
        memory_budget: see `bookkeeping`.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: rows influence each other; the message names them.

    Guarantees:
        a loss that mixes rows is refused (tests/engines/test_auto.py::test_losses_that_mix_rows_are_refused); an
        engine that disagrees is not used (test_an_engine_that_disagrees_is_not_used).

    >>> import torch
    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> engine = auto()
    >>> engine(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])).sq_norms()["w"]
    tensor([25.,  1.])
    >>> engine.decision(loss_fn).engine
    'bookkeeping'
    """
    return Auto(lambda: bookkeeping(memory_budget))
