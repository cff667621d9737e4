"""Engines by name, as `make_dp_step(..., engine=...)` takes them."""

from __future__ import annotations

from collections.abc import Callable

from dpfunc._utils.validation import one_of
from dpfunc.engines.loop import loop
from dpfunc.engines.vmap_grad import auto, ghost, vmap
from dpfunc.types import Engine

ENGINES: dict[str, Callable[[], Engine]] = {"auto": auto, "ghost": ghost, "vmap": vmap, "loop": loop}


def engine_of(engine: str | Engine) -> Engine:
    """The engine with this name, or the engine itself.

    Args:
        engine: a name in `ENGINES`, or an engine.

    Raises:
        InvalidArgument: an unknown name.

    >>> engine_of("rows")
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected engine to be one of 'auto', 'ghost', 'vmap', 'loop', got engine='rows'.
    """
    if not isinstance(engine, str):
        return engine
    one_of("engine", engine, ENGINES)
    return ENGINES[engine]()
