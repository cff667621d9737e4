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

_Swap = Callable[[], AbstractContextManager[None]]


@dataclass
class Scope:
    """Contexts that stay entered until the backward pass is done.

    `again` enters them once more, for a second backward pass.
    """

    stack: ExitStack = field(default_factory=ExitStack)
    swaps: list[_Swap] = field(default_factory=list)

    def hold(self, swap: _Swap) -> None:
        """Enter a context now, and leave it when the backward pass is done."""
        self.stack.enter_context(swap())
        self.swaps.append(swap)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, all contexts that were held are entered once more."""
        with ExitStack() as stack:
            for swap in self.swaps:
                stack.enter_context(swap())
            yield


@contextmanager
def backward_inside() -> Iterator[Scope]:
    """Inside, `until_backward()` gives a scope that is unwound when the block ends."""
    scope = Scope()
    with scope.stack:
        token = _open.set(scope)
        try:
            yield scope
        finally:
            _open.reset(token)


def until_backward() -> Scope | None:
    """Scope of the engine that is running, or None."""
    return _open.get()
