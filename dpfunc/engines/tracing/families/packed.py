"""Packed sequences: the rows of each time, in the order of falling length."""

from __future__ import annotations

import torch

from dpfunc.engines.tracing.call import Call, Handler, Type
from dpfunc.engines.tracing.rows import Rows, gathered, normal, spread


def pack(call: Call) -> list[Type]:
    """`_pack_padded_sequence(input, lengths, batch_first)`: the rows of each time, in the order of falling length."""
    input, batch_first = call.args[0], call.args[2]
    kind = call.type_of(input)
    if not isinstance(kind, Rows) or kind.axis != (0 if batch_first else 1) or kind.pre != 1 or kind.post != 1:
        return [call.mixed() if kind is not None else None, None]
    samples, sizes = spread(kind), call.out[1]
    ids = torch.cat([samples[: int(size)] for size in sizes])  # sizes are typed as constant: recurrent layers read them
    return [gathered(ids, 0, call.types.num_samples, kind.doubt)._replace(ragged=True), None]


def pack_backward(call: Call) -> Type:
    """`(grad, sizes, batch_sizes, batch_first)`: rows back at their places; sample r stands where it stood."""
    grad, sizes, batch_sizes, batch_first = call.args[:4]
    kind = call.type_of(grad)
    if not isinstance(kind, Rows) or kind.axis != 0:
        return kind if kind is None else call.mixed()
    samples = spread(kind)
    first = samples[: int(batch_sizes[0])]
    if not torch.equal(samples, torch.cat([first[: int(size)] for size in batch_sizes])):
        return call.mixed()
    own = normal(first, call.types.num_samples)
    if len(first) != sizes[0 if batch_first else 1]:
        return call.mixed()
    return Rows(0 if batch_first else 1, len(first), 1, 1, own, kind.doubt)


FAMILY: dict[str, Handler] = {
    "_pack_padded_sequence": pack,
    "_pack_padded_sequence_backward": pack_backward,
}
