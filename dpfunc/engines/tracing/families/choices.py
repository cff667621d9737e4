"""A choice between two tensors: where it is the same for all samples, only one of them counts."""

from __future__ import annotations

from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type, broadcast, combined, doubt_in
from dpfunc.engines.tracing.rows import Mixed

_CONDITION = "a condition whose values were read"


def _where(call: Call) -> Type:
    """Elementwise choice between two tensors: `_where(condition, one, other)`.

    A condition of the samples' own that is true for all of them is true for each alone, so that no sample depends on
    the other tensor, which may be a mean over the batch. Its gradient is then zero: the same condition is read again in
    the backward pass.
    """
    chosen = _chosen_for_all(call, *call.inputs) if len(call.inputs) == 3 else None  # others are numbers
    counted = call.inputs if chosen is None else [chosen]
    return combined(call, [broadcast(tensor, call.out.ndim) for tensor in counted])


def _chosen_for_all(call: Call, condition: Tensor, one: Tensor, other: Tensor) -> Tensor | None:
    """The tensor that each sample alone would choose, too; None if they differ, or if it makes no difference."""
    unsure = isinstance(call.type_of(one), Mixed) or isinstance(call.type_of(other), Mixed)
    if doubt_in(call.type_of(condition)) or not (unsure or call.types.marked(_CONDITION, condition)):
        return None
    call.types.mark(_CONDITION, condition)
    if bool(condition.all()):
        return one
    return None if bool(condition.any()) else other


FAMILY: dict[str, Handler] = {"where": _where}
