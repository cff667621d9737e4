"""Collectives inside of layers that are split over processes: all of them have the same samples, in the same rows.

Only torch's own wrappers may communicate (`dpfunc.engines.guards.collectives`), and that the processes have the same
samples is checked in each step (`dpfunc.engines.guards.replicated`). A tensor that is gathered, summed or scattered has
the rows of its parts as long as each part holds all samples: one that holds only some of them may be joined with other
samples in another process.
"""

from __future__ import annotations

from collections.abc import Callable

from dpfunc.engines.tracing.call import Call, Type
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows


def _complete(call: Call, kind: Type) -> Type:
    """The rows, with a doubt where they are not those of all samples in order."""
    if not isinstance(kind, Rows) or (
        kind.axis != ONE_SAMPLE and kind.count == call.types.num_samples and kind.ids is None
    ):
        return kind
    return kind.doubted(f"{call.name} of a part of the samples")


def _summed(call: Call) -> Type:
    """Each number is computed from those at the same position in all processes."""
    return _complete(call, call.type_of(call.args[0]))


def _gathered(call: Call) -> Type:
    """Parts of all processes, joined along axis 0."""
    kind = _complete(call, call.type_of(call.args[0]))
    if isinstance(kind, Rows) and kind.axis == 0:
        return kind._replace(pre=kind.pre * int(call.args[1]))
    return kind


def _scattered(call: Call) -> Type:
    """The sum over processes, sharded along axis 0: the shard of this process."""
    kind, size = _complete(call, call.type_of(call.args[0])), int(call.args[2])
    if not isinstance(kind, Rows) or kind.axis != 0:
        return kind
    return kind._replace(pre=kind.pre // size) if kind.pre % size == 0 else call.mixed("across samples")


def _exchanged(call: Call) -> Type:
    """All-to-all: tensors are split along one axis and joined along another."""
    kind = _complete(call, call.type_of(call.args[0]))
    if isinstance(kind, Mixed) or kind is None or kind.axis not in call.args[1:3]:
        return kind
    return call.mixed("across samples")


FAMILY: dict[str, Callable[[Call], Type]] = {
    "all_reduce": _summed,
    "broadcast": _summed,
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
    "shard_dim_alltoall": _exchanged,
}
