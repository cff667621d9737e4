"""Results of operations: their types, from those of the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Type, assumed, broadcast, combined, tensors_of
from dpfunc.engines.tracing.entries import Constant, Entry, key_of, part, pieces_of
from dpfunc.engines.tracing.operations import (
    AGREEING,
    COPYING,
    ORDERED,
    PLACING,
    RECEIVING,
    WRITING_STATISTICS,
    Kind,
    Known,
)
from dpfunc.engines.tracing.readers import DRAWING, listed, reader
from dpfunc.engines.tracing.reviewed import as_numbers, kept_numbers
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace

_LIFTED = ("lift_fresh", "lift_fresh_copy")


def type_results(trace: Trace, known: Known, call: Call) -> None:
    """Store the types of the results of an operation that writes into none of its arguments."""
    results = list(call.out) if isinstance(call.out, (list, tuple)) else [call.out]
    if known.kind is Kind.FILLED or known.kind is Kind.RANDOM:
        _type_filled(trace, known, call, results)
        return
    if call.constant():
        _type_constants(trace, known, call, results)
        return
    kinds = types_of(trace, known, call, len(results))
    if any(isinstance(kind, Mixed) for kind in kinds) and as_numbers(trace, call, kinds[0]):
        kinds = [None]
    for result, kind in zip(results, kinds, strict=True):
        if isinstance(result, Tensor):
            _mark_sparse(trace, call, result)
            trace.store(result, kind, Constant.ANY)
    if known.name in WRITING_STATISTICS and call.args[5] is True:
        for statistic in tensors_of(call.args[3:5]):
            if key_of(part(statistic)) in trace.entries:
                trace.note(part(statistic), Mixed(f"statistics of {known.name}"))


def _type_constants(trace: Trace, known: Known, call: Call, results: Sequence[Any]) -> None:
    """Store the types of results that depend on no sample."""
    constant: Entry = constant_of(trace, known, call.inputs)
    if known.name in _LIFTED:  # numbers that may be of the batch stay in memory
        constant = kept_numbers() or constant
    for result in tensors_of(results):
        if key_of(part(result)) not in trace.entries:
            trace.note(part(result), constant)


def _type_filled(trace: Trace, known: Known, call: Call, results: Sequence[Any]) -> None:
    """Store the types of results that are filled with one number, or with random numbers."""
    kind: Type = None
    entry = Constant.EQUAL if known.kind is Kind.FILLED else Constant.RANDOM
    if known.name in ("bernoulli", "normal"):
        kind = _pointwise(trace, call)
        entry = Constant.RANDOM if _lawful(trace, call.inputs) else Constant.ANY
    elif trace.ragged:  # how many there are depends on values
        same = (tensor for tensor in call.inputs if tensor.shape == results[0].shape)
        kind = next((kind for kind in map(partial(_shaped, trace), same) if kind is not None), None)
    for result in tensors_of(results):
        trace.store(result, kind, entry)


def _mark_sparse(trace: Trace, call: Call, result: Tensor) -> None:
    """New memory of a sparse result that depends on the batch; it was filled by operations that no mode receives."""
    if result.layout is not torch.sparse_coo or trace.alone:
        return
    given = {key_of(piece) for value in call.inputs for piece in pieces_of(part(value))}
    for piece in pieces_of(part(result)):
        if key_of(piece) not in given and key_of(piece) not in trace.entries:
            trace.note(piece, Mixed("a sparse tensor of the batch"))


def types_of(trace: Trace, known: Known, call: Call, count: int) -> list[Type]:
    """Types of `count` results of an operation, some argument of which depends on the batch."""
    if trace.alone and known.name not in ("_local_scalar_dense", "equal"):
        return [Rows(ONE_SAMPLE, 1) if _whole(trace, call) else Mixed(known.name)] * count
    if known.kind is Kind.POINTWISE:
        kind: Any = _pointwise(trace, call)
    elif known.handler is not None:
        kind = known.handler(call)
    else:
        kind = assumed(call, f"{known.name}, which is not in the table of operations")
    kinds = kind if isinstance(kind, list) else [kind] * count
    if trace.ragged and known.name.rstrip("_") not in PLACING and any(map(partial(_shaped, trace), call.inputs)):
        kinds = [found._replace(shaped=True) if isinstance(found, Mixed) else found and found._replace(ragged=True)
                 for found in kinds]  # fmt: skip
    if any(type(found) is Mixed and found.agrees is not None for found in kinds) and known.name not in AGREEING:
        kinds = [found._replace(agrees=None) if isinstance(found, Mixed) else found for found in kinds]
    if trace.shuffled and known.name.rstrip("_") not in ORDERED:
        kinds = _still_shuffled(trace, call, kinds)
    return kinds if len(kinds) == count else (kinds + [Mixed(known.name)] * count)[:count]


def _shaped(trace: Trace, tensor: Tensor) -> Type:
    """The type of a tensor whose shape depends on values."""
    entry = trace.entries.get(key_of(part(tensor)))
    kind = entry[1] if entry is not None and isinstance(entry[1], Mixed) else trace.type_of(tensor)
    return kind if (kind.ragged if isinstance(kind, Rows) else kind is not None and kind.shaped) else None


def _lawful(trace: Trace, inputs: Sequence[Tensor]) -> bool:
    """True if numbers drawn with these parameters all have the same distribution."""
    entries = [trace.entries.get(key_of(part(tensor))) for tensor in inputs if tensor.numel() > 1]
    return all(entry is not None and entry[1] in (Constant.EQUAL, Constant.RANDOM) for entry in entries)


def constant_of(trace: Trace, known: Known, inputs: Sequence[Tensor]) -> Constant:
    """Kind of constant that an operation on constants gives: elementwise functions keep EQUAL and RANDOM."""
    if known.name in _LIFTED:  # made of Python or NumPy numbers
        module, _, name = reader()
        return Constant.RANDOM if listed(DRAWING, module, name) else Constant.ANY
    if known.kind is not Kind.POINTWISE and known.name not in COPYING:
        return Constant.ANY
    found = [trace.entries.get(key_of(part(tensor))) for tensor in inputs if tensor.numel() > 1]
    kinds = [entry[1] if entry is not None else Constant.ANY for entry in found]
    if any(kind is not Constant.EQUAL and kind is not Constant.RANDOM for kind in kinds):
        return Constant.ANY
    return Constant.RANDOM if Constant.RANDOM in kinds else Constant.EQUAL


def _still_shuffled(trace: Trace, call: Call, kinds: list[Type]) -> list[Type]:
    """Doubt results without slots of an operation on rows whose order depends on several samples."""
    given = (trace.type_of(tensor) for tensor in call.inputs)
    if all(not isinstance(kind, Rows) or kind.slots is None for kind in given):
        return kinds
    reason = f"{call.name} of rows whose order depends on several samples"
    return [kind.doubted(reason) if isinstance(kind, Rows) and kind.slots is None else kind for kind in kinds]


def _whole(trace: Trace, call: Call) -> bool:
    """True if no argument is mixed, in a pass that computes each row alone."""
    return not any(isinstance(kind, Mixed) for kind in call.kinds.values())


def _pointwise(trace: Trace, call: Call) -> Type:
    out = call.out if isinstance(call.out, Tensor) else next(iter(tensors_of([call.out])))
    kind = combined(call, [broadcast(tensor, out.ndim) for tensor in call.inputs])
    if call.name == "add" and isinstance(kind, Rows) and kind.doubt and not out.is_floating_point():
        for tensor in call.inputs:  # positions within each sample, to which the start of each sample is added
            own = trace.type_of(tensor)
            if isinstance(own, Rows) and not own.doubt and own.axis == 0:
                trace.keep_integers(tensor)
    return kind


def type_copies(trace: Trace, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
    """Store the types of copies by operations that usually give views: `reshape` and `to` in inference mode."""
    if (
        isinstance(results, Tensor)
        and args
        and isinstance(args[0], Tensor)
        and key_of(part(results)) == key_of(part(args[0]))
    ):
        return
    inputs = list(tensors_of((*args, *kwargs.values())))
    for result in tensors_of([results]):
        if not any(key_of(part(result)) == key_of(part(tensor)) for tensor in inputs):
            kind = trace.type_of(inputs[0]) if inputs else None
            moved = kind is not None and result.shape != inputs[0].shape
            trace.store(result, Mixed(f"{known.name}, which copies") if moved else kind, Constant.ANY)


def type_exchanged(trace: Trace, known: Known, call: Call) -> None:
    """Mark the tensors of a collective without an entry as mixed where they depend on the batch.

    The dependencies of received numbers are not known here: mixed.
    """
    tensors = [*call.inputs, *tensors_of([call.out])]
    if known.name in RECEIVING or any(trace.type_of(tensor) is not None for tensor in tensors):
        for tensor in tensors:
            trace.note(part(tensor), Mixed(f"{known.name} over processes"))


def check_complete(trace: Trace, known: Known, call: Call) -> None:
    """Mark results of a split tensor with a part of the samples as mixed: it may be joined with others unseen."""
    for kind in map(trace.type_of, call.inputs):
        if isinstance(kind, Rows) and (
            kind.axis == ONE_SAMPLE or kind.ids is not None or kind.count != trace.num_samples
        ):
            for result in tensors_of([call.out]):
                trace.note(part(result), Mixed(f"{known.name} of a split tensor with a part of the samples"))
            return
