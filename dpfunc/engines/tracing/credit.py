"""Credit of gradients to samples: they must have the rows that their use has, without a doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from dpfunc.engines.tracing.call import Type
from dpfunc.engines.tracing.rows import Mixed, Rows, same_ids, same_slots
from dpfunc.engines.uses.sample_axis import Layout

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace


class Misplaced(Exception):
    """The gradient shows that a guess about a use was wrong; never leaves the engines."""


def agrees(kind: Type, layout: Layout) -> bool:
    """True if a gradient has the rows that its use has."""
    if not isinstance(kind, Rows):
        return False
    return (kind.axis, kind.pre, kind.post) == (layout.axis, layout.pre, layout.post) and same_ids(kind.ids, layout.ids)


def check_credited(trace: Trace, tensor: Tensor, layout: Layout, what: str) -> None:
    """A tensor is about to be split by samples: it must have these rows, and no doubt."""
    kind = trace.type_of(tensor)
    if layout.guess is not None and kind is not None and not agrees(kind, layout):
        raise Misplaced(layout.guess)
    if kind is None:
        whole = Rows(layout.axis, trace.num_samples, layout.pre, layout.post)
        if layout.ids is None and not trace.uniform(tensor, whole, layout.axis):
            trace.doubts.append(f"{what} differs between positions of the batch and does not depend on it")
    elif isinstance(kind, Mixed):
        trace.doubts.append(f"{what} comes from {kind.reason}")
    elif (kind.axis, kind.pre, kind.post) != (layout.axis, layout.pre, layout.post):
        trace.doubts.append(f"{what} has its samples elsewhere than expected")
    elif not same_ids(kind.ids, layout.ids) or not same_slots(kind, Rows(0, 1, slots=layout.slots, of=layout.of)):
        trace.doubts.append(f"{what} has its samples in another order")
    elif kind.doubt:
        trace.doubts.append(f"{what} comes from {kind.doubt}")
