"""Scope of a forward pass until its backward pass is done: tensors that were swapped into a module stay until then.

Gradient checkpointing runs parts of the forward pass again inside the backward pass, with whatever the module holds
then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_open: ContextVar[Scope | None] = ContextVar("dpfunc_backward_scope", default=None)


@dataclass
class Scope:
    """Contexts that stay entered until the backward pass is done."""

    stack: ExitStack = field(default_factory=ExitStack)

    def hold(self, swap: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter a context now, and leave it when the backward pass is done."""
        self.stack.enter_context(swap())


@contextmanager
def backward_inside() -> Iterator[None]:
    """Inside, `until_backward()` gives a scope that is unwound when the block ends."""
    scope = Scope()
    with scope.stack:
        token = _open.set(scope)
        try:
            yield
        finally:
            _open.reset(token)


def until_backward() -> Scope | None:
    """Scope of the engine that is running, or None."""
    return _open.get()
