"""Engines by name, as `make_dp_step(..., engine=...)` takes them."""

from __future__ import annotations

from collections.abc import Callable

from dpfunc._utils.validation import one_of
from dpfunc.engines.auto import auto
from dpfunc.engines.bookkeeping import bookkeeping
from dpfunc.engines.ghost import ghost
from dpfunc.engines.loop import loop
from dpfunc.engines.vmap import vmap
from dpfunc.engines.vmap_grad import vmap_grad
from dpfunc.errors import InvalidArgument
from dpfunc.types import UNPROVEN, Engine, Unproven

ENGINES: dict[str, Callable[[Unproven | None], Engine]] = {
    "auto": lambda unproven: auto(unproven=unproven or "vmap"),
    "bookkeeping": lambda unproven: bookkeeping(unproven="audit" if unproven == "audit" else "refuse"),
    "ghost": lambda unproven: ghost(unproven="audit" if unproven == "audit" else "refuse"),
    "vmap": lambda unproven: vmap(),
    "loop": lambda unproven: loop(),
    "vmap_grad": lambda unproven: vmap_grad(),
}


def engine_of(engine: str | Engine, unproven: Unproven | None = None) -> Engine:
    """The engine with this name, or the engine itself.

    Args:
        engine: a name in `ENGINES`, or an engine. unproven: see `make_dp_step`; None is the default of the engine.

    Raises:
        InvalidArgument: an unknown name or policy; a policy that the engine does not take; one with an engine of the
            caller's own, which was made with its policy.

    >>> engine_of("rows")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected engine to be one of 'auto', 'bookkeeping', 'ghost', 'vmap', 'loop', ...
    """
    if not isinstance(engine, str):
        if unproven is not None:
            raise InvalidArgument(
                "Expected unproven= with the name of an engine; give it to an engine of your own when it is made."
            )
        return engine
    one_of("engine", engine, ENGINES)
    if unproven is not None:
        one_of("unproven", unproven, UNPROVEN)
    if unproven == "vmap" and engine in ("bookkeeping", "ghost"):
        raise InvalidArgument(
            f'Expected unproven="audit" or "refuse" with engine={engine!r}, got unproven="vmap". Use engine="auto", '
            "which computes the rows of such a step alone."
        )
    return ENGINES[engine](unproven)
