"""Numbers of the batch that reviewed functions of libraries may give to Python without a doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from dpfunc.engines.tracing.call import Call, Type
from dpfunc.engines.tracing.entries import part
from dpfunc.engines.tracing.readers import (
    DRAWING,
    EACH_IMAGE,
    ONE_BY_ONE,
    SAME_FOR_ALL,
    TRUSTED,
    listed,
    omits_mask_wrongly,
    reader,
)
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, Stored

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace

_GRID_SIZE = 3
"""Numbers of the grid of an image: frames, height, width."""


def may_read(trace: Trace, value: Tensor, kind: Type, module: str, name: str) -> bool:
    """True if a number that is read by this function of this module does not depend on other samples."""
    if listed(TRUSTED, module, name) or listed(DRAWING, module, name):
        return not omits_mask_wrongly()
    if listed(ONE_BY_ONE, module, name):
        return _own(kind)
    return listed(SAME_FOR_ALL, module, name) and _same_for_all(trace, value)


def may_measure(trace: Trace, kind: Type, module: str, name: str) -> bool:
    """True if a shape that is read by this function of this module does not depend on other samples."""
    if listed(TRUSTED, module, name) or (_own(kind) and listed(ONE_BY_ONE, module, name)):
        return True
    return (_own(kind) or _even(kind, trace.num_samples)) and listed(EACH_IMAGE, module, name)


def _even(kind: Type, count: int) -> bool:
    """True for rows of all samples, as many of each: as many as each alone has."""
    if not isinstance(kind, Rows) or kind.doubt or kind.slots is not None:
        return False
    return kind.axis != ONE_SAMPLE and kind.ids is None and kind.count == count


def _own(kind: Type) -> bool:
    return isinstance(kind, Rows) and kind.axis == ONE_SAMPLE and not kind.doubt


def _same_for_all(trace: Trace, value: Tensor) -> bool:
    """True if integers are each of one sample, of all samples, and the same for each image.

    Then what follows from them is what it would be of each sample alone. Of one image, the others are beside it in its
    memory.
    """
    kind = trace.type_of(value)
    if not isinstance(kind, Rows) or kind.doubt or kind.ragged or kind.slots is not None or value.is_floating_point():
        return False
    own = part(value)
    if kind.axis != ONE_SAMPLE:
        every = kind.ids is None and kind.count == trace.num_samples
        return every and bool((own == own.narrow(kind.axis, 0, 1)).all())
    return _same_for_all_in_memory(trace, own)


def _same_for_all_in_memory(trace: Trace, own: Tensor) -> bool:
    """True if the numbers of all images in the memory of a tensor of one image are the same for each."""
    entry = trace.entry_of(own)
    if not isinstance(entry, Stored) or entry.ids is not None or entry.count != trace.num_samples:
        return False
    memory = own.detach().new_empty(0).set_(own.untyped_storage())
    first, length = entry.base // own.element_size(), entry.step * entry.count // own.element_size()
    numbers = memory[first : first + length]
    if len(numbers) != length or not length:
        return False
    size = own.numel() if own.ndim else _GRID_SIZE
    grids = numbers.view(-1, size if length % (size * trace.num_samples) == 0 else 1)
    return bool((grids == grids[:1]).all())


def as_numbers(trace: Trace, call: Call, kind: Type) -> bool:
    """True if a reviewed function mixes integers that are the same for each image: as Python might do instead."""
    if not isinstance(kind, Mixed) or not isinstance(call.out, Tensor) or call.out.is_floating_point():
        return False
    given = [tensor for tensor in call.inputs if trace.type_of(tensor) is not None]
    module, _, name = reader()
    return bool(given) and listed(SAME_FOR_ALL, module, name) and all(_same_for_all(trace, tensor) for tensor in given)


def kept_numbers() -> Mixed | None:
    """The type of a tensor made of Python numbers, where those are of several samples."""
    module, line, name = reader()
    return Mixed(f"numbers of the batch, in {module} line {line}") if listed(ONE_BY_ONE, module, name) else None
