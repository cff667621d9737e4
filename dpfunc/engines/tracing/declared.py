"""Rows that a rule declares of its own tensors, as far as their values show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfunc.engines.tracing import rows as rows_module
from dpfunc.engines.tracing.entries import Constant, fits, key_of
from dpfunc.engines.tracing.families.packed import doubt_of_lengths
from dpfunc.engines.tracing.rows import WHOLE, Mixed, Rows, stored

if TYPE_CHECKING:
    from dpfunc.engines.tracing.trace import Trace


def declare_parts(trace: Trace, source: Tensor, cuts: Tensor, places_NL: Tensor, real_NL: Tensor) -> Tensor:
    """Places (N, L) of N parts of a tensor that is cut into parts in order, each of one sample: seen by value.

    Args:
        source: what is cut. cuts: where each part begins, and where the last one ends, (N + 1,).

    Returns:
        The places; those of an empty part are the first one of its sample.
    """
    kind, count = trace.type_of(source), trace.num_samples
    if trace.alone or not isinstance(kind, Rows) or kind.axis != 0 or not len(places_NL) or len(places_NL) % count:
        return places_NL
    each, samples = len(places_NL) // count, rows_module.spread(kind)
    starts_B = torch.searchsorted(samples, torch.arange(count))
    cuts_Bm = cuts[:-1].cpu().reshape(count, each)
    # the parts of a sample are all of its numbers, whatever others hold
    outer = torch.equal(cuts_Bm[:, 0], starts_B) and int(cuts[-1]) == len(samples)
    if not outer or not _own_cuts(trace, cuts_Bm - starts_B[:, None]):
        return places_NL
    firsts_N1 = starts_B.repeat_interleave(each)[:, None].to(places_NL.device)
    places_NL = torch.where(real_NL.any(1, keepdim=True), places_NL, firsts_N1).clamp(max=max(0, len(samples) - 1))
    wanted_N1 = torch.arange(count).repeat_interleave(each)[:, None]
    if bool((samples[places_NL.cpu()] == wanted_N1).all()):
        for tensor in (places_NL, real_NL):
            trace.note(tensor, stored(Rows(0, count, 1, each, None, kind.doubt), tensor))
    return places_NL


def _own_cuts(trace: Trace, cuts_Bm: Tensor) -> bool:
    """True if places within each sample are the same for all samples, or were seen as numbers of its own."""
    same = bool((cuts_Bm == cuts_Bm[:1]).all())
    return cuts_Bm.shape[1] == 1 or same or trace.own(cuts_Bm, Rows(0, trace.num_samples))


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
    """Rows of packed data that belong to each sample (T * B,), seen by value; of sizes that follow from lengths.

    Returns:
        True if they are known.
    """
    kind, entry = trace.type_of(data_Nd), trace.entries.get(key_of(sizes_T))
    if entry is None or entry[1] not in (Constant.SIZES, Constant.SORTED) or not isinstance(kind, Rows) or kind.axis:
        return False
    samples, count = rows_module.spread(kind), int(sizes_T[0])
    first, steps = samples[:count], len(rows_TB) // count
    known = len(samples) == int(sizes_T.sum()) and torch.equal(samples[rows_TB.cpu()], first.repeat(steps))
    if known:
        own = rows_module.normal(first, trace.num_samples)
        trace.note(rows_TB, stored(Rows(0, count, steps, 1, own, kind.doubt), rows_TB))
    return known


def are_sorted(trace: Trace, tensor: Tensor) -> bool:
    """True of sizes of sorted samples, and of rows in an order that depends on several samples."""
    entry = trace.entries.get(key_of(tensor))
    if entry is None or isinstance(entry[1], Constant):
        return entry is not None and entry[1] is Constant.SORTED
    kind = trace.type_of(tensor)
    return isinstance(kind, Rows) and kind.slots is not None


def ordered(
    trace: Trace, tensor: Tensor, axis: int, *, changed: bool, is_sorted: bool = False, doubt: str = ""
) -> Tensor:
    """Copy a tensor, and mark its rows as in an order that depends on several samples, or as ordinary again.

    Packed sequences are sorted by length. Inside of a recurrent layer each row goes on alone, wherever it is.

    Args:
        is_sorted: that order happens to be the one of the batch, perhaps.
    """
    kind = trace.type_of(tensor)
    made = tensor.clone(memory_format=torch.contiguous_format)
    if kind is None or trace.alone:
        trace.note(made, Constant.ANY if kind is None else stored(Rows(WHOLE, 1), made))
        return made
    if isinstance(kind, Rows) and kind.axis == axis and fits(kind, made):
        # the result has a row for each sample
        kind = kind._replace(slots=None, of=0, ragged=kind.ragged and not changed)
        if not changed and kind.ids is not None:
            kind = kind._replace(ids=rows_module.normal(kind.ids, trace.num_samples))
        if changed and (kind.ids is not None or is_sorted):
            slots, of = rows_module.slots_of(kind, trace.num_samples)
            kind = (
                kind._replace(ids=rows_module.spread(kind), slots=slots, of=of)
                if of == trace.num_samples
                else kind.doubted("samples of some rows")
            )
            trace.shuffle()
        kind = kind.doubted(doubt) if doubt else kind
    elif isinstance(kind, Rows):
        if kind.axis != WHOLE or kind.slots is not None:
            kind = Mixed("packed rows on another axis")
        elif doubt:
            kind = kind.doubted(doubt)
    trace.note(made, stored(kind, made) if isinstance(kind, Rows) else kind)
    return made
