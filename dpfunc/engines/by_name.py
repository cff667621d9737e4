"""Engines by their names.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from collections.abc import Callable

from dpfunc._utils.validation import one_of
from dpfunc.engines.capture import captured
from dpfunc.engines.loop import loop
from dpfunc.engines.vmap_grad import auto, ghost, vmap
from dpfunc.types import Engine

ENGINES: dict[str, Callable[[], Engine]] = {
    "auto": auto, "ghost": ghost, "vmap": vmap, "loop": loop, "captured": captured
}  # fmt: skip


def engine_of(engine: str | Engine) -> Engine:
    """The engine with this name, or the engine itself.

    >>> engine_of("rows")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected engine to be one of 'auto', 'ghost', ..., got engine='rows'.
    """
    if not isinstance(engine, str):
        return engine
    one_of("engine", engine, ENGINES)
    return ENGINES[engine]()
