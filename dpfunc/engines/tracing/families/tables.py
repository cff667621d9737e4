"""Tables of constants, read by the numbers of each sample; sorted values; draws from probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfunc.engines.tracing.call import Call, Handler, Type, broadcast, combined
from dpfunc.engines.tracing.rows import Rows, gathered, samples_by_position


def _embedding(call: Call) -> Type:
    """Rows of a constant table: they belong to the samples of their ids."""
    if call.type_of(call.args[0]) is not None:
        return call.mixed("of a table that depends on the batch")
    return call.type_of(call.args[1])


def _embedding_bag(call: Call) -> Type | list[Type]:
    """`(weight, indices, offsets, ...)`: each bag must hold the ids of one sample."""
    kind, offsets = call.type_of(call.args[1]), call.args[2]
    if call.type_of(call.args[0]) is not None or not isinstance(kind, Rows) or kind.axis != 0:
        return call.mixed()
    weights = call.arg(6, "per_sample_weights")
    if isinstance(weights, Tensor):
        together = combined(call, [broadcast(call.args[1], 1), broadcast(weights, 1)])
        if not isinstance(together, Rows):
            return call.mixed("with weights of other samples")
        kind = together
    starts = offsets.cpu().reshape(-1)
    bags = call.out[0].shape[0]
    samples = samples_by_position(kind)
    bag_of = torch.searchsorted(starts[:bags].contiguous(), torch.arange(len(samples)), right=True) - 1
    first = samples[starts[:bags].clamp(max=len(samples) - 1)]
    if not bool((first[bag_of] == samples).all()) or call.type_of(offsets) is not None:
        return call.mixed("with bags of several samples")
    rows = gathered(first, 0, call.types.num_samples, kind.doubt)
    return [rows, kind if call.out[1].shape[:1] == call.args[1].shape[:1] else None, rows, rows]


def _searchsorted(call: Call) -> Type:
    """Values among sorted ones: constants, or the sample's own."""
    names = {"bucketize": (1, 0), "searchsorted": (0, 1)}
    table_at, values_at = names[call.name]
    table, values = call.args[table_at], call.args[values_at]
    kind = call.type_of(table)
    sorter = call.kwargs.get("sorter")
    if isinstance(sorter, Tensor) and call.type_of(sorter) is not None:
        return call.mixed("with an order that depends on the batch")
    if not isinstance(values, Tensor):
        return kind if kind is None else call.mixed()
    if kind is None and table.ndim == 1:
        return call.type_of(values)
    return combined(call, [broadcast(table, values.ndim), broadcast(values, values.ndim)], (values.ndim - 1,))


def _isin(call: Call) -> Type:
    """Membership of each element in a set of constants."""
    test = call.args[1]
    if isinstance(test, Tensor) and call.type_of(test) is not None:
        return call.mixed()
    if call.kwargs.get("assume_unique"):  # torch may sort all elements, and compare each with its neighbour
        return call.mixed("of elements that may be equal")
    return call.type_of(call.args[0]) if isinstance(call.args[0], Tensor) else None


def _multinomial(call: Call) -> Type:
    """Draws from each row of probabilities."""
    input: Tensor = call.args[0]
    return combined(call, [broadcast(input, input.ndim)], (input.ndim - 1,))


FAMILY: dict[str, Handler] = {
    "embedding": _embedding,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    **dict.fromkeys(("searchsorted", "bucketize"), _searchsorted),
    "isin": _isin,
    "multinomial": _multinomial,
}
