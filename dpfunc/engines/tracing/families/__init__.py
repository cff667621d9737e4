"""Which rows the results of operations have, one family of operations a file. Elementwise operations need no entry.

The names are those of torch's ATen operations, without overload and without a trailing underscore. An operation that is
in no table makes a step unproven, not wrong: see `call.assumed`.
"""

from __future__ import annotations

from dpfunc.engines.tracing.call import Handler
from dpfunc.engines.tracing.families import along, exchanges, indexing, layers, products, reading, shaping

FAMILIES: dict[str, Handler] = {
    **along.FAMILY, **indexing.FAMILY, **layers.FAMILY, **products.FAMILY, **reading.FAMILY, **shaping.FAMILY,
}  # fmt: skip

EXCHANGES: dict[str, Handler] = dict(exchanges.FAMILY)
"""Collectives of torch's own wrappers, which are not ATen operations."""
