"""Writes in place: their effect on the type of a memory, and those that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpfunc.engines.tracing import rows as rows_module
from dpfunc.engines.tracing.call import Call, Type, broadcast, combined, tensors_of
from dpfunc.engines.tracing.entries import Constant, Entry, doubted, fits, key_of, part, pieces_of
from dpfunc.engines.tracing.operations import Kind, Known
from dpfunc.engines.tracing.results import constant_of, types_of
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, Stored, located, stored
from dpfunc.errors import UnsupportedModel

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace


def copy_before_write(trace: Trace, known: Known, args: tuple[Any, ...]) -> Tensor | None:
    """Copy a tensor of constants before numbers of the batch are computed into it.

    The copy is kept until it is known on which axis the samples are: then it must be the same for each of them.
    """
    if 0 not in known.written or known.kind is not Kind.POINTWISE or not isinstance(args[0], Tensor) or trace.alone:
        return None
    entry = trace.entries.get(key_of(part(args[0])))
    if entry is None or entry[1] is not Constant.ANY or all(trace.type_of(t) is None for t in tensors_of(args[1:])):
        return None
    own = part(args[0]).detach()
    numbers = own.new_empty(0).set_(own.untyped_storage().clone())
    trace.keep_constants(numbers)
    constants = numbers.as_strided(own.shape, own.stride(), own.storage_offset())
    trace.note(constants, Constant.ANY)
    return constants


def _was_uniform(trace: Trace, made: Stored) -> bool:
    """True if each row of this memory was the same before the last write."""
    constants = trace.pop_constants()
    if constants is None:
        return False
    numbers = constants.view(torch.uint8)[made.base :]
    if len(numbers) != made.step * made.count:
        return False
    rows = numbers.view(made.count, made.step)
    return bool((rows == rows[:1]).all())


def refuse_writes(trace: Trace, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse writes into the caller's batch, and of values of the batch into memory from outside of the loss."""
    for argument in known.written:
        given = args[argument] if isinstance(argument, int) and argument < len(args) else kwargs.get(str(argument))
        for target in tensors_of([given]):
            own = part(target)
            if own.layout is not torch.strided or not own.numel():
                continue
            found = trace.entries.get(key_of(own))
            if found is not None and isinstance(found[1], Stored) and found[1].end:
                raise UnsupportedModel(
                    f"The loss writes into a tensor of its batch ({known.name}), which others share. Clone it first."
                )
            if found is None:
                _refuse_outside(trace, known, target, args, kwargs)


def _refuse_outside(trace: Trace, known: Known, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    trace.type_of(target)  # refuses what an earlier step has left
    if any(trace.type_of(tensor) is not None for tensor in tensors_of((*args, *kwargs.values()))):
        raise UnsupportedModel(
            f"The loss writes values of the batch ({known.name}) into a tensor {tuple(target.shape)} that was made "
            "outside of it (a buffer, a memory bank, a codebook): records of one step would reach the gradients "
            "of the next. Use out-of-place operations, model.eval(), or replace the layer."
        )


def write(trace: Trace, known: Known, call: Call, args: tuple[Any, ...]) -> None:
    """Store the types of the memory that an operation writes into."""
    targets = [args[argument] if isinstance(argument, int) else call.kwargs.get(argument) for argument in known.written]
    flat = list(tensors_of(targets))
    if known.kind in (Kind.FILLED, Kind.RANDOM):
        given = [tensor for tensor in call.inputs if not any(tensor is target for target in flat)]
        kinds: list[Type] = [combined(call, [broadcast(tensor, target.ndim) for tensor in given]) for target in flat]
    elif known.name == "copy_":
        kinds = [combined(call, [broadcast(call.args[1], call.args[0].ndim)])]
    elif call.constant():
        kinds = [None] * len(flat)
    else:
        kinds = types_of(trace, known, call, len(flat))
    made = constant_of(trace, known, call.inputs)
    for target, kind in zip(flat, kinds, strict=True):
        _overwrite(trace, part(target), kind, known, made)
    for result in tensors_of([call.out]):
        if not any(result is target for target in flat) and key_of(part(result)) not in trace.entries:
            trace.store(result, kinds[0], Constant.ANY)


def _overwrite(trace: Trace, target: Tensor, kind: Type, known: Known, made: Constant) -> None:
    if target.layout is not torch.strided:
        _overwrite_sparse(trace, target, kind)
        return
    known_entry = trace.entries.get(key_of(target))
    if (known_entry is None and kind is None) or not target.numel():
        return
    entry = Constant.ANY if known_entry is None else known_entry[1]
    if isinstance(kind, Rows) and not fits(kind, target):
        kind = Mixed("a result of another shape than was expected")
    if trace.alone and isinstance(kind, Rows) and not isinstance(entry, Mixed):
        trace.note(target, stored(kind, target))
        return
    covers_all = target.numel() * target.element_size() == target.untyped_storage().nbytes()
    if (isinstance(entry, Stored) and entry.ragged) or (isinstance(entry, Mixed) and entry.shaped):
        if covers_all and kind is None:  # its shape still depends on values
            return
        kind = _type_of_ragged_write(trace, target, entry, kind)
    if kind is None:
        _overwrite_by_constant(trace, target, entry, known, covers_all, made)
    elif isinstance(kind, Mixed):
        trace.note(target, kind if covers_all or not isinstance(entry, Stored) else doubted(entry, kind.reason))
    else:
        trace.note(target, _entry_after_write(trace, target, kind, entry, covers_all))


def _overwrite_sparse(trace: Trace, target: Tensor, kind: Type) -> None:
    for piece in pieces_of(target):
        if kind is not None and not trace.alone and key_of(piece) in trace.entries:
            trace.note(piece, Mixed("a sparse tensor of the batch"))


def _type_of_ragged_write(trace: Trace, target: Tensor, entry: Stored | Mixed, kind: Type) -> Type:
    """Type of a write into a tensor whose shape depends on values: its own rows, or mixed."""
    if isinstance(kind, Mixed):
        return kind._replace(shaped=True)
    current = located(entry, target, trace.num_samples) if isinstance(entry, Stored) else None
    if kind is None or (current is not None and current.axis == kind.axis and rows_module.alike(current, kind)):
        return kind
    return Mixed("a write into a tensor whose shape depends on values of the batch", shaped=True)


def _overwrite_by_constant(
    trace: Trace, target: Tensor, entry: Entry, known: Known, covers_all: bool, made: Constant
) -> None:
    if isinstance(entry, Constant):
        kept = {Kind.FILLED: Constant.EQUAL, Kind.RANDOM: Constant.RANDOM}.get(known.kind, made)
        trace.note(target, kept if covers_all else Constant.ANY)
    elif covers_all and known.kind in (Kind.FILLED, Kind.RANDOM):
        trace.note(target, Constant.EQUAL if known.kind is Kind.FILLED else Constant.RANDOM)
    elif isinstance(entry, Stored) and not trace.alone:
        current = located(entry, target, trace.num_samples)
        if current is not None and current.doubt:
            trace.note(target, doubted(entry, current.doubt))
            return
        every = (
            current is not None and current.count == entry.count and (current.axis != ONE_SAMPLE or entry.count == 1)
        )
        same_for_each = known.kind is Kind.FILLED or known.kind is Kind.RANDOM or made is not Constant.ANY
        if not every or current is None or not (same_for_each or rows_module.uniform(target, current, current.axis)):
            trace.note(target, doubted(entry, "a write of constants that differ between positions of the batch"))


def _entry_after_write(trace: Trace, target: Tensor, kind: Rows, entry: Entry, covers_all: bool) -> Entry:
    """The entry of the memory of a tensor after rows were written into it."""
    if trace.alone:
        return entry if isinstance(entry, Mixed) else stored(Rows(ONE_SAMPLE, 1), target)
    if isinstance(entry, Mixed):
        return stored(kind, target) if covers_all else entry
    if isinstance(entry, Constant):
        made = stored(kind, target) if covers_all else _rows_of_base(trace, target, kind)
        if made is None:
            return Mixed("a write into a part of a tensor")
        if not covers_all and entry is not Constant.EQUAL and not _was_uniform(trace, made):
            return doubted(made, "a write into a tensor whose other values differ between positions")
        return made
    current = located(entry, target, trace.num_samples)
    if current is None or current.axis != kind.axis or not rows_module.alike(current, kind):
        return stored(kind, target) if covers_all else Mixed("a write over other samples")
    return doubted(entry, kind.doubt)


def _rows_of_base(trace: Trace, target: Tensor, kind: Rows) -> Stored | None:
    """Rows of a base tensor, from the rows of the first part that is written; None if they do not follow from it."""
    base = target._base if target._base is not None else target
    if kind.axis != ONE_SAMPLE and kind.ids is None and kind.count == trace.num_samples:
        return replace(stored(kind, target), base=int(base.storage_offset()) * base.element_size())
    ids = rows_module.samples_by_position(kind) if kind.axis != ONE_SAMPLE else kind.ids
    for axis, length in enumerate(base.shape):  # one sample, or some: the axis on which they are at their own positions
        if length != trace.num_samples or ids is None:
            continue
        made = stored(Rows(axis, length, doubt=kind.doubt), base)
        current = located(made, target, trace.num_samples)
        if current is not None and current.axis == kind.axis and rows_module.alike(current, kind):
            return made
    return None
