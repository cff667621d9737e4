"""Two backward passes and no factors: norms in the first, weighted sums in the second. Least memory.

Li et al. 2022, Large Language Models Can Be Strong Differentially Private Learners, section 4 (ghost clipping).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dpfunc._utils.dtensor import arrived
from dpfunc._utils.validation import one_of
from dpfunc.batches import batch_size
from dpfunc.engines.bookkeeping import apply_rule, checked, read_copies
from dpfunc.engines.evidence import NOTHING_FOUND, Evidence
from dpfunc.engines.guards.loss import (
    check_depends,
    check_differentiable,
    parameters_unchanged,
    refuse_reentrant,
    refuse_unproven,
)
from dpfunc.engines.guards.modes import unfollowed, unseen
from dpfunc.engines.guards.scope import Scope, backward_inside
from dpfunc.engines.loop import loop
from dpfunc.engines.numerics import TOLERATED, exact
from dpfunc.engines.per_sample import PerSample, PerSampleGrad
from dpfunc.engines.rules.table import Grads, Use
from dpfunc.engines.tracing.discovery_cache import DiscoveryCache
from dpfunc.engines.tracing.sample_axis_discovery import DiscoveryRecorder
from dpfunc.engines.tracing.trace import Trace, backward_pass, following
from dpfunc.engines.uses.accumulate import collect, refuse_escaped
from dpfunc.engines.uses.gradient_taps import leaf, tapped
from dpfunc.engines.uses.parameter_source import has_parameter_source, leaves_of, reduced
from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.engines.uses.tracked import Tracked
from dpfunc.engines.uses.tracker import Tracker
from dpfunc.engines.uses.unwritten import Unwritten
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import Key as Key256
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.types import Batch, Engine, LossFn, Params


@dataclass
class _NormRecorder:
    """Record of uses that takes norms in the first backward pass, and weighted sums in the second.

    Args:
        params: identity -> name. anchor: a leaf that makes autograd run the backward of every use. trace: of this step.
        counts: identity -> how often it is used; one that is used once needs no factors.
        kept: identity -> gradients of uses whose norms do not add up: tied ones and derived ones.
        sq_norms, sums: name -> result. factors: of the second pass; None in the first.
    """

    params: Mapping[int, str]
    anchor: Tensor
    trace: Trace
    leaves: list[tuple[Tracked, Tensor, SampleAxis]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    kept: dict[int, list[Unwritten[PerSampleGrad]]] = field(default_factory=dict)
    sq_norms: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    factors: Mapping[str, Tensor] | None = None
    forward_done: bool = False

    def use(self, use: Use, targets: Mapping[str, int], output: Tensor, needed: Mapping[str, Tensor | None]) -> Tensor:
        """Tap the output of a use, whose gradient is caught in both backward passes."""
        names = [name for name, tensor in needed.items() if tensor is not None]
        saved = [tensor.detach() for tensor in needed.values() if tensor is not None]
        if not self.forward_done:
            for target in targets.values():
                self.counts[target] = self.counts.get(target, 0) + 1
        return tapped(
            output, checked(self.trace, use, partial(self._caught, use, targets, names)), saved, [self.anchor]
        )

    def end_forward(self) -> None:
        """Note the end of the forward pass: later uses are repeated by checkpointing, and are not counted."""
        self.forward_done = True

    def weigh(self, factors: Mapping[str, Tensor]) -> None:
        """Begin the second backward pass, with the factor of each sample: name -> (B,)."""
        self.factors = factors

    def _caught(
        self, use: Use, targets: Mapping[str, int], names: Sequence[str], grad: Tensor, saved: tuple[Tensor, ...]
    ) -> tuple[None]:
        if not self.forward_done:  # the loss differentiates inside of itself
            return (None,)
        single = {arg: self.params[target] for arg, target in targets.items() if self._single(target)}
        if self.factors is None:
            self._take_norms(use, apply_rule(use, names, grad, saved), targets, single, grad.device)
        elif single:
            self._take_sums(use, apply_rule(use, names, grad, saved), self.factors, single, grad.device)
        return (None,)

    def _take_norms(
        self, use: Use, grads: Grads, targets: Mapping[str, int], single: Mapping[str, str], device: torch.device
    ) -> None:
        """Take the norms of parameters that are used once, in the first pass; the gradients of others are kept."""
        with unseen(), exact(device), torch.no_grad():
            for argument, target in targets.items():
                if argument in single:
                    self.sq_norms[single[argument]] = grads[argument].sq_norms()
                else:
                    grad = grads[argument]
                    self.kept.setdefault(target, []).append(Unwritten.of(use, grad, grad.tensors, self.trace))

    def _take_sums(
        self, use: Use, grads: Grads, factors: Mapping[str, Tensor], single: Mapping[str, str], device: torch.device
    ) -> None:
        """Take the weighted sums of parameters that are used once, in the second pass.

        Raises:
            UnsupportedModel: a norm is another one than that by which the factors were made.
        """
        with unseen(), exact(device), torch.no_grad():
            # Code of the user's, in a hook or a checkpoint, may run otherwise this time.
            again = {} if self.trace.settled else {name: grads[arg].sq_norms() for arg, name in single.items()}
            if not all(_same_norms(norms_B, self.sq_norms[name]) for name, norms_B in again.items()):
                raise use.refuse(
                    "its gradients differ between the two backward passes of this engine, so they would not be "
                    "clipped. A hook, a checkpointed function or a backward function of your own depends on more than "
                    "its inputs (a counter, random numbers of Python or NumPy: draw them by torch)."
                )
            totals = {name: grads[argument].weighted_sum(factors[name]) for argument, name in single.items()}
        with unfollowed(), torch.no_grad():  # may communicate
            self.sums.update({name: reduced(name, total) for name, total in totals.items()})

    def _single(self, target: int) -> bool:
        return target in self.params and self.counts.get(target) == 1

    def copies(self, tracked: Tracked, copies: Tensor, sample_axis: SampleAxis) -> None:
        """Record private copies, whose gradients are small and are kept."""
        if not self.forward_done:
            self.counts[id(tracked.tensor)] = self.counts.get(id(tracked.tensor), 0) + 2  # never single
            self.leaves.append((tracked, copies, sample_axis))

    def finish(self, grads: Sequence[Tensor | None]) -> dict[int, list[PerSampleGrad]]:
        """The gradients that are kept, with those of private copies, which come first among `grads`.

        Raises:
            UnsupportedModel: a tensor that they are computed from was written into since its use gave it.
        """
        kept = {target: [use.read() for use in uses] for target, uses in self.kept.items()}
        for (tracked, _, sample_axis), grad in zip(self.leaves, grads, strict=False):
            if grad is not None:
                for target, rep in read_copies(tracked, sample_axis, self.trace, grad).items():
                    kept.setdefault(target, []).append(rep)
        return kept

    def derived(self, sources: Sequence[Tracked]) -> None:
        """Note that parameters are also used through a derived value: the norm of one use is not theirs."""
        for tracked in sources:
            self.counts[id(tracked.tensor)] = self.counts.get(id(tracked.tensor), 0) + 2


@dataclass
class Ghost:
    """The gradients of B samples, of which only norms exist until they are summed. Sums once."""

    losses_B: Tensor
    kept: PerSample
    _meter: _NormRecorder = field(repr=False)
    _tracker: Tracker = field(repr=False)
    _scope: Scope = field(repr=False)
    _graph: list[Tensor] = field(repr=False)
    _seed: Key256 = field(repr=False)
    evidence: Evidence = NOTHING_FOUND

    @property
    def _trace(self) -> Trace:
        return self._meter.trace

    def sq_norms(self) -> dict[str, Tensor]:
        """Squared norms of the gradients of each sample: name -> (B,)."""
        norms = {**self.kept.sq_norms(), **self._meter.sq_norms}
        return {name: norms[name] for name in self._tracker.params}

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted sums over the samples: name -> parameter shape. Runs the second backward pass.

        Raises:
            InvalidArgument: called a second time.
        """
        if not self._graph:
            raise InvalidArgument(
                "The sums of a ghost engine can be taken once: the second backward pass uses the activations up. Use "
                'engine="bookkeeping".'
            )
        sum_kept = partial(self.kept.weighted_sum, {name: factors[name] for name in self.kept.grads})
        # Code of the user's may write into what the first pass has left. Without any, it takes less memory at the end.
        early = {} if self._trace.settled else sum_kept()
        if self._meter.sq_norms:
            self._meter.weigh(factors)
            known = len(self._trace.doubts)
            followed = nullcontext() if self._trace.settled else self._trace
            with followed, torch.enable_grad(), torch_seed(self._seed), self._scope.again(), self._tracker:
                torch.autograd.grad(self._graph.pop(), (self._meter.anchor,), allow_unused=True)
            refuse_unproven(self._trace.doubts[known:])  # a hook may act differently the second time
        sums = {**(early or sum_kept()), **self._meter.sums}
        return {name: sums[name] for name in self._tracker.params}


@dataclass(frozen=True)
class GhostEngine:
    """The engine of two backward passes, made by `ghost`, with its cache of observations about each loss."""

    unproven: Literal["audit", "refuse"] = "refuse"
    _cache: DiscoveryCache = field(default_factory=DiscoveryCache, repr=False, compare=False)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSample | Ghost:
        """Compute the losses and norms of a batch; sums follow in a second backward pass."""
        if batch_size(batch) < 2:
            return loop()(loss_fn, params, batch)
        result = self._cache.run_with_rediscovery(loss_fn, params, batch, partial(_measure, loss_fn, params, batch))
        if self.unproven == "refuse":
            refuse_unproven(result.evidence.doubts)
        return result

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> Engine:
        """Raise: this engine cannot be compiled.

        Raises:
            UnsupportedModel: always.
        """
        raise UnsupportedModel('The ghost engine cannot be compiled. Use engine="bookkeeping" with compile=True.')


def ghost(unproven: Literal["audit", "refuse"] = "refuse") -> GhostEngine:
    """The engine with the least memory: that of the step without privacy, and at most one layer's factors.

    Like `bookkeeping`, but nothing is kept between the two backward passes, so it takes one backward pass longer.
    Tied parameters keep their factors: their norms do not add up.

    Args:
        unproven: as for `bookkeeping`.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`, whose weighted sum can be taken once. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: an operation without a rule, or samples that influence each other; two backward passes that
            differ.

    Guarantees:
        equals a loop over single samples (tests/engines/test_parity.py); what is summed has the norms it is clipped by
        (tests/engines/test_ghost.py::test_a_second_pass_that_differs_is_refused).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> per_sample = ghost()(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    >>> per_sample.sq_norms()["w"]
    tensor([25.,  1.])
    """
    return GhostEngine(one_of("unproven", unproven, ("audit", "refuse")))


def _same_norms(again_B: Tensor, known_B: Tensor) -> bool:
    """True if squared norms differ by no more than clip rules allow for."""
    return torch.allclose(again_B, known_B, rtol=TOLERATED, atol=0.0, equal_nan=True)


def _measure(loss_fn: LossFn, params: Params, batch: Batch, discovery: DiscoveryRecorder) -> Ghost:
    num_samples = batch_size(batch)
    leaves = leaves_of(params)
    first = next(iter(leaves.values()))
    trace = discovery.trace
    meter = _NormRecorder(
        {id(param): name for name, param in leaves.items()}, leaf((), first.dtype, first.device), trace
    )
    tracker = Tracker(leaves, num_samples, discovery, meter)
    # Checkpointing may draw random numbers in a backward pass: both passes draw the same.
    seed = insecure_key(int(torch.randint(2**31, ())))
    with (
        following(trace, batch),
        parameters_unchanged(params),
        torch.enable_grad(),
        backward_inside() as scope,
        tracker,
    ):
        losses_B = loss_fn(leaves, batch)
        check_differentiable(losses_B, num_samples)
        if tracker.hidden:  # as reentrant checkpoints do, which lose gradients
            refuse_reentrant((), losses_B)
        meter.end_forward()
        trace.credited(losses_B, SampleAxis(0), "the loss")
        copies = [copy for _, copy, _ in meter.leaves]
        watched = {**leaves, **tracker.sentinels}
        targets = (*copies, *watched.values(), meter.anchor)
        with torch_seed(seed), backward_pass(trace, losses_B, hooked=tracker.hooked):
            total, ones_B = losses_B.sum(), torch.ones_like(losses_B)
            caught = torch.autograd.grad(losses_B, targets, ones_B, allow_unused=True, retain_graph=True)
        refuse_escaped(watched, caught[len(copies) : -1])
        uses = meter.finish(caught)
        check_depends(has_parameter_source() or bool(meter.sq_norms or uses))
        kept = collect(tracker, leaves, uses)
    rest = {name: grad for name, grad in kept.items() if name not in meter.sq_norms}
    losses_B = arrived(losses_B.detach())
    return Ghost(losses_B, PerSample(losses_B, rest), meter, tracker, scope, [total], seed)
