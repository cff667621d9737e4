"""Credit of gradients to samples: they must have the rows that their use has, without a doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from dpfunc.engines.tracing.call import Type
from dpfunc.engines.tracing.rows import Mixed, Rows, same_ids, same_slots
from dpfunc.engines.uses.sample_axis import SampleAxis

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace


class WrongGuess(Exception):
    """A gradient has shown that a guessed sample axis was wrong; never leaves the engines."""


def _agrees(kind: Type, sample_axis: SampleAxis) -> bool:
    """True if a gradient has the rows that its use has."""
    if not isinstance(kind, Rows):
        return False
    return (kind.axis, kind.pre, kind.post) == (sample_axis.axis, sample_axis.pre, sample_axis.post) and same_ids(
        kind.ids, sample_axis.ids
    )


def check_credited(trace: Trace, tensor: Tensor, sample_axis: SampleAxis, what: str) -> None:
    """Note a doubt unless a tensor has the rows by which it is about to be split, without a doubt.

    Args:
        tensor: a gradient, or the losses. sample_axis: the rows that it must have. what: its name, for the doubt.

    Raises:
        WrongGuess: the sample axis was guessed, and the tensor has another one.
    """
    kind = trace.type_of(tensor)
    if sample_axis.guess is not None and kind is not None and not _agrees(kind, sample_axis):
        raise WrongGuess(sample_axis.guess)
    doubt = _doubt_of_constant(trace, tensor, sample_axis) if kind is None else _doubt_of_type(kind, sample_axis)
    if doubt:
        trace.doubts.append(f"{what} {doubt}")


def _doubt_of_constant(trace: Trace, tensor: Tensor, sample_axis: SampleAxis) -> str:
    expected = Rows(sample_axis.axis, trace.num_samples, sample_axis.pre, sample_axis.post)
    if sample_axis.ids is not None or trace.uniform(tensor, expected, sample_axis.axis):
        return ""
    return "differs between positions of the batch and does not depend on it"


def _doubt_of_type(kind: Rows | Mixed, sample_axis: SampleAxis) -> str:
    if isinstance(kind, Mixed):
        return f"comes from {kind.reason}"
    if (kind.axis, kind.pre, kind.post) != (sample_axis.axis, sample_axis.pre, sample_axis.post):
        return "has its samples elsewhere than expected"
    slots = Rows(0, 1, slots=sample_axis.slots, of=sample_axis.of)
    if not same_ids(kind.ids, sample_axis.ids) or not same_slots(kind, slots):
        return "has its samples in another order"
    return f"comes from {kind.doubt}" if kind.doubt else ""
