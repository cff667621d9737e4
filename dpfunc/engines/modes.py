"""Dispatch modes, which see each operation of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that torch's compiler leaves alone, also where the loss has functions that its user compiles.

    torch itself would import the compiler for that (a second and 70 MiB), and wrap each operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(cls.__torch_dispatch__.__code__, skip)


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
