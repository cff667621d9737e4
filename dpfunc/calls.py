"""Earlier calls of one private step, by which usual mistakes of a loop are found; no result depends on them.

May import: plan and below. Privacy depends on it: yes.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpfunc import errors
from dpfunc._utils.memory import objects_of
from dpfunc._utils.parts import local
from dpfunc._utils.validation import shorten, warn
from dpfunc.types import Params

_UNCHANGED = (
    "dp_step got the parameters of its first step again, with nothing written into them{}: each step spends budget, "
    "and so far none changes anything. An optimizer takes params.values(), of functionalize or lora.attach, not "
    "model.parameters(), and reads .grad: dpfunc.set_grads(params, grads), then optimizer.step()."
)
_logger = logging.getLogger("dpfunc.step")


_REMEMBERED = 100  # batches that are still in memory


class _Given(NamedTuple):
    """Marks of a batch that a step got: its memory (not kept alive), some of its numbers, and its draw."""

    memory: list[StorageWeakRef]
    some: list[Tensor]  # the counters of writes in place miss those by numpy, and into `tensor.data`
    drawn: Tensor


class Calls:
    """Memory of the calls of one private step, with checks that compare a new call with them."""

    def __init__(self) -> None:
        self._given: dict[tuple[object, ...], _Given] = {}
        self._stateless, self._compared, self._looked, self._without_gradient = False, False, False, 0
        self._first: dict[str, tuple[StorageWeakRef, int, Tensor]] | None = None

    def note(self, params: Params, *, stateless: bool, without_gradient: bool) -> None:
        """Record a call whose result was released."""
        self._stateless = self._stateless or stateless
        self._without_gradient += without_gradient
        if self._first is None:
            counted = {n: (local(p), p) for n, p in params.items() if not p.is_inference()}  # others always changed
            self._first = {n: (_storage(own), own._version, _some(own)) for n, (own, p) in counted.items()}

    def first_rows(self) -> bool:
        """True at the first call."""
        self._looked, before = True, self._looked
        return not before

    def refuse_second_run(self) -> None:
        """Refuse a second call without a state, which would be a second run."""
        if self._stateless:
            raise errors.InvalidArgument(
                "dp_step was called without a state more than once. Each such call is a run of its own with its own "
                "ledger, and nobody adds them up. In a loop, pass the state on: begin with state = "
                "dp_step.init(params, dpfunc.secure_key()), then grads, state, unreleased = dp_step(params, batch, "
                "state). Nothing was spent."
            )

    def refuse_given_again(self, tensors: Sequence[Tensor], drawn: Tensor) -> None:
        """Refuse the tensors of an earlier step, unless the same records were drawn again; then note them.

        Memory that is gone, or was written since, is another batch. The same records in other memory are not seen.

        Guarantees:
            tests/test_state.py::test_tensors_of_an_earlier_step_are_refused.
        """
        memory = [_storage(local(tensor)) for tensor in tensors]
        place = tuple((own.cdata, *_place(tensor)) for own, tensor in zip(memory, tensors, strict=True))
        given = _Given(memory, [_some(tensor) for tensor in tensors], drawn)
        alive = {at: each for at, each in self._given.items() if not any(own.expired() for own in each.memory)}
        before = alive.get(place, given)
        if not torch.equal(before.drawn, drawn) and all(map(torch.equal, before.some, given.some)):
            raise errors.SamplingMismatch(
                "Expected a batch of this step's own draw, got the tensors of an earlier step, for which the plan's "
                "sampler drew other records. Epsilon holds for a new draw in each step: an optimizer that takes two "
                "gradients of one batch (sharpness-aware steps), a list of batches that is run through again, and the "
                "first rows of the data each time have another law. Take the batch of each step from "
                "plan.batches(state) or plan.loader(dataset, state). To use all records in each step, plan with "
                "sampling_prob=1. Nothing was spent."
            )
        self._given = dict([*alive.items(), (place, given)][-_REMEMBERED:])

    def refuse_unmoved(self, params: Params) -> None:
        """At the second step, refuse parameters into which nothing was written, where optimizers have others.

        Without an optimizer it is logged: one may look at gradients at one place. Copies are other parameters.

        Guarantees:
            tests/test_optimizer.py::test_an_optimizer_of_other_parameters_is_refused.
        """
        if self._first is None or self._compared:
            return
        self._compared, first = True, self._first

        def still(name: str, own: Tensor) -> bool:
            known, version, some = first[name]
            there = not known.expired() and known.cdata == own.untyped_storage()._cdata and version == own._version
            return there and torch.equal(some, _some(own))

        stay = [name for name, param in params.items() if name in first and still(name, local(param))]
        others = _of_optimizers(stay, params) if stay else ""
        if others and len(stay) < len(params):
            warn(f"Nothing was written into parameters{others}. Each step spends budget on them.", errors.RunWarning)
        elif others:
            self._compared = False  # the next call is refused too
            raise errors.InvalidArgument(
                f"{_UNCHANGED.format(others)} For several steps at the same parameters, on purpose, give each a copy, "
                "{n: p.clone() for n, p in params.items()}. This step was not taken."
            )
        elif len(stay) == len(params):
            _logger.warning(_UNCHANGED.format(""))

    def warn_if_lost(self, without_gradient: bool) -> None:
        """Warn of the second step that lost its records: half of them not finite, or all of them zero or not finite."""
        if without_gradient and self._without_gradient == 1:
            warn(
                "In this step and an earlier one at least half of the records of this process had no finite gradient, "
                "or all had none but zero. Those count as zero: budget is spent, and mostly noise released. Look for "
                "NaN and inf in inputs, labels and the loss (log, division, masks), and for a loss that leaves out "
                "the params it is given. This warning was computed from private data: it reveals this about two "
                "batches, and no noise protects that. Do not publish it.",
                errors.NoGradientWarning,
            )


def _of_optimizers(stay: Sequence[str], params: Params) -> str:
    """Parameters that no optimizer holds; empty if no optimizer is found, or it may belong to something else."""
    found = objects_of(torch.optim.Optimizer)
    held = [tensor for each in found for group in each.param_groups for tensor in group["params"]]
    places = {local(tensor).untyped_storage()._cdata for tensor in held}
    rest = {name for name, p in params.items() if local(p).untyped_storage()._cdata not in places}
    idle = any(not each.state for each in found) and any(tensor.grad is None for tensor in held)
    left = [name for name in stay if name in rest]
    if not left or not (len(rest) < len(params) or (idle and len(stay) == len(params))):
        return ""
    return f": {shorten(left)}, which no optimizer has ({shorten(sorted({type(each).__name__ for each in found}))})"


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Place and shape of a tensor in its memory, and the number of torch's writes there."""
    written = 0 if tensor.is_inference() else tensor._version
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, written


def _some(tensor: Tensor) -> Tensor:
    """The bits of a few numbers, at most 8 on each axis: torch's counter misses writes into `tensor.data`."""
    own = local(tensor).detach()
    some = own[tuple(slice(None, None, -(-size // 8) or 1) for size in own.shape)]
    return some.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)  # NaN equals itself
