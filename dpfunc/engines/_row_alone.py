"""One row alone, by ordinary autograd: what the loop computes, and what audits compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpfunc._utils.processes import local_like
from dpfunc.batches import tree_map
from dpfunc.engines._draws import RANDOM, OwnDraws, inside_vmap, random_operation, without_form
from dpfunc.engines._guards import loss as checks
from dpfunc.engines._guards.collectives import CollectiveRecorder, own_only
from dpfunc.engines._guards.loss import RowMemory, refuse_earlier, refuse_undeclared
from dpfunc.engines._levels import MOST_RAISED, opened, run_backward, told_of_transforms
from dpfunc.engines._recurrent import KINDS, arguments, layer_by_layer
from dpfunc.errors import DPFuncError
from dpfunc.types import Batch, LossFn, Params

_ASKING = frozenset((Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, torch.equal, torch.allclose, Tensor.equal))
_TELLING = frozenset(
    getattr(Tensor, name)
    for name in (
        "item", "tolist", "numpy", "__int__", "__float__", "__index__", "__complex__", "__array__", "__format__",
        "__repr__",
    )
)  # fmt: skip


class Alone(NamedTuple):
    """One row that was computed alone."""

    losses_1: Tensor
    grads: dict[str, Tensor]
    dtypes: frozenset[torch.dtype]
    asked: bool
    told: bool
    aux: Any = None


class _Told(BaseException):
    """The loss asks what nobody can answer. No Exception, so that code of the loss that catches all does not."""


class RowAlone(TorchFunctionMode):
    """One row alone: every torch function that the loss calls passes here."""

    def __init__(self, row: Batch, position: int, allowed: int | None = None) -> None:
        super().__init__()
        self.memory, self.allowed = RowMemory(), allowed
        self.draws = OwnDraws([position], torch.default_generator.get_state(), alone=True)
        self.asked = self.told = False
        self.stopped: BaseException | None = None
        self.raised = 0
        self.dtypes = set[torch.dtype]()  # of the numbers that the loss computes with
        self.memory.note(pytree.tree_leaves(row))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            refuse_earlier(args, kwargs, self.memory.depends)
            refuse_undeclared(func)
            if func in _ASKING or func in _TELLING:
                self._tell(func, args)
        except (DPFuncError, _Told) as error:
            self.stopped, self.raised = self.stopped or error, self.raised + 1
            if self.raised <= MOST_RAISED:
                raise
            args = self._other(args)
        found = self._computed(func, args, kwargs)
        if isinstance(found, Tensor) and found.is_floating_point():
            self.dtypes.add(found.dtype)
        self.memory.follow(func, args, kwargs, found)
        return found

    def refuse_stopped(self) -> None:
        """Raise what was refused, also where code of the loss has caught it."""
        if self.stopped is not None:
            raise self.stopped

    def _other(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments for a loss that catches each error and asks again: zeros are changed, it may wait for a number."""
        if self.allowed is None:
            return tuple(args)
        change = (self.raised % 2) * (-10) ** (self.raised // 2 % 9)
        return tuple(value + change if isinstance(value, Tensor) else value for value in args)

    def _tell(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        self.asked = True
        if not any(isinstance(value, Tensor) and self.memory.depends(value) for value in args):
            return
        self.told = True
        if self.allowed is not None:
            self.allowed -= 1
            if self.allowed < 0 or func in _TELLING:  # a loop of Python may wait for a number that zeros never have
                raise _Told

    def _computed(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in RANDOM and not without_form(kwargs) and not inside_vmap(0):
            found = random_operation(lambda values_1: values_1[0], self.draws, func, args, kwargs)
            if found is not NotImplemented:
                return found
        bound = arguments(args, kwargs) if func in KINDS else {"dropout": 0.0}
        drops = bound["dropout"] and bound["train"] and bound["num_layers"] > 1
        parts = partial(_recurrent, func) if drops else opened(func)
        if parts is None:
            return func(*args, **kwargs)
        with self:
            return parts(*args, **kwargs)


def _recurrent(func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return layer_by_layer(func, arguments(args, kwargs))


def _copies(params: Params) -> dict[str, Tensor]:
    """Leaves of a row's own: a loss that writes into parameters (`.data`) spoils these."""
    return {name: param.detach().clone().requires_grad_() for name, param in params.items()}


@contextmanager
def _inside(mode: RowAlone, recorder: CollectiveRecorder | None = None) -> Iterator[None]:
    """Inside, a loss is called for the row of a mode, and its backward pass runs."""
    try:
        with (
            own_only(recorder), torch.enable_grad(), checks.backward_inside(), checks.uncompiled(),
            told_of_transforms(), mode.draws.of_row(), mode,
        ):  # fmt: skip
            yield
    finally:
        mode.memory.end()


def row_gradients(
    loss_fn: LossFn, params: Params, row: Batch, position: int, recorder: CollectiveRecorder | None = None
) -> Alone:
    """Loss and gradients of a row, by its position in the batch. torch's generator is at the state of the step."""
    leaves, mode = _copies(params), RowAlone(row, position)
    with checks.parameters_unchanged(leaves), _inside(mode, recorder):
        losses_1, aux = checks.split_aux(loss_fn(leaves, row))
        mode.refuse_stopped()
        checks.refuse_reentrant((), checks.check_losses(losses_1, 1))
        checks.check_aux(aux, 1)
        grads = run_backward(losses_1.sum(), tuple(leaves.values()))
        mode.refuse_stopped()
    used = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    local_grads = {
        name: local_like(grad.to_dense() if grad.is_sparse else grad, params[name]).detach()
        for name, grad in used.items()
    }
    aux = None if aux is None else tree_map(Tensor.detach, aux)
    return Alone(losses_1.detach(), local_grads, frozenset(mode.dtypes), mode.asked, mode.told, aux)


def warm_up(loss_fn: LossFn, params: Params, row: Batch, allowed: int) -> None:
    """Call a loss with a made-up row. It is stopped where it would be told numbers, or ask for more than allowed."""
    leaves, mode = {name: param.requires_grad_() for name, param in params.items()}, RowAlone(row, 0, allowed)
    with suppress(_Told), _inside(mode):  # what is made of the row is no table of a shape: no row may use it
        loss_fn(leaves, row)
