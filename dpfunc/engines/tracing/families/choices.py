"""A choice between two tensors: where it is the same for all samples, only one of them counts."""

from __future__ import annotations

from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type, broadcast, combined
from dpfunc.engines.tracing.rows import Mixed, Rows

_CONDITION = "a condition whose values were read"


def _where(call: Call) -> Type:
    """Elementwise choice between two tensors: `_where(condition, one, other)`.

    A condition of the samples' own that is true for all of them is true for each alone, so that no sample depends on
    the other tensor, which may be a mean over the batch. Its gradient is then zero: the same condition is read again in
    the backward pass.
    """
    if len(call.inputs) < 3:  # the others are numbers
        return combined(call, [broadcast(tensor, call.out.ndim) for tensor in call.inputs])
    condition, one, other = call.inputs
    kind = call.type_of(condition)
    unsure = isinstance(call.type_of(one), Mixed) or isinstance(call.type_of(other), Mixed)
    clean = kind is None or (isinstance(kind, Rows) and not kind.doubt)
    if clean and (unsure or call.types.marked(_CONDITION, condition)):
        call.types.mark(_CONDITION, condition)
        if bool(condition.all()):
            return _chosen(call, one)
        if not bool(condition.any()):
            return _chosen(call, other)
    return combined(call, [broadcast(tensor, call.out.ndim) for tensor in call.inputs])


def _chosen(call: Call, tensor: Tensor) -> Type:
    """The type of a tensor that is broadcast to the result."""
    return combined(call, [broadcast(tensor, call.out.ndim)])


FAMILY: dict[str, Handler] = {"where": _where}
