"""Operations that draw random numbers for a batch, and the same numbers again for one of its rows alone.

Each such operation is noted with the state of its generator; the row's share of the numbers is found by drawing
all of them again. Nothing is kept but states of generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines.guards.modes import DispatchMode
from dpfunc.rng import generator_state, with_generator_state


def is_random(func: Any) -> bool:
    """True if an operation draws random numbers.

    Fused attention has the tag for its dropout only: it is judged by its probability of dropout instead.
    """
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and "attention" not in func._schema.name


@dataclass(frozen=True)
class RandomCall:
    """One operation that drew random numbers.

    Args:
        func: the operation. args, kwargs: its arguments. state: of the generator before it. shape: of its result.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: Tensor
    shape: tuple[int, ...] = ()

    def with_shape_of(self, result: object) -> RandomCall:
        """The call with the shape of its result."""
        first = result[0] if isinstance(result, (list, tuple)) else result
        return replace(self, shape=tuple(first.shape) if isinstance(first, Tensor) else ())

    def state_now(self) -> Tensor:
        """The state that its generator has now."""
        return generator_state(_device(self.args, self.kwargs))


def random_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> RandomCall:
    """Note an operation that is about to draw."""
    kept = tuple(value.detach() if isinstance(value, Tensor) else value for value in args)
    return RandomCall(func, kept, dict(kwargs), generator_state(_device(args, kwargs)))


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    tensors = [value for value in args if isinstance(value, Tensor)]
    return tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")


def _dropout_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return float(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))
    return 0.0


class OtherRandomCalls(Exception):
    """The row alone draws other numbers than it drew with the others; never leaves the engines."""


class _Replayed(DispatchMode):
    """Mode that gives row `row` of `num_samples` its random numbers of the whole batch, in the order of the calls."""

    def __init__(self, random_calls: Sequence[RandomCall], row: int, num_samples: int) -> None:
        super().__init__()
        self.random_calls, self.row, self.num_samples, self.next = random_calls, row, num_samples, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not is_random(func):
            if "attention" in str(func) and _dropout_of(func, args, kwargs or {}):
                raise OtherRandomCalls(str(func))
            return func(*args, **(kwargs or {}))
        if self.next >= len(self.random_calls) or self.random_calls[self.next].func is not func:
            raise OtherRandomCalls(str(func))
        call = self.random_calls[self.next]
        self.next += 1
        return self._again(call, func, args, kwargs or {})

    def _again(self, call: RandomCall, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = _device(args, kwargs)
        in_place = func._schema.is_mutable
        like = func._schema.name.endswith("_like") or "dropout" in func._schema.name
        with with_generator_state(call.state, device):
            given = list(call.args)
            if in_place or like:  # only the shape of the first argument matters
                given[0] = args[0].new_ones(call.shape)
            every = func(*given, **call.kwargs)
        if "dropout" in func._schema.name:
            mask = self._share(every[1], tuple(args[0].shape))
            kept = 1.0 - args[1] if len(args) > 1 else 1.0
            return args[0] * mask / kept if kept else args[0] * mask, mask
        if in_place:
            return args[0].copy_(self._share(every, tuple(args[0].shape)))
        with with_generator_state(call.state, device):
            wanted = func(*args, **kwargs)
        return self._share(every, tuple(wanted.shape))

    def _share(self, every: Tensor, wanted: tuple[int, ...]) -> Tensor:
        """Part of the numbers drawn for all rows that belongs to this one; all where the shape is that of one row."""
        if tuple(every.shape) == wanted:
            return every
        differing = [axis for axis in range(min(every.ndim, len(wanted))) if every.shape[axis] != wanted[axis]]
        if every.ndim != len(wanted) or len(differing) != 1:
            raise OtherRandomCalls("another shape")
        (axis,) = differing
        if every.shape[axis] != wanted[axis] * self.num_samples:
            raise OtherRandomCalls("another shape")
        return every.narrow(axis, self.row * wanted[axis], wanted[axis]).clone()


@contextmanager
def replayed(random_calls: Sequence[RandomCall], row: int, num_samples: int) -> Iterator[_Replayed]:
    """Inside, one row alone has the random numbers that it had among the others.

    Raises:
        OtherRandomCalls: it draws others.
    """
    with _Replayed(random_calls, row, num_samples) as mode:
        yield mode
