"""Rows that rules declare for tensors that they make, after a check of the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfunc.engines.tracing import rows as rows_module
from dpfunc.engines.tracing.call import Call, Type, combined
from dpfunc.engines.tracing.entries import Constant, fits, key_of
from dpfunc.engines.tracing.families.aligning import nowhere
from dpfunc.engines.tracing.families.packed import doubt_of_lengths
from dpfunc.engines.tracing.families.recurrent import as_time_first, time_first
from dpfunc.engines.tracing.operations import Kind, Known
from dpfunc.engines.tracing.repeated import key_of_values
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, stored

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace


def declare_parts(trace: Trace, source: Tensor, offsets: Tensor, positions_NL: Tensor, real_NL: Tensor) -> Tensor:
    """Positions (N, L) of N consecutive parts of a tensor, typed as of one sample each if their values show it.

    Args:
        source: the tensor. offsets: the start of each part, and the end of the last one, (N + 1,).

    Returns:
        The positions; those of an empty part are the first one of its sample.
    """
    kind, count = trace.type_of(source), trace.num_samples
    if trace.alone or not isinstance(kind, Rows) or kind.axis != 0:
        return positions_NL
    samples = rows_module.samples_by_position(kind)
    starts_B = _starts_of_parts(trace, samples, offsets)
    if starts_B is None:
        return positions_NL
    each = len(positions_NL) // count
    firsts_N1 = starts_B.repeat_interleave(each)[:, None].to(positions_NL.device)
    positions_NL = torch.where(real_NL.any(1, keepdim=True), positions_NL, firsts_N1).clamp(
        max=max(0, len(samples) - 1)
    )
    wanted_N1 = torch.arange(count).repeat_interleave(each)[:, None]
    if bool((samples[positions_NL.cpu()] == wanted_N1).all()):
        for tensor in (positions_NL, real_NL):
            trace.note(tensor, stored(Rows(0, count, 1, each, None, kind.doubt), tensor))
    return positions_NL


def _starts_of_parts(trace: Trace, samples: Tensor, offsets: Tensor) -> Tensor | None:
    """The start of each sample, where its parts are all of its numbers, whatever others hold; else None.

    Args:
        samples: of each position of the tensor. offsets: of the parts, see `declare_parts`.
    """
    count, number = trace.num_samples, len(offsets) - 1
    if not number or number % count:
        return None
    starts_B = torch.searchsorted(samples, torch.arange(count))
    offsets_Bm = offsets[:-1].cpu().reshape(count, -1)
    every = torch.equal(offsets_Bm[:, 0], starts_B) and int(offsets[-1]) == len(samples)
    return starts_B if every and _are_own_offsets(trace, offsets_Bm - starts_B[:, None]) else None


def _are_own_offsets(trace: Trace, offsets_Bm: Tensor) -> bool:
    """True if offsets within each sample are the same for all samples, or are known as numbers of its own."""
    same = bool((offsets_Bm == offsets_Bm[:1]).all())
    return offsets_Bm.shape[1] == 1 or same or trace.are_own_integers(offsets_Bm, Rows(0, trace.num_samples))


def with_rows_of(trace: Trace, constant: Tensor, other: Tensor, axis: int, *, uniform: bool = True) -> Tensor:
    """A copy of constants with the rows that another tensor has on an axis.

    Args:
        uniform: they must be the same for each row; False for what follows from the number of rows of each sample.
    """
    kind = trace.type_of(other)
    if trace.alone or not isinstance(kind, Rows) or kind.axis != axis or trace.type_of(constant) is not None:
        return constant
    if not fits(kind, constant) or (uniform and not trace.uniform(constant, kind, axis)):
        return constant
    made = constant.clone(memory_format=torch.contiguous_format)
    trace.note(made, stored(kind, made))
    return made


def declare_sizes(trace: Trace, x_TBd: Tensor, lengths_B: Tensor, sizes_T: Tensor) -> str:
    """Note that the sizes of a packed sequence follow from the lengths of its samples.

    Returns:
        Why a length may not be of its own sample alone; empty if it is.
    """
    kind = trace.type_of(x_TBd)
    if trace.alone or not isinstance(kind, Rows) or kind.axis != 1:
        return ""
    doubt = doubt_of_lengths(trace, kind, lengths_B)
    if not doubt:
        trace.note(sizes_T, Constant.SIZES if kind.slots is None else Constant.SORTED)
    return doubt


def declare_padded(trace: Trace, data_Nd: Tensor, sizes_T: Tensor, rows_TB: Tensor) -> bool:
    """Type the rows (T * B,) of packed data that belong to each sample, if their values show it.

    Returns:
        True if the sizes follow from lengths, and the rows are those of the samples.
    """
    kind, known_sizes = trace.type_of(data_Nd), trace.entry_of(sizes_T) in (Constant.SIZES, Constant.SORTED)
    if not known_sizes or not isinstance(kind, Rows) or kind.axis:
        return False
    samples, count = rows_module.samples_by_position(kind), int(sizes_T[0])
    first, steps = samples[:count], len(rows_TB) // count
    known = len(samples) == int(sizes_T.sum()) and torch.equal(samples[rows_TB.cpu()], first.repeat(steps))
    if known:
        own = rows_module.normal(first, trace.num_samples)
        trace.note(rows_TB, stored(Rows(0, count, steps, 1, own, kind.doubt), rows_TB))
    return known


def declare_over_time(
    trace: Trace, results: Sequence[Tensor], inputs: Sequence[Tensor], fixed: Sequence[Tensor]
) -> None:
    """Type what was computed unseen over the steps of a recurrent layer, where each row of a step goes on alone.

    Args:
        results, inputs: (T, B, d) or (B, d). Results that share the memory of an input keep its type.
        fixed: matrices, which must not depend on a sample.
    """
    given = {key_of(tensor) for tensor in inputs}
    made = [tensor for tensor in results if key_of(tensor) not in given]

    def over_time(call: Call) -> list[Type]:
        kind = combined(call, [*map(time_first, inputs), *map(nowhere, fixed)], (0, 2))
        return [as_time_first(kind, tensor) for tensor in made]

    names = ("over time", len(inputs), *(tensor.dtype for tensor in made))  # dtypes do not follow under autocast
    key = key_of_values(trace, names, (*inputs, *fixed))
    if key is not None and trace.recalls(key, made):
        return
    call = Call.of(trace, "a recurrent layer", (*inputs, *fixed), {}, made)
    trace.type_declared(Known(Kind.FAMILY, call.name, over_time, ()), call, key)


def are_sorted(trace: Trace, tensor: Tensor) -> bool:
    """True for sizes of sorted samples, and for rows in an order that depends on several samples."""
    entry = trace.entry_of(tensor)
    if entry is None or isinstance(entry, Constant):
        return entry is Constant.SORTED
    kind = trace.type_of(tensor)
    return isinstance(kind, Rows) and kind.slots is not None


def _relabelled(trace: Trace, kind: Rows, *, changed: bool, is_sorted: bool) -> Rows:
    """Rows on the sample axis that leave a packed layer (changed), or enter it; see `ordered`."""
    kind = kind._replace(slots=None, of=0, ragged=kind.ragged and not changed)  # the result has a row for each sample
    if not changed:
        ids = None if kind.ids is None else rows_module.normal(kind.ids, trace.num_samples)
        return kind._replace(ids=ids)
    if kind.ids is None and not is_sorted:
        return kind
    trace.shuffle()
    slots, of = rows_module.slots_of(kind, trace.num_samples)
    if of != trace.num_samples:
        return kind.doubted("samples of some rows")
    return kind._replace(ids=rows_module.samples_by_position(kind), slots=slots, of=of)


def ordered(
    trace: Trace, tensor: Tensor, axis: int, *, changed: bool, is_sorted: bool = False, doubt: str = ""
) -> Tensor:
    """Copy a tensor, and mark its rows as in an order that depends on several samples, or as ordinary again.

    Packed sequences are sorted by length. Inside of a recurrent layer each row goes on alone, wherever it is.

    Args:
        changed: rows leave the packed layer, and have the order of its samples. is_sorted: that order depends on
            several samples, also where it is equal to that of the batch. doubt: of the result, empty if none.
    """
    kind = trace.type_of(tensor)
    made = tensor.clone(memory_format=torch.contiguous_format)
    if kind is None:
        trace.note(made, Constant.ANY)
        return made
    if trace.alone:
        kind = Rows(ONE_SAMPLE, 1)
    elif isinstance(kind, Rows) and kind.axis == axis and fits(kind, made):
        kind = _relabelled(trace, kind, changed=changed, is_sorted=is_sorted).doubted(doubt)
    elif isinstance(kind, Rows):
        elsewhere = kind.axis != ONE_SAMPLE or kind.slots is not None
        kind = Mixed("packed rows on another axis") if elsewhere else kind.doubted(doubt)
    trace.note(made, stored(kind, made) if isinstance(kind, Rows) else kind)
    return made
