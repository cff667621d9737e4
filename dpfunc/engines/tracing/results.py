"""Results of operations: their types, from those of the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Type, assumed, broadcast, combined, shaped_too, tensors_of
from dpfunc.engines.tracing.entries import Constant, Entry, key_of, part, pieces_of
from dpfunc.engines.tracing.operations import (
    AGREEING,
    COPYING,
    ORDERED,
    PLACING,
    RECEIVING,
    Kind,
    Known,
    undeclared,
)
from dpfunc.engines.tracing.readers import DRAWING, listed, reader
from dpfunc.engines.tracing.reviewed import as_numbers, kept_numbers
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace

_GIVEN_TO_PYTHON = ("_local_scalar_dense", "equal")


def type_results(trace: Trace, known: Known, call: Call) -> None:
    """Store the types of the results of an operation that writes into none of its arguments."""
    results = list(call.out) if isinstance(call.out, (list, tuple)) else [call.out]
    if known.kind is Kind.FILLED or known.kind is Kind.RANDOM:
        _type_filled(trace, known, call, results)
    elif call.constant():
        _type_constants(trace, known, call, results)
    else:
        _type_dependent(trace, known, call, results)
        for statistic in map(part, undeclared(known, call.args)):  # of this step: others are refused
            trace.note(statistic, Mixed(f"statistics of {known.name}"))


def _type_dependent(trace: Trace, known: Known, call: Call, results: Sequence[Any]) -> None:
    """Store the types of results some argument of which depends on the batch."""
    kinds = types_of(trace, known, call, len(results))
    if kinds and as_numbers(trace, call, kinds[0]):
        kinds = [None]
    for result, kind in zip(results, kinds, strict=True):
        if isinstance(result, Tensor):
            _mark_sparse(trace, call, result)
            trace.store(result, kind, Constant.ANY)


def _type_constants(trace: Trace, known: Known, call: Call, results: Sequence[Any]) -> None:
    """Store the types of results that depend on no sample."""
    constant: Entry = constant_of(trace, known, call.inputs)
    if known.lifts:  # numbers that may be of the batch stay in memory
        constant = kept_numbers() or constant
    for result in tensors_of(results):
        if trace.entry_of(result) is None:
            trace.note(part(result), constant)


def _type_filled(trace: Trace, known: Known, call: Call, results: Sequence[Any]) -> None:
    """Store the types of results that are filled with one number, or with random numbers."""
    kind: Type = None
    entry = Constant.EQUAL if known.kind is Kind.FILLED else Constant.RANDOM
    parameters = call.inputs[1:] if known.name.endswith("_like") else call.inputs  # of the law; not what gives a shape
    if known.kind is Kind.RANDOM and parameters:
        kind = combined(call, [broadcast(tensor, results[0].ndim) for tensor in parameters])
        entry = law_of_draws(trace, parameters)
    elif trace.ragged:  # how many there are depends on values
        same = (tensor for tensor in call.inputs if tensor.shape == results[0].shape)
        kind = next((found for found in map(trace.shaped_by_values, same) if found is not None), None)
    for result in tensors_of(results):
        trace.store(result, kind, entry)


def _mark_sparse(trace: Trace, call: Call, result: Tensor) -> None:
    """New memory of a sparse result that depends on the batch; it was filled by operations that no mode receives."""
    if result.layout is not torch.sparse_coo or trace.alone:
        return
    given = {key_of(piece) for value in call.inputs for piece in pieces_of(part(value))}
    for piece in pieces_of(part(result)):
        if key_of(piece) not in given and key_of(piece) not in trace.entries:
            trace.note(piece, Mixed("a sparse tensor of the batch", shaped=True))  # by how many are not zero


def types_of(trace: Trace, known: Known, call: Call, count: int) -> list[Type]:
    """Types of `count` results of an operation, some argument of which depends on the batch."""
    if trace.alone and known.name not in _GIVEN_TO_PYTHON:
        return [_of_row_alone(call)] * count
    kinds = _by_rule(trace, known, call, count)
    name = known.name.rstrip("_")
    if trace.ragged and name not in PLACING and any(map(trace.shaped_by_values, call.inputs)):
        kinds = list(map(shaped_too, kinds))
    if known.name not in AGREEING:
        kinds = list(map(_without_agreement, kinds))
    if trace.shuffled and name not in ORDERED:
        kinds = _still_shuffled(trace, call, kinds)
    return kinds if len(kinds) == count else (kinds + [Mixed(known.name)] * count)[:count]


def _by_rule(trace: Trace, known: Known, call: Call, count: int) -> list[Type]:
    """The types of `count` results, or of another number, by the rule of the operation alone."""
    found: Any
    if known.kind is Kind.POINTWISE:
        found = _pointwise(trace, call)
    elif known.handler is not None:
        found = known.handler(call)
    else:
        found = assumed(call, f"{known.name}, which is not in the table of operations")
    return found if isinstance(found, list) else [found] * count


def _of_row_alone(call: Call) -> Type:
    """The type of results in a pass that computes each row alone: of that row, unless an argument is mixed."""
    mixed = any(isinstance(kind, Mixed) for kind in call.kinds.values())
    return Mixed(call.name) if mixed else Rows(ONE_SAMPLE, 1)


def _without_agreement(kind: Type) -> Type:
    """Numbers that several samples decide, of which nothing is known for each sample alone."""
    return kind._replace(agrees=None) if isinstance(kind, Mixed) and kind.agrees is not None else kind


def _law_of(trace: Trace, inputs: Sequence[Tensor]) -> Constant:
    """EQUAL or RANDOM where tensors have only such numbers, so that the law of each number is the same; else ANY.

    Two random tensors may have the same numbers at other places: `r == r.t()` is true on the diagonal.
    """
    several = [tensor for tensor in inputs if tensor.numel() > 1]
    found = list(map(trace.entry_of, several))
    if not all(entry in (Constant.EQUAL, Constant.RANDOM) for entry in found):
        return Constant.ANY
    places = {
        (key_of(part(tensor)), tensor.storage_offset(), tensor.stride(), tensor.shape)
        for tensor, entry in zip(several, found, strict=True) if entry is Constant.RANDOM
    }  # fmt: skip
    if len(places) > 1:
        return Constant.ANY
    return Constant.RANDOM if places else Constant.EQUAL


def law_of_draws(trace: Trace, parameters: Sequence[Tensor]) -> Constant:
    """RANDOM where random numbers have the same law, by the tensors of their parameters; else ANY."""
    return Constant.ANY if _law_of(trace, parameters) is Constant.ANY else Constant.RANDOM


def constant_of(trace: Trace, known: Known, inputs: Sequence[Tensor]) -> Constant:
    """Kind of constant that an operation on constants gives: elementwise functions keep EQUAL and RANDOM."""
    if known.lifts:  # made of Python or NumPy numbers
        module, _, name = reader()
        return Constant.RANDOM if listed(DRAWING, module, name) else Constant.ANY
    keeps = known.kind is Kind.POINTWISE or known.name in COPYING
    return _law_of(trace, inputs) if keeps else Constant.ANY


def _still_shuffled(trace: Trace, call: Call, kinds: list[Type]) -> list[Type]:
    """Doubt results without slots of an operation on rows whose order depends on several samples."""
    given = (trace.type_of(tensor) for tensor in call.inputs)
    if all(not isinstance(kind, Rows) or kind.slots is None for kind in given):
        return kinds
    reason = f"{call.name} of rows whose order depends on several samples"
    return [kind.doubted(reason) if isinstance(kind, Rows) and kind.slots is None else kind for kind in kinds]


def _pointwise(trace: Trace, call: Call) -> Type:
    out = call.out if isinstance(call.out, Tensor) else next(iter(tensors_of([call.out])))
    kind = combined(call, [broadcast(tensor, out.ndim) for tensor in call.inputs])
    if call.name == "add" and not out.is_floating_point() and isinstance(kind, Rows) and kind.doubt:
        _keep_own_integers(trace, call.inputs)
    return kind


def _keep_own_integers(trace: Trace, added: Sequence[Tensor]) -> None:
    """Keep positions within each sample, to which the start of each sample is added."""
    for tensor in added:
        own = trace.type_of(tensor)
        if isinstance(own, Rows) and not own.doubt and own.axis == 0:
            trace.keep_integers(tensor)


def type_copies(trace: Trace, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
    """Store the types of copies by operations that usually give views: `reshape` and `to` in inference mode."""
    inputs = list(tensors_of((*args, *kwargs.values())))
    given = {key_of(piece) for tensor in inputs for piece in pieces_of(part(tensor))}
    for result in tensors_of([results]):
        if key_of(part(result)) not in given:
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
    if trace.alone:  # the whole batch of that pass is one sample
        return
    for kind in map(trace.type_of, call.inputs):
        if isinstance(kind, Rows) and (
            kind.axis == ONE_SAMPLE or kind.ids is not None or kind.count != trace.num_samples
        ):
            for result in tensors_of([call.out]):
                trace.note(part(result), Mixed(f"{known.name} of a split tensor with a part of the samples"))
            return
