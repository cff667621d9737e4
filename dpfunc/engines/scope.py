"""A forward pass whose backward pass is still to come: who swaps tensors in a module must not swap them back before.

Gradient checkpointing runs parts of the forward pass again inside the backward pass, with whatever the module holds
then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

_open: ContextVar[ExitStack | None] = ContextVar("dpfunc_backward_inside", default=None)


@contextmanager
def backward_inside() -> Iterator[None]:
    """Inside, `until_backward()` gives a stack that is unwound when the block ends."""
    with ExitStack() as stack:
        token = _open.set(stack)
        try:
            yield
        finally:
            _open.reset(token)


def until_backward() -> ExitStack | None:
    """The stack of the engine around us, or None."""
    return _open.get()
