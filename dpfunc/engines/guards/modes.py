"""Dispatch modes, which see each operation of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def _skipping() -> Callable[[CodeType], None] | None:
    """The call by which torch's compiler skips a function and all that it calls; None in a torch without these names.

    They are torch's own, which other versions need not have: 2.6 has none of them.
    """
    names = vars(eval_frame)
    if not {"_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"} <= set(names):
        return None
    skip = names["_FrameAction"].SKIP
    set_strategy, strategy = names["set_code_exec_strategy"], names["_FrameExecStrategy"](skip, skip)
    return lambda code: set_strategy(code, strategy)


_SKIP = _skipping()


class DispatchMode(TorchDispatchMode):
    """A mode that torch's compiler leaves alone, also where the loss has functions that its user compiles.

    torch itself would import the compiler for that (a second and 70 MiB), and wrap each operation. Where it has no
    other way, it does.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return _SKIP is None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]  # torch's has no types
        if _SKIP is not None:
            _SKIP(cls.__torch_dispatch__.__code__)


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, the engine's own operations on plain tensors are not followed."""
    if torch.compiler.is_compiling():
        yield
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def unfollowed() -> Iterator[None]:
    """Inside, the engine's own operations are not followed, also those on tensors that are split over processes."""
    with _disable_current_modes():
        yield
