"""Rows of the results of operations, one family of operations a file. Elementwise operations need no entry.

The names are those of torch's ATen operations, without overload and without a trailing underscore. An operation that is
in no table makes a step unproven, not wrong: see `call.assumed`.
"""

from __future__ import annotations

from importlib import import_module

from dpfunc.engines.tracing.call import Handler
from dpfunc.engines.tracing.families import exchanges, four_bits

_NAMES = (
    "along",
    "attention",
    "choices",
    "convolutions",
    "indexing_read",
    "indexing_write",
    "layers",
    "lookups",
    "losses",
    "masks",
    "norms",
    "packed",
    "pools",
    "products",
    "reading",
    "recurrent",
    "shaping",
    "tables",
)
FAMILIES: dict[str, Handler] = {
    name: handler for family in _NAMES for name, handler in import_module(f"{__name__}.{family}").FAMILY.items()
}

PURE = frozenset(
    name
    for family in ("along", "attention", "convolutions", "layers", "losses", "norms", "pools", "products", "shaping")
    for name in import_module(f"{__name__}.{family}").FAMILY
    if name not in ("_grouped_mm", "sort", "argsort", "all", "any", "_is_all_true", "_is_any_true", "repeat_interleave")
)
"""Operations whose rules look at types, shapes and Python numbers only; where they ask `uniform`, that is noted."""

EXCHANGES: dict[str, Handler] = dict(exchanges.FAMILY)
"""Collectives of torch's own wrappers, which are not ATen operations."""

FOUR_BITS: dict[str, Handler] = dict(four_bits.FAMILY)
"""Products with weights in 4 bits, which are operations of bitsandbytes."""
