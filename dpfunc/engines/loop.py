"""The engine of single samples with ordinary autograd: slow, correct, and without requirements on the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpfunc._utils.processes import in_lockstep, local, on_any_process, refused_by_all
from dpfunc.batches import Memo, batch_size, row_alone
from dpfunc.engines._guards import loss as checks
from dpfunc.engines._guards.collectives import CollectiveRecorder, check_replicated
from dpfunc.engines._guards.kept_state import python_state, refuse_counting
from dpfunc.engines._guards.loss import refuse_kept
from dpfunc.engines._levels import positions_of
from dpfunc.engines._per_sample import Dense, PerSample
from dpfunc.engines._row_alone import Alone, row_gradients
from dpfunc.engines.prepare import warmed
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Batch, LossFn, Params


@dataclass(frozen=True)
class Loop:
    """Engine that `loop` returns."""

    by_position: ClassVar[bool] = True  # random numbers of a row are a function of the seed and of its position
    _warmed: Memo[None] = field(default_factory=Memo, repr=False, compare=False)

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> None:
        """Let the loss build what it keeps for rows of this shape."""
        self._warmed(partial(warmed, loss_fn, params, batch), loss_fn, params, batch)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSample:
        self.prepare(loss_fn, params, batch)
        return rows_alone(loss_fn, params, batch, positions_of(range(batch_size(batch))))


def loop() -> Loop:
    """The engine of last resort: one forward and backward pass a sample. All B gradients are in memory.

    Random numbers of a row are a function of the seed and of its position, the same as those of `auto`.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: the loss communicates between ranks, other than in tensor parallel layers; or these give
            parameters that are not split gradients in parts; or it changes what it keeps from call to call, or uses a
            tensor of another row.

    Guarantees:
        equals the reference (tests/engines/test_parity.py); draws what `auto` draws (tests/engines/test_draws.py);
        keeps nothing of a row (tests/engines/guards/test_kept_state.py).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> loop()(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])).sq_norms()["w"]
    tensor([25.,  1.])
    """
    return Loop()


@checks.unfollowed_code_is_an_error()
def rows_alone(
    loss_fn: LossFn, params: Params, batch: Batch, positions: Sequence[int], *, read: bool = False
) -> PerSample:
    """Gradients of rows at these positions of the batch, one after the other; see `loop`."""
    refuse_kept(loss_fn)
    num_samples = batch_size(batch)
    recorder, seed = CollectiveRecorder(), torch.default_generator.get_state()
    parts = {name: local(param.detach()) for name, param in params.items()}
    grads_B = {name: part.new_zeros(num_samples, *part.shape) for name, part in parts.items()}
    before = python_state(loss_fn) if num_samples else ()
    losses, aux, reached, asked, told = list[Tensor](), list[Any](), not num_samples, read, False
    for row, position in enumerate(positions):
        torch.default_generator.set_state(seed)
        alone = row_gradients(loss_fn, params, row_alone(batch, row), position, recorder)
        reached, asked, told = reached or bool(alone.grads), asked or alone.asked, told or alone.told
        losses.append(alone.losses_1)
        aux.append(alone.aux)
        _keep(grads_B, row, alone.grads)
        # what one row changes, another could change back; what no row decides changes at the first call, or never
        if (alone.told or not row) and not in_lockstep():
            torch.default_generator.set_state(seed)  # a seed that the loss has set is no state: each row begins anew
            refuse_counting(loss_fn, before)
    checks.check_depends(reached, told=asked)
    losses_B = torch.cat(losses) if losses else next(iter(parts.values())).new_zeros(0)
    check_replicated(losses_B, grads_B, params, recorder.meshes)
    grads = {name: Dense(grad_B) for name, grad_B in grads_B.items()}
    result = PerSample(losses_B, grads, alone=True, aux=checks.joined_aux(aux))
    torch.default_generator.set_state(seed)
    torch.empty((), device="cpu").random_()  # the next step draws other numbers, whatever the rows have drawn
    if num_samples and not in_lockstep():  # FSDP keeps what it communicates
        refuse_counting(loss_fn, before)
    if on_any_process(told and num_samples > 1):
        torch.default_generator.set_state(seed)
        again = row_gradients(loss_fn, params, row_alone(batch, 0), positions[0], recorder)
        with refused_by_all():
            _check_repeats(again, losses_B, grads_B)
    return result


def _keep(grads_B: dict[str, Tensor], row: int, grads: Mapping[str, Tensor]) -> None:
    """Put the gradients of a row into their places; that of a single one is not copied."""
    for name, grad in grads.items():
        if len(grads_B[name]) == 1 and grad.dtype == grads_B[name].dtype:
            grads_B[name] = grad[None]
        else:
            grads_B[name][row] = grad


def _check_repeats(again: Alone, losses_B: Tensor, grads_B: Mapping[str, Tensor]) -> None:
    """Check that the first of several rows gives the same again: a loss may keep what `python_state` does not reach."""
    pairs = [(again.losses_1, losses_B[:1])]
    pairs += [(grad.norm(), grads_B[name][0].norm()) for name, grad in again.grads.items()]
    if not all(bool(torch.isclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True).all()) for one, other in pairs):
        raise UnsupportedModel(
            "The loss of a row, or its gradient, is another one after other rows were computed: it keeps Python "
            "numbers of rows from call to call, or draws random numbers of another library. Compute each loss from "
            "its own row alone, with torch's random numbers."
        )
