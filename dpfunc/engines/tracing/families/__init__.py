"""Rows of the results of operations, one family of operations a file. Elementwise operations need no entry.

The names are those of torch's ATen operations, without overload and without a trailing underscore. An operation that is
in no table makes a step unproven, not wrong: see `call.assumed`.
"""

from __future__ import annotations

from dpfunc.engines.tracing.call import Handler
from dpfunc.engines.tracing.families import (
    along,
    exchanges,
    indexing_read,
    indexing_write,
    layers,
    lookups,
    masks,
    packed,
    products,
    reading,
    shaping,
    tables,
)

FAMILIES: dict[str, Handler] = {
    **along.FAMILY, **indexing_read.FAMILY, **indexing_write.FAMILY, **layers.FAMILY, **lookups.FAMILY, **masks.FAMILY,
    **packed.FAMILY, **products.FAMILY, **reading.FAMILY, **shaping.FAMILY, **tables.FAMILY,
}  # fmt: skip

EXCHANGES: dict[str, Handler] = dict(exchanges.FAMILY)
"""Collectives of torch's own wrappers, which are not ATen operations."""
