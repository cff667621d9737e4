"""Operations of ATen: the facts about each that do not depend on its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines.guards.collectives import communicates
from dpfunc.engines.guards.random_calls import is_random
from dpfunc.engines.tracing.call import Call, tensors_of
from dpfunc.engines.tracing.families import EXCHANGES, FAMILIES, FOUR_BITS, PURE


class Kind(Enum):
    """Way in which the type of an operation's result is found."""

    VIEW = 0
    POINTWISE = 1
    FAMILY = 2
    UNKNOWN = 3
    FILLED = 4
    RANDOM = 5


@dataclass(frozen=True)
class Known:
    """Facts about an operation that hold for all arguments.

    Args:
        kind: how its result is typed. name: without overload. handler: of a family. written: arguments, by position or
            name, that it writes into. random: it draws random numbers. exchange: it communicates. shares: its results
            always share the memory of its argument, whose entry holds for them. pure: its type follows from shapes and
            types alone, whatever the numbers are. number: of its own. lifts: it makes a tensor of Python values.
            gives: it gives a number to Python. unwritten: its result, or what `resize_` adds, has the numbers that
            were in this memory before, perhaps of other samples. resizes: it is `resize_`. foreign: it is in no table,
            and not of torch. shapes: the shape of its result follows from values.
            statistics: arguments that it writes into in training mode, undeclared.
    """

    kind: Kind
    name: str
    handler: Callable[[Call], Any] | None
    written: tuple[int | str, ...]
    random: bool = False
    exchange: bool = False
    shares: bool = False
    pure: bool = False
    number: int = 0
    lifts: bool = False
    gives: bool = False
    unwritten: bool = False
    resizes: bool = False
    foreign: bool = False
    shapes: bool = False
    statistics: tuple[int, ...] = ()


_FILLED = frozenset((
    "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "scalar_tensor", "empty_strided", "new_empty_strided", "_efficientzerotensor", "fill_",
    "zero_", "empty_permuted",
))  # fmt: skip
_UNWRITTEN = frozenset((
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_",
))  # fmt: skip
_RANDOM = frozenset((
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli_", "uniform_", "normal_",
    "random_", "exponential_", "geometric_", "log_normal_", "cauchy_", "bernoulli", "normal",
))  # fmt: skip
_ALIASES = frozenset((
    "_unsafe_view", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes", "detach", "detach_", "alias", "set_",
    "resize_", "_conj", "_neg_view", "as_strided_",
))  # fmt: skip
# Collectives of torch's own wrappers; those that only wait give their argument back.
_EXCHANGING = frozenset(("_c10d_functional", "_c10d_functional_autograd", "_dtensor"))
_LIFTING = frozenset(("lift_fresh", "lift_fresh_copy"))
RECEIVING = frozenset(("scatter_", "recv_", "recv_any_source_"))
_WAITING = frozenset(("wait_tensor", "_wrap_tensor_autograd"))
# What keeps "true for all, so true for each" and "false for any, so false for each".
AGREEING = frozenset(("all", "any", "_is_all_true", "_is_any_true", "clone", "_to_copy"))
# Their results have the shape of their first argument, whatever they write into it.
PLACING = frozenset((
    "index_put", "_unsafe_index_put", "_index_put_impl", "index_add", "index_copy", "scatter", "scatter_add",
    "scatter_reduce", "masked_scatter", "slice_scatter", "select_scatter",
))  # fmt: skip
# Their running statistics, into which they write; not all declare it in their schema.
_STATISTICS = {
    "batch_norm": (3, 4), "_batch_norm_impl_index": (3, 4), "native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4), "batch_norm_update_stats": (1, 2), "batch_norm_gather_stats": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
}  # fmt: skip
# Families that know what to do with rows in an order that depends on several samples.
ORDERED = frozenset((
    "index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl", "index_add", "index_copy",
    "index_select", "sort", "_pack_padded_sequence", "_pack_padded_sequence_backward",
))  # fmt: skip
# Numbers that follow from Python numbers.
_COUNTING = frozenset(("arange", "linspace"))
COPYING = frozenset(("clone", "_to_copy", "contiguous"))

_OWN = ("aten", "prims")
_TORCHS = (*_OWN, "torchvision", "quantized", "mkldnn", "mkl", "inductor", "symm_mem")
_BY_NAME = {
    "lift_fresh": Kind.UNKNOWN,  # a view of a tensor made of Python numbers
    **dict.fromkeys(_FILLED, Kind.FILLED),
    **dict.fromkeys(_RANDOM, Kind.RANDOM),
}
_HANDLERS = {
    **dict.fromkeys(_OWN, FAMILIES), **dict.fromkeys(_EXCHANGING, EXCHANGES), "bitsandbytes": FOUR_BITS,
}  # fmt: skip

# By identity: torch hashes operations in Python. The operation is kept, so that its identity is its own.
_known: dict[int, tuple[Any, Known]] = {}


def known_operation(func: Any) -> Known:
    """Look up an operation in the tables at its first call, later in a cache."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = func, replace(_look_up(func), number=len(_known))
    return found[1]


def undeclared(known: Known, args: Sequence[Any]) -> list[Tensor]:
    """Running statistics that an operation writes into: those of batch norm, in training mode."""
    if not known.statistics or (args[5:6] and args[5] is False):
        return []
    return list(tensors_of(args[at] for at in known.statistics))


def _look_up(func: Any) -> Known:
    if not isinstance(func, torch._ops.OpOverload):
        return Known(Kind.UNKNOWN, str(func), None, ())
    name = func._schema.name.rpartition("::")[2]
    found = _kind_of(func, name, _written_arguments(func._schema.arguments))
    random, exchange = is_random(func), communicates(func)
    shares = found.kind is Kind.VIEW and func.is_view and not exchange and not _composite(func)
    pure = not random and not exchange and _follows_from_types(found, func.namespace)
    return replace(
        found, random=random, exchange=exchange, shares=shares, pure=pure, lifts=name in _LIFTING,
        gives=name == "_local_scalar_dense", unwritten=name in _UNWRITTEN, resizes=name == "resize_",
        statistics=_STATISTICS.get(name, ()), shapes=torch.Tag.dynamic_output_shape in func.tags,
        foreign=found.kind is Kind.UNKNOWN and not exchange and func.namespace not in _TORCHS,
    )  # fmt: skip


def _written_arguments(arguments: Sequence[Any]) -> tuple[int | str, ...]:
    """The arguments that an operation writes into: their positions, or names."""
    return tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _follows_from_types(known: Known, namespace: str) -> bool:
    """True if the type of the result follows from shapes, types and Python numbers, whatever the numbers are."""
    if known.written or known.name in _STATISTICS or known.name in _UNWRITTEN:
        return False
    if known.kind is Kind.FAMILY:
        return known.name in PURE
    return known.kind in (Kind.POINTWISE, Kind.FILLED) or (known.name in _COUNTING and namespace == "aten")


def _composite(func: Any) -> bool:
    """True if an operation is made of others, as `reshape` and `to`, which may copy."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _kind_of(func: Any, name: str, written: tuple[int | str, ...]) -> Known:
    if func.namespace in _OWN and name in _BY_NAME:
        return Known(_BY_NAME[name], name, None, written)
    if _gives_its_argument(func, name):
        return Known(Kind.VIEW, name, None, ())
    plain = name.rstrip("_") if not name.startswith("__") else name
    handler = _HANDLERS.get(func.namespace, {}).get(plain)
    if handler is not None and not (written and func.namespace == "bitsandbytes"):
        return Known(Kind.FAMILY, name, handler, written)
    return Known(Kind.POINTWISE if _is_pointwise(func, plain) else Kind.UNKNOWN, name, None, written)


def _gives_its_argument(func: Any, name: str) -> bool:
    """True for operations whose result usually is, or is in, the memory of their argument."""
    if func.namespace in _OWN:
        return bool(func.is_view) or name in _ALIASES
    return func.namespace in _EXCHANGING and (bool(func.is_view) or name in _WAITING)


def _is_pointwise(func: Any, plain: str) -> bool:
    """True if torch says so of an operation of its own, or of another overload of it."""
    if func.namespace not in _OWN:  # what others say of theirs is not known
        return False
    if torch.Tag.pointwise in func.tags:
        return True
    packet = getattr(torch.ops.aten, plain, None)
    overloads = () if packet is None else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)
