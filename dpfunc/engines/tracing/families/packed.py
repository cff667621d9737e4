"""Packed sequences: the rows of each time, in the order of falling length."""

from __future__ import annotations

import torch

from dpfunc.engines.tracing.call import Call, Handler, Type, Types
from dpfunc.engines.tracing.rows import Mixed, Rows, gathered, normal, same_slots, samples_by_position


def doubt_of_lengths(types: Types, kind: Rows, lengths: torch.Tensor) -> str:
    """Reason why a sample's length may depend on other samples, or on its position in the batch; empty if none.

    The sizes, from which it would follow as well, are typed as constant.
    """
    own = types.type_of(lengths)
    if isinstance(own, Mixed):
        return f"lengths from {own.reason}"
    if own is None:
        same = types.uniform(lengths, kind.moved(0), 0)
        return "" if same else "lengths that differ between positions of the batch"
    if (
        own.axis != 0
        or not torch.equal(samples_by_position(own), samples_by_position(kind))
        or not same_slots(own, kind)
    ):
        return "lengths of other samples"
    return own.doubt


def _pack(call: Call) -> list[Type]:
    """`_pack_padded_sequence(input, lengths, batch_first)`: the rows of each time, in the order of falling length."""
    input, batch_first = call.args[0], call.args[2]
    kind = call.type_of(input)
    if not isinstance(kind, Rows) or kind.axis != (0 if batch_first else 1) or kind.pre != 1 or kind.post != 1:
        return [call.mixed() if kind is not None else None, None]
    samples, sizes = samples_by_position(kind), call.out[1]
    doubt = kind.doubt or doubt_of_lengths(call.types, kind, call.args[1])
    ids = torch.cat([samples[: int(size)] for size in sizes])  # sizes are typed as constant: recurrent layers read them
    return [gathered(ids, 0, call.types.num_samples, doubt)._replace(ragged=True), None]


def _pack_backward(call: Call) -> Type:
    """`(grad, sizes, batch_sizes, batch_first)`: rows back at their positions; the samples are in the order before."""
    grad, sizes, batch_sizes, batch_first = call.args[:4]
    kind = call.type_of(grad)
    if not isinstance(kind, Rows) or kind.axis != 0:
        return kind if kind is None else call.mixed()
    samples = samples_by_position(kind)
    first = samples[: int(batch_sizes[0])]
    if not torch.equal(samples, torch.cat([first[: int(size)] for size in batch_sizes])):
        return call.mixed()
    own = normal(first, call.types.num_samples)
    if len(first) != sizes[0 if batch_first else 1]:
        return call.mixed()
    return Rows(0 if batch_first else 1, len(first), 1, 1, own, kind.doubt)


FAMILY: dict[str, Handler] = {
    "_pack_padded_sequence": _pack,
    "_pack_padded_sequence_backward": _pack_backward,
}
