"""Operations of ATen: the facts about each that do not depend on its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from dpfunc.engines.guards.collectives import communicates
from dpfunc.engines.guards.draws import draws_numbers
from dpfunc.engines.tracing.call import Call
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
            types alone, whatever the numbers are. number: of its own.
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


_FILLED = frozenset((
    "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "scalar_tensor", "empty_strided", "new_empty_strided", "_efficientzerotensor", "fill_",
    "zero_", "empty_permuted",
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
RECEIVING = frozenset(("scatter_", "recv_", "recv_any_source_"))
_WAITING = frozenset(("wait_tensor", "_wrap_tensor_autograd"))
# What keeps "true for all, so true for each" and "false for any, so false for each".
AGREEING = frozenset(("all", "any", "_is_all_true", "_is_any_true", "clone", "_to_copy"))
# Their results have the shape of their first argument, whatever they write into it.
PLACING = frozenset((
    "index_put", "_unsafe_index_put", "_index_put_impl", "index_add", "index_copy", "scatter", "scatter_add",
    "scatter_reduce", "masked_scatter", "slice_scatter", "select_scatter",
))  # fmt: skip
# They write statistics into arguments 3 and 4, which their schema does not declare.
WRITING_STATISTICS = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))
# Families that know what to do with rows in an order that depends on several samples.
ORDERED = frozenset((
    "index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl", "index_add", "index_copy",
    "index_select", "sort", "_pack_padded_sequence", "_pack_padded_sequence_backward",
))  # fmt: skip
# Numbers that follow from Python numbers.
_COUNTING = frozenset(("arange", "linspace"))
COPYING = frozenset(("clone", "_to_copy", "contiguous"))

# By identity: torch hashes operations in Python. The operation is kept, so that its identity is its own.
_known: dict[int, tuple[Any, Known]] = {}


def known_operation(func: Any) -> Known:
    """Look up an operation in the tables at its first call, later in a cache."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = func, replace(_look_up(func), number=len(_known))
    return found[1]


def _look_up(func: Any) -> Known:
    if not isinstance(func, torch._ops.OpOverload):
        return Known(Kind.UNKNOWN, str(func), None, ())
    schema, name = func._schema, func._schema.name.rpartition("::")[2]
    arguments = schema.arguments
    written = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    found = _kind_of(func, name, written)
    exchange = communicates(func)
    shares = found.kind is Kind.VIEW and func.is_view and not exchange and not _composite(func)
    random = draws_numbers(func)
    pure = not (found.written or random or exchange or name in WRITING_STATISTICS) and (
        found.kind in (Kind.POINTWISE, Kind.FILLED)
        or (found.kind is Kind.FAMILY and name in PURE)
        or (name in _COUNTING and func.namespace == "aten")
    )
    return replace(found, random=random, exchange=exchange, shares=shares, pure=pure)


def _composite(func: Any) -> bool:
    """True if an operation is made of others, as `reshape` and `to`, which may copy."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _kind_of(func: Any, name: str, written: tuple[int | str, ...]) -> Known:
    own = func.namespace in ("aten", "prims")
    plain = name.rstrip("_") if not name.startswith("__") else name
    if name == "lift_fresh":  # a tensor made of Python numbers
        return Known(Kind.UNKNOWN, name, None, ())
    if name in _FILLED:
        return Known(Kind.FILLED, name, None, written)
    if name in _RANDOM:
        return Known(Kind.RANDOM, name, None, written)
    if func.namespace in _EXCHANGING and plain in EXCHANGES:
        return Known(Kind.FAMILY, name, EXCHANGES[plain], written)
    if func.namespace == "bitsandbytes" and name in FOUR_BITS and not written:
        return Known(Kind.FAMILY, name, FOUR_BITS[name], written)
    if func.is_view or name in _ALIASES or (func.namespace in _EXCHANGING and name in _WAITING):
        return Known(Kind.VIEW, name, None, ())
    if own and plain in FAMILIES:
        return Known(Kind.FAMILY, name, FAMILIES[plain], written)
    pointwise = torch.Tag.pointwise in func.tags
    if not pointwise and own:
        packet = getattr(torch.ops.aten, plain, None)
        pointwise = packet is not None and any(
            torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
        )
    return Known(Kind.POINTWISE if pointwise else Kind.UNKNOWN, name, None, written)
