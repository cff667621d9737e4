"""One operation as the handlers of families get it: its arguments, its result, and the rows of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, alike, same_ids, uniform

Type = Rows | Mixed | None
"""The samples that a tensor depends on: one sample a row, several samples, or no sample at all."""


class Types(Protocol):
    """Source of the types of tensors: what each depends on."""

    num_samples: int

    def type_of(self, tensor: Tensor) -> Type: ...

    def uniform(self, tensor: Tensor, rows: Rows, axis: int) -> bool: ...

    def keep_integers(self, values: Tensor) -> None: ...

    def are_own_integers(self, values: Tensor, rows: Rows) -> bool: ...

    def note_read(self, what: str, value: Tensor, result: object) -> None: ...

    def mark(self, what: str, tensor: Tensor) -> None: ...

    def marked(self, what: str, tensor: Tensor) -> bool: ...


class Call(NamedTuple):
    """Operation with its arguments and result, and the types of its inputs.

    Args:
        types: of tensors. name: of the operation. args, kwargs: as given. out: what it returned.
        inputs: the tensors among the arguments. kinds: their types, by identity.
    """

    types: Types
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    inputs: list[Tensor]
    kinds: dict[int, Type]

    @staticmethod
    def of(types: Types, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Call:
        """Collect the tensors among the arguments of an operation, with their types."""
        inputs = list(tensors_of((*args, *kwargs.values())))
        return Call(types, name, args, kwargs, out, inputs, {id(tensor): types.type_of(tensor) for tensor in inputs})

    def constant(self) -> bool:
        """True if no argument depends on the batch."""
        return all(kind is None for kind in self.kinds.values())

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def type_of(self, tensor: Tensor) -> Type:
        """Type of a tensor, from the inputs of the call if it is one of them."""
        key = id(tensor)
        return self.kinds[key] if key in self.kinds else self.types.type_of(tensor)

    def mixed(self, why: str = "") -> Mixed:
        """The result depends on several samples."""
        return Mixed(f"{self.name}{f' ({why})' if why else ''}")


Handler = Callable[[Call], Any]
"""A call -> the type of its result, or a list with one for each tensor that it returns."""


Single = Callable[[Call], Type]
"""A call -> the type of its only result, or of each of them."""


def tensors_of(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors among values, also inside of lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def doubt_in(kind: Type) -> str:
    """The reason why numbers may depend on several samples; empty if they do not."""
    return "" if kind is None else kind.reason if isinstance(kind, Mixed) else kind.doubt


def doubted(kind: Rows | None, doubt: str) -> Type:
    """Rows that are not proven for this reason, Mixed without rows; unchanged if the reason is empty."""
    if kind is not None:
        return kind.doubted(doubt)
    return Mixed(doubt) if doubt else None


def shaped_too(kind: Type) -> Type:
    """The same, of a tensor whose shape depends on values of the batch."""
    if isinstance(kind, Mixed):
        return kind._replace(shaped=True)
    return kind and kind._replace(ragged=True)


class Aligned(NamedTuple):
    """A tensor whose axis `axis` corresponds to an axis of the result; -1 where it has none."""

    tensor: Tensor
    axis_of: Callable[[int], int]
    """axis of the tensor -> axis of the result; -1 where it has none there (it is contracted, or reduced)."""
    axis_in: Callable[[int], int]
    """axis of the result -> axis of the tensor; -1 where it has none."""


def broadcast(tensor: Tensor, ndim: int) -> Aligned:
    """A tensor that is broadcast from the right to `ndim` axes."""
    shift = ndim - tensor.ndim
    return Aligned(tensor, lambda axis: axis + shift, lambda axis: axis - shift)


def leading(tensor: Tensor) -> Aligned:
    """A tensor whose axes are those of the result, from the left."""
    return Aligned(tensor, lambda axis: axis, lambda axis: axis if axis < tensor.ndim else -1)


def lettered(tensor: Tensor, letters: str, out: str) -> Aligned:
    """A tensor in an einsum: one letter an axis."""
    return Aligned(tensor, lambda axis: out.find(letters[axis]), lambda axis: letters.find(out[axis]))


def combined(call: Call, operands: Sequence[Aligned], forbidden: Sequence[int] = ()) -> Type:
    """The type of a result each of whose numbers is computed from numbers at the same position of the sample axis.

    Args:
        operands: tensors and how their axes correspond to those of the result.
        forbidden: axes of the result along which the operation combines positions.

    Returns:
        Rows if all tensors with rows have the same ones along the same axis, and the others are the same for each row;
        rows with a doubt where that is probable and not proven; Mixed otherwise.
    """
    kinds = [call.type_of(operand.tensor) for operand in operands]
    found = _rows_of_all(call, operands, kinds, forbidden)
    if isinstance(found, Mixed):
        return found
    constants = [operand for operand, kind in zip(operands, kinds, strict=True) if kind is None]
    differing = "" if found is None else _doubt_of_constants(call, constants, found)
    return doubted(found, next(filter(None, map(doubt_in, kinds)), differing))


def _rows_of_all(call: Call, operands: Sequence[Aligned], kinds: Sequence[Type], forbidden: Sequence[int]) -> Type:
    """The rows that all operands with rows have in the result; Mixed if they are different ones, None without any."""
    found: Rows | None = None
    for operand, kind in zip(operands, kinds, strict=True):
        if not isinstance(kind, Rows):
            continue
        here = _in_result(kind, operand, forbidden)
        if here is None:
            return call.mixed()
        if found is not None and (found.axis != here.axis or not alike(found, here)):
            return call.mixed("of different samples")
        if found is None or here.of > found.of:
            found = here
    return found


def _in_result(rows: Rows, operand: Aligned, forbidden: Sequence[int]) -> Rows | None:
    """The rows of an operand on their axis of the result; None if the positions of that axis are combined."""
    if rows.axis == ONE_SAMPLE:
        return rows
    axis = operand.axis_of(rows.axis)
    if axis < 0 or axis in forbidden:
        return None
    return rows if axis == rows.axis else rows.moved(axis)


def _doubt_of_constants(call: Call, constants: Sequence[Aligned], rows: Rows) -> str:
    """The doubt that constants differ between rows of the result; empty if each row has the same."""
    if rows.axis == ONE_SAMPLE:
        return ""
    if all(call.types.uniform(each.tensor, rows, each.axis_in(rows.axis)) for each in constants):
        return ""
    return f"{call.name} (with values that differ between positions of the batch)"


def assumed(call: Call, reason: str) -> list[Type]:
    """The types of results of an operation that is not known: the rows stay where they were, if the shape allows it."""
    results = list(call.out) if isinstance(call.out, (list, tuple)) else [call.out]
    inputs = [(tensor, call.type_of(tensor)) for tensor in call.inputs]
    if all(kind is None for _, kind in inputs):
        return [None] * len(results)
    return [_assumed_type(result, inputs, reason) if isinstance(result, Tensor) else None for result in results]


def _assumed_type(result: Tensor, inputs: Sequence[tuple[Tensor, Type]], reason: str) -> Type:
    for tensor, kind in inputs:
        if isinstance(kind, Rows) and kind.axis != ONE_SAMPLE:
            same = [axis for axis in (kind.axis, 0) if axis < result.ndim]
            fits = [axis for axis in same if result.shape[axis] == tensor.shape[kind.axis]]
            if fits:
                return kind.moved(fits[0]).doubted(reason)
    return Mixed(reason)


__all__ = ["Aligned", "Call", "Handler", "Type", "Types", "assumed", "broadcast", "combined", "leading", "lettered",
           "same_ids", "tensors_of", "torch", "uniform"]  # fmt: skip
