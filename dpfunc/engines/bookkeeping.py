"""One natively batched forward and backward pass; the factors of per-sample gradients are kept, then summed by weight.

Bu et al. 2023, Differentially Private Optimization on Large Model at Small Cost, section 3 (book-keeping).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dpfunc._utils.dtensor import arrived, is_dtensor
from dpfunc._utils.validation import integer, one_of, shorten
from dpfunc.batches import batch_size
from dpfunc.engines.caught_grads import CaughtGrads, GroupwiseSums
from dpfunc.engines.cost import Choice
from dpfunc.engines.guards.loss import (
    check_depends,
    check_differentiable,
    parameters_unchanged,
    refuse_reentrant,
    refuse_unproven,
)
from dpfunc.engines.guards.modes import unseen
from dpfunc.engines.guards.scope import backward_inside
from dpfunc.engines.loop import loop
from dpfunc.engines.numerics import accumulation_dtype, exact
from dpfunc.engines.per_sample import Dense, PerSample, PerSampleGrad, Zeros
from dpfunc.engines.rules.table import Grads, Use
from dpfunc.engines.tracing.discovery_cache import DiscoveryCache
from dpfunc.engines.tracing.sample_axis_discovery import CachedSampleAxes, SampleAxes
from dpfunc.engines.tracing.trace import Trace, WrongGuess, backward_pass, following
from dpfunc.engines.uses.accumulate import collect, refuse_escaped
from dpfunc.engines.uses.gradient_taps import Catch, leaf, pass_gradient, tapped
from dpfunc.engines.uses.parameter_source import has_parameter_source
from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.engines.uses.tracked import Tracked
from dpfunc.engines.uses.tracker import Tracker
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Batch, Engine, GroupFactors, LossFn, Params

DEFAULT_BUDGET = 2**30


# Gradients and saved tensors of a use with at most so many numbers are kept until the end of the backward pass.
_SMALL = 2**15


def apply_rule(use: Use, names: Sequence[str], grad: Tensor, saved: Sequence[Tensor]) -> Grads:
    """Per-sample gradients of a use by its rule, whose own operations are not traced."""
    with unseen(), exact(grad.device), torch.no_grad():
        return _apply_rule(use, names, False, grad, saved)


def _apply_rule(use: Use, names: Sequence[str], formed: bool, grad: Tensor, saved: Sequence[Tensor]) -> Grads:
    """Apply a rule where nothing is traced; `formed`: to gradients in memory, not to factors.

    Raises:
        UnsupportedModel: the shapes have no rule. WrongGuess: the same, where the sample axis was guessed.
    """
    needed = dict(zip(names, map(arrived, saved), strict=True))
    try:
        grads = use.rule.grads(use, arrived(grad), **{**use.options, **needed})
        for argument in use.wanted:
            if not grads[argument].fits(use.num_samples, use.shapes[argument]):
                raise use.refuse("the shapes broadcast in a way that has no rule.")
    except UnsupportedModel as error:
        raise error if use.sample_axis.guess is None else WrongGuess(use.sample_axis.guess) from error
    return {argument: Dense(grads[argument].dense()) for argument in use.wanted} if formed else grads


def _formed_tensors(use: Use, names: Sequence[str], grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with unseen(), exact(grad.device), torch.no_grad():
        grads = _apply_rule(use, names, True, grad, saved)
        return tuple(grads[argument].dense() for argument in use.wanted)


@dataclass
class FactorRecorder:
    """Record of one forward pass: leaves, and how their gradients become per-sample gradients.

    Args:
        budget: bytes that may still be formed. leaves: tensors whose gradients are asked for: private copies, and
            where dynamo traces those of all uses. readers: for each leaf, gradient -> {identity of the tracked tensor:
            its gradient by one use}.
        chosen: by parameters, operation and shape, the representation of gradients.
        forward_done: true in the backward pass, where checkpointing repeats parts of the forward pass.
        trace: of this step, which must find in each gradient the rows of its use; None where it is compiled.
        caught: gradients of the backward pass so far; None where dynamo traces it, and they are read after it.
    """

    budget: int
    trace: Trace | None = None
    caught: CaughtGrads | None = None
    leaves: list[Tensor] = field(default_factory=list)
    readers: list[Callable[[Tensor], Mapping[int, PerSampleGrad]]] = field(default_factory=list)
    chosen: dict[tuple[object, ...], Choice] = field(default_factory=dict)
    forward_done: bool = False

    def use(self, use: Use, targets: Mapping[str, int], output: Tensor, needed: Mapping[str, Tensor | None]) -> Tensor:
        """Form the gradients in the backward pass, or keep their factors."""
        names = [name for name, tensor in needed.items() if tensor is not None]
        saved = [tensor.detach() for tensor in needed.values() if tensor is not None]
        if self.caught is not None:
            self.caught.expect(targets)
            take = partial(_catch_grads, self.caught, use, targets, names, self.is_formed(use))
            return tapped(output, checked(self.trace, use, take), saved, [self.caught.anchor])
        if self.is_formed(use):
            dtype = accumulation_dtype(output.dtype)
            leaves = [leaf((use.num_samples, *use.shapes[arg]), dtype, output.device) for arg in use.wanted]
            readers = [partial(_read_dense, target) for target in targets.values()]
            result = tapped(output, checked(self.trace, use, partial(_formed_tensors, use, names)), saved, leaves)
        else:
            leaves = [leaf(tuple(use.output), output.dtype, output.device)]
            readers = [partial(_read_factors, use, targets, names, saved)]
            result = tapped(output, checked(self.trace, use, pass_gradient), [], leaves)
        if not self.forward_done:
            self.leaves += leaves
            self.readers += readers
        return result

    def end_forward(self) -> None:
        """Note the end of the forward pass: later uses are repeated by checkpointing, and are not recorded."""
        self.forward_done = True
        if self.caught is not None:
            self.caught.end_forward()

    def is_formed(self, use: Use) -> bool:
        """True if the gradients of a use are formed, and not kept as factors: cheaper, and within the budget."""
        choice = self.chosen.get(use.key)
        if choice is None:  # checkpointing asks again, and needs the same answer
            groupwise = self.caught is not None and self.caught.group_factors is not None
            choice = self.chosen[use.key] = use.choose(self.budget, groupwise=groupwise)
            if choice.representation == "formed" and not groupwise:  # a summed group returns its memory
                self.budget -= choice.num_bytes
        return choice.representation == "formed"

    def copies(self, tracked: Tracked, copies: Tensor, sample_axis: SampleAxis) -> None:
        """Record private copies, whose gradient is the per-sample gradient."""
        if self.caught is not None:
            self.caught.late.add(tracked.name)
        if not self.forward_done:
            self.leaves.append(copies)
            self.readers.append(partial(read_copies, tracked, sample_axis, self.trace))

    def derived(self, sources: Sequence[Tracked]) -> None:
        """Note that gradients of derived values are collected after the backward pass (`accumulate.collect`)."""
        if self.caught is not None:
            self.caught.late.update(tracked.name for tracked in sources)


def _catch_grads(
    caught: CaughtGrads,
    use: Use,
    targets: Mapping[str, int],
    names: Sequence[str],
    formed: bool,
    grad: Tensor,
    saved: tuple[Tensor, ...],
) -> tuple[None]:
    """Catch of a use: its gradients, formed or as factors, now or after the backward pass."""
    with torch._C.DisableTorchFunction():
        tensors, compute = (grad, *saved), partial(_apply_rule, use, names, False, grad, saved)
        later = sum(tensor.numel() for tensor in tensors) <= _SMALL
        caught.take(use, targets, compute, tensors, formed=formed, later=later)
    return (None,)


def _read_dense(target: int, grad: Tensor) -> Mapping[int, PerSampleGrad]:
    return {target: Dense(grad)}


def _read_factors(
    use: Use, targets: Mapping[str, int], names: Sequence[str], saved: Sequence[Tensor], grad: Tensor
) -> Mapping[int, PerSampleGrad]:
    grads = apply_rule(use, names, grad, saved)
    return {target: grads[argument] for argument, target in targets.items()}


def checked(trace: Trace | None, use: Use, catch: Catch) -> Catch:
    """A catch that first checks that the gradient has the rows of its use."""
    return catch if trace is None else partial(_checked, trace, use, catch)


def _checked(
    trace: Trace, use: Use, catch: Catch, grad: Tensor, saved: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    if not trace.settled:
        what = f"the gradient of {use.name} of parameter {shorten(list(use.wanted.values()))}"
        trace.credited(grad, use.sample_axis, what)
    return catch(grad, saved)


def read_copies(
    tracked: Tracked, sample_axis: SampleAxis, trace: Trace | None, grad: Tensor
) -> Mapping[int, PerSampleGrad]:
    """Per-sample gradients from the gradient of private copies: identity of the parameter -> its gradients."""
    if trace is not None:
        trace.credited(grad, sample_axis, f"the gradient of parameter {tracked.name!r}")
        if sample_axis.is_one_sample():
            with unseen():
                return {id(tracked.tensor): Dense(sample_axis.with_zeros_for_others(arrived(grad), trace.num_samples))}
    grads_B = arrived(grad).movedim(sample_axis.axis, 0)
    return {id(tracked.tensor): Dense(grads_B.reshape(len(grads_B), *tracked.tensor.shape))}


@dataclass(frozen=True)
class Bookkeeping:
    """The fast engine, made by `bookkeeping`, with its cache of observations about each loss."""

    memory_budget: int
    unproven: Literal["audit", "refuse"] = "refuse"
    _cache: DiscoveryCache = field(default_factory=DiscoveryCache, repr=False, compare=False)
    _group_factors: GroupFactors | None = field(default=None, repr=False, compare=False)

    def groupwise(self, group_factors: GroupFactors) -> Bookkeeping:
        """The same engine for one step, which sums each clip group as soon as its gradients are known."""
        return replace(self, _group_factors=group_factors)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSample | GroupwiseSums:
        """Compute the per-sample gradients of a batch."""
        if batch_size(batch) < 2:  # one sample's gradient is an ordinary gradient
            return loop()(loss_fn, params, batch)
        compute = partial(self._forward_and_backward, loss_fn, params, batch)
        result: PerSample | GroupwiseSums = self._cache.run_with_rediscovery(loss_fn, params, batch, compute)
        # A sample that is not finite must be left out of all groups.
        if isinstance(result, GroupwiseSums) and not result.is_finite():
            return replace(self, _group_factors=None)(loss_fn, params, batch)
        if self.unproven == "refuse":
            refuse_unproven(result.evidence.doubts)
        return result

    def watches(self, loss_fn: LossFn) -> bool:
        """True if the loss was told something of a batch, and must not change what it keeps."""
        return loss_fn in self._cache.watched

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> Engine:
        """Trace one step now; an engine for batches like this one, that can be compiled.

        Raises:
            UnsupportedModel: parameters that are split over ranks, which dynamo does not follow; a step that is not
                proven.
        """
        split = [name for name, param in params.items() if is_dtensor(param)]
        if split:
            raise UnsupportedModel(f"A step whose parameters {shorten(split)} are DTensors is run with compile=False.")
        known = self.sample_axes(loss_fn, params, batch)
        return lambda loss_fn, params, batch: self._forward_and_backward(loss_fn, params, batch, known)

    def sample_axes(self, loss_fn: LossFn, params: Params, batch: Batch) -> CachedSampleAxes:
        """The sample axis of each use, by one traced step that is proven without looking at its numbers.

        Raises:
            UnsupportedModel: it is not, or uses of a parameter have different sample axes.
        """
        compute = partial(self._forward_and_backward, loss_fn, params, batch)
        return self._cache.discover(loss_fn, batch_size(batch), compute)

    def _forward_and_backward(
        self, loss_fn: LossFn, params: Params, batch: Batch, sample_axes: SampleAxes
    ) -> PerSample | GroupwiseSums:
        """Per-sample gradients by one forward and one backward pass."""
        num_samples = batch_size(batch)
        leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
        if torch.compiler.is_compiling():  # dynamo differentiates outside of the mode; it cannot trace checkpointing
            recorder = FactorRecorder(self.memory_budget, sample_axes.trace)
            tracker = Tracker(leaves, num_samples, sample_axes, recorder)
            with torch.enable_grad(), tracker:
                losses_B = loss_fn(leaves, batch)
            with torch.enable_grad():
                return _backward(tracker, recorder, leaves, losses_B)
        trace = sample_axes.trace or Trace(num_samples)
        caught = CaughtGrads.of(self._group_factors, leaves, trace)
        recorder = FactorRecorder(self.memory_budget, sample_axes.trace, caught)
        tracker = Tracker(leaves, num_samples, sample_axes, recorder)
        with following(trace, batch), parameters_unchanged(params), torch.enable_grad(), backward_inside(), tracker:
            losses_B = loss_fn(leaves, batch)
            check_differentiable(losses_B, num_samples)
            if tracker.hidden:  # as reentrant checkpoints do, which lose gradients
                refuse_reentrant((), losses_B)
            recorder.end_forward()
            trace.credited(losses_B, SampleAxis(0), "the loss")
            with backward_pass(trace, losses_B, hooked=tracker.hooked):
                result = _backward(tracker, recorder, leaves, losses_B)
        return result


def bookkeeping(memory_budget: int | None = None, unproven: Literal["audit", "refuse"] = "refuse") -> Bookkeeping:
    """The fast engine: the model runs once, batched, and per-sample gradients are read off its backward pass.

    No vmap around the model: fused attention, padding masks, data-dependent control flow and gradient checkpointing
    work. Each operation that takes a trained parameter needs a rule (`dpfunc.engines.rules`). Every step is traced: the
    axis that holds the samples is followed through each operation, forward and backward.

    Linear layers that `parallelize_module` has split (ColwiseParallel, RowwiseParallel) may be trained. Where
    a parameter is a DTensor, norms and sums are those of this rank's part, as plain tensors. The squared norm of a
    split parameter is the sum over the ranks that hold it; one that is on all of them counts once.

    Args:
        memory_budget: bytes of per-sample gradients that may be formed in one call; what does not fit is kept as
            factors, if those are smaller. 1 GiB by default. Speed and memory only.
        unproven: a step in which the trace cannot show that samples do not influence each other is refused, or
            ("audit") goes on with its doubts written down; `clipped_grad` compares it with rows computed alone.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: an operation without a rule, or samples that influence each other.

    Guarantees:
        equals a loop over single samples (tests/engines/test_parity.py), also where layers are split
        (tests/distributed/test_tensor_parallel.py); no use of a parameter is left out (tests/engines/test_refusals.py).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> per_sample = bookkeeping()(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    >>> per_sample.sq_norms()["w"]
    tensor([25.,  1.])
    """
    budget = DEFAULT_BUDGET if memory_budget is None else integer("memory_budget", memory_budget, minimum=0)
    return Bookkeeping(budget, one_of("unproven", unproven, ("audit", "refuse")))


def _backward(
    tracker: Tracker, recorder: FactorRecorder, params: Params, losses_B: Tensor
) -> PerSample | GroupwiseSums:
    """Run the backward pass, and collect the recorded gradients."""
    caught = recorder.caught
    watched = {**params, **tracker.sentinels}
    anchors = () if caught is None else (caught.anchor,)
    inputs = (*recorder.leaves, *watched.values(), *anchors)
    grads = torch.autograd.grad(losses_B, inputs, torch.ones_like(losses_B), allow_unused=True)
    refuse_escaped(watched, grads[len(recorder.leaves) : len(inputs) - len(anchors)])
    uses: dict[int, list[PerSampleGrad]] = {} if caught is None else caught.finish()
    found = [(reader, grad) for reader, grad in zip(recorder.readers, grads, strict=False) if grad is not None]
    if caught is not None:
        check_depends(has_parameter_source() or any((found, uses, caught.sums)))
    for reader, grad in found:
        _add(uses, reader(grad))
    losses_B = arrived(losses_B.detach())
    collected = collect(tracker, params, uses)
    if caught is None or caught.group_factors is None:
        return PerSample(losses_B, collected)
    return _groupwise_sums(losses_B, collected, caught, caught.group_factors)


def _add(uses: dict[int, list[PerSampleGrad]], grads: Mapping[int, PerSampleGrad]) -> None:
    for target, grad in grads.items():
        uses.setdefault(target, []).append(grad)


def _groupwise_sums(
    losses_B: Tensor, collected: Mapping[str, PerSampleGrad], caught: CaughtGrads, group_factors: GroupFactors
) -> GroupwiseSums:
    """The sums of groups that were summed in the backward pass, and what was collected of the others.

    Raises:
        UnsupportedModel: a part of a summed group was known too late.
    """
    rest = {name: grad for name, grad in collected.items() if name not in caught.sums}
    unknown = [name for name in caught.sums if not isinstance(collected[name], Zeros)]
    if unknown:
        raise UnsupportedModel(
            f"The gradients of {shorten(unknown)} have a part that is known only after their clip groups were summed. "
            'Use one group, or engine="loop".'
        )
    return GroupwiseSums(losses_B, PerSample(losses_B, rest), caught, group_factors)
