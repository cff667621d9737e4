"""Writes in place: their effect on the type of a memory, and those that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpfunc.engines.tracing import rows as rows_module
from dpfunc.engines.tracing.call import Call, Type, broadcast, combined, tensors_of
from dpfunc.engines.tracing.entries import Constant, Entry, doubted, fits, key_of, part, pieces_of
from dpfunc.engines.tracing.operations import Kind, Known, undeclared
from dpfunc.engines.tracing.results import constant_of, law_of_draws, types_of
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, Stored, located, stored
from dpfunc.errors import UnsupportedModel

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace


_FILLING = (Kind.FILLED, Kind.RANDOM)


def copy_before_write(trace: Trace, known: Known, args: tuple[Any, ...]) -> Tensor | None:
    """Copy a tensor of constants before numbers of the batch are computed into it.

    The copy is kept until it is known on which axis the samples are: then it must be the same for each of them.
    """
    if 0 not in known.written or known.kind is not Kind.POINTWISE or not isinstance(args[0], Tensor) or trace.alone:
        return None
    if trace.entry_of(args[0]) is not Constant.ANY or all(trace.type_of(t) is None for t in tensors_of(args[1:])):
        return None
    own = part(args[0]).detach()
    numbers = own.new_empty(0).set_(own.untyped_storage().clone())
    constants = numbers.as_strided(own.shape, own.stride(), own.storage_offset())
    trace.note(constants, Constant.ANY)
    return constants


def clear_unwritten(result: Tensor, before: int) -> None:
    """Set memory behind its first `before` bytes to zero, which nobody has written into: other tensors had it before.

    So it has the same numbers for each sample, as its type says.
    """
    own = part(result)
    if own.layout is torch.strided and own.untyped_storage().nbytes() > before:
        memory = torch.empty(0, dtype=torch.uint8, device=own.device).set_(own.untyped_storage())
        memory[before:].zero_()


def _was_uniform(constants: Tensor | None, made: Stored) -> bool:
    """True if each row of this memory was the same before the write, by the copy that was taken of it."""
    if constants is None:
        return False
    memory = constants.new_empty(0, dtype=torch.uint8).set_(constants.untyped_storage())
    numbers = memory[made.base :]
    if len(numbers) != made.step * made.count:
        return False
    rows = numbers.view(made.count, made.step)
    return bool((rows == rows[:1]).all())


def refuse_writes(trace: Trace, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse writes into the caller's batch, and of values of the batch into memory from outside of the loss."""
    for target in (*_written(known, args, kwargs), *undeclared(known, args)):
        own = part(target)
        if own.layout is not torch.strided or not own.numel():
            continue
        entry = trace.entry_of(own)
        if entry is None:
            _refuse_outside(trace, known, target, args, kwargs)
        elif isinstance(entry, Stored) and entry.end:
            raise UnsupportedModel(
                f"The loss writes into a tensor of its batch ({known.name}), which others share. Clone it first."
            )


def _written(known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into."""
    given = (kwargs.get(at) if isinstance(at, str) else args[at : at + 1] for at in known.written)
    return list(tensors_of(given))


def _refuse_outside(trace: Trace, known: Known, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    trace.type_of(target)  # refuses what an earlier step has left
    if any(trace.type_of(tensor) is not None for tensor in tensors_of((*args, *kwargs.values()))):
        raise UnsupportedModel(
            f"The loss writes values of the batch ({known.name}) into a tensor {tuple(target.shape)} that was made "
            "outside of it (a buffer, a memory bank, a codebook): records of one step would reach the gradients "
            "of the next. Use out-of-place operations, model.eval(), or replace the layer."
        )


@dataclass(frozen=True)
class _Write:
    """Numbers that were written into a tensor.

    Args:
        target: the tensor. covers_all: it is all of its memory. kind: type of the numbers, None for constants.
        law: of constants; filled: they are one number, or random. constants: a copy of the memory before.
    """

    target: Tensor
    covers_all: bool
    kind: Type
    law: Constant
    filled: bool
    constants: Tensor | None

    @staticmethod
    def of(target: Tensor, kind: Type, law: Constant, filled: bool, constants: Tensor | None) -> _Write:
        """Compare the target with its memory, and with the shape that rows imply."""
        as_large = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        covers_all = as_large and _is_dense(target)
        if isinstance(kind, Rows) and not fits(kind, target):
            kind = Mixed("a result of another shape than was expected")
        return _Write(target, covers_all, kind, law, filled, constants)


def _is_dense(tensor: Tensor) -> bool:
    """True if no two positions share a number, and none is left out between them."""
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != length:
            return False
        length *= size
    return True


def write(trace: Trace, known: Known, call: Call, args: tuple[Any, ...], constants: Tensor | None) -> None:
    """Store the types of the memory that an operation writes into.

    Args:
        args: of the operation; the first one in `call` is what it was before, where that was copied (`constants`).
    """
    targets = _written(known, args, call.kwargs)
    kinds = _types_written(trace, known, call, targets)
    law = _law(trace, known, call, targets)
    for target, kind in zip(map(part, targets), kinds, strict=True):
        if target.layout is torch.strided:
            _overwrite(trace, _Write.of(target, kind, law, known.kind in _FILLING, constants))
        else:
            _overwrite_sparse(trace, target, kind)
    for result in tensors_of([call.out]):
        if not any(result is target for target in targets) and trace.entry_of(result) is None:
            trace.store(result, kinds[0], Constant.ANY)


def _law(trace: Trace, known: Known, call: Call, targets: Sequence[Tensor]) -> Constant:
    """The kind of constants that are written, if they depend on no sample."""
    if known.kind is Kind.RANDOM:
        return law_of_draws(trace, _not_among(call.inputs, targets))
    return Constant.EQUAL if known.kind is Kind.FILLED else constant_of(trace, known, call.inputs)


def _not_among(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor for tensor in tensors if not any(tensor is target for target in targets)]


def _types_written(trace: Trace, known: Known, call: Call, targets: Sequence[Tensor]) -> list[Type]:
    """The types of the numbers that are written into each tensor."""
    if known.kind in _FILLING:
        given = _not_among(call.inputs, targets)
        return [combined(call, [broadcast(tensor, target.ndim) for tensor in given]) for target in targets]
    if known.name == "copy_":
        given = [value for value in call.args[1:2] if isinstance(value, Tensor)]  # or a Python number
        return [combined(call, [broadcast(tensor, call.args[0].ndim) for tensor in given])]
    if call.constant():
        return [None] * len(targets)
    if call.out is None:  # of operations on lists: what they give is what they write
        call = call._replace(out=list(targets))
    return types_of(trace, known, call, len(targets))


def _overwrite(trace: Trace, write: _Write) -> None:
    """Note the entry of a memory after a write."""
    before = trace.entry_of(write.target)
    if (before is None and write.kind is None) or not write.target.numel():
        return
    entry = Constant.ANY if before is None else before
    if _is_shaped_by_values(entry):
        if write.covers_all and write.kind is None:  # its shape still depends on values
            return
        write = replace(write, kind=_type_of_ragged_write(trace, write.target, entry, write.kind))
    trace.note(write.target, _entry_after(trace, write, entry))


def _is_shaped_by_values(entry: Entry) -> bool:
    return entry.ragged if isinstance(entry, Stored) else isinstance(entry, Mixed) and entry.shaped


def _entry_after(trace: Trace, write: _Write, entry: Entry) -> Entry:
    """The entry of a memory after a write."""
    if write.kind is None:
        return _entry_after_constants(trace, write, entry)
    if isinstance(write.kind, Rows):
        return _entry_after_rows(trace, write, write.kind, entry)
    return write.kind if write.covers_all or not isinstance(entry, Stored) else doubted(entry, write.kind.reason)


def _overwrite_sparse(trace: Trace, target: Tensor, kind: Type) -> None:
    for piece in pieces_of(target):
        if kind is not None and not trace.alone and key_of(piece) in trace.entries:
            trace.note(piece, Mixed("a sparse tensor of the batch"))


def _type_of_ragged_write(trace: Trace, target: Tensor, entry: Entry, kind: Type) -> Type:
    """Type of a write into a tensor whose shape depends on values: its own rows, or mixed."""
    if isinstance(kind, Mixed):
        return kind._replace(shaped=True)
    if kind is None or _has_rows(trace, target, entry, kind):
        return kind
    return Mixed("a write into a tensor whose shape depends on values of the batch", shaped=True)


def _has_rows(trace: Trace, target: Tensor, entry: Entry, kind: Rows) -> bool:
    """True if a tensor has these rows already, by the entry of its memory."""
    current = located(entry, target, trace.num_samples) if isinstance(entry, Stored) else None
    return current is not None and current.axis == kind.axis and rows_module.alike(current, kind)


def _entry_after_constants(trace: Trace, write: _Write, entry: Entry) -> Entry:
    """The entry of the memory of a tensor after constants were written into it."""
    if isinstance(entry, Constant):
        return write.law if write.covers_all else Constant.ANY
    if write.covers_all and write.filled:
        return write.law
    if isinstance(entry, Mixed) or trace.alone:
        return entry
    current = located(entry, write.target, trace.num_samples)
    if current is not None and current.doubt:
        return doubted(entry, current.doubt)
    if write.law is Constant.ANY:
        trace.note_numbers_read()
    if _same_for_each_row(write, current, entry):
        return entry
    return doubted(entry, "a write of constants that differ between positions of the batch")


def _same_for_each_row(write: _Write, rows: Rows | None, entry: Stored) -> bool:
    """True if a tensor has all rows of its memory, and the same constants were written into each."""
    if rows is None:
        return False
    every = rows.count == entry.count and (rows.axis != ONE_SAMPLE or entry.count == 1)
    return every and (write.law is not Constant.ANY or rows_module.uniform(write.target, rows, rows.axis))


def _entry_after_rows(trace: Trace, write: _Write, kind: Rows, entry: Entry) -> Entry:
    """The entry of the memory of a tensor after rows were written into it."""
    if isinstance(entry, Mixed):
        return stored(kind, write.target) if write.covers_all and not trace.alone else entry
    if trace.alone or (isinstance(entry, Constant) and write.covers_all):
        return stored(kind, write.target)
    if isinstance(entry, Constant):
        return _entry_of_base(trace, write, kind, entry)
    if _has_rows(trace, write.target, entry, kind):
        return doubted(entry, kind.doubt)
    return stored(kind, write.target) if write.covers_all else Mixed("a write over other samples")


def _entry_of_base(trace: Trace, write: _Write, kind: Rows, before: Constant) -> Entry:
    """The entry of a memory of constants after rows were written into a part of it, the first one."""
    made = _rows_of_base(trace, write.target, kind)
    if made is None:
        return Mixed("a write into a part of a tensor")
    if before is Constant.EQUAL:
        return made
    trace.note_numbers_read()
    if _was_uniform(write.constants, made):
        return made
    return doubted(made, "a write into a tensor whose other values differ between positions")


def _with_the_rest(made: Stored, start: int) -> Stored:
    """The same rows with what is beside them in a memory that begins at `start`: no further rows, before the first."""
    rows_before = (made.base - start) // made.step % made.count
    return replace(made, base=start + rows_before * made.step)


def _rows_of_base(trace: Trace, target: Tensor, kind: Rows) -> Stored | None:
    """Rows of a base tensor, from the rows of the first part that is written; None if they do not follow from it."""
    base = target._base if target._base is not None else target
    if kind.axis == ONE_SAMPLE:
        ids = kind.ids
    elif kind.ids is None and kind.count == trace.num_samples:
        made = stored(kind, target)
        made = _with_the_rest(made, int(base.storage_offset()) * base.element_size()) if made.step else made
        return made if _has_rows(trace, target, made, kind) else None
    else:
        ids = rows_module.samples_by_position(kind)
    own_axes = [axis for axis, length in enumerate(base.shape) if length == trace.num_samples and ids is not None]
    for axis in own_axes:  # one sample, or some: the axis on which they are at their own positions
        made = stored(Rows(axis, trace.num_samples, doubt=kind.doubt), base)
        if _has_rows(trace, target, made, kind):
            return made
    return None
