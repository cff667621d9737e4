"""Modes and classes of tensors that are not torch's own: below vmap they would see all rows at once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dpfunc.errors import UnsupportedModel

open_modes = torch._C._len_torch_dispatch_stack
"""Number of modes below all levels (`TorchDispatchMode`) that are active."""


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "dpfunc")


def refuse_modes() -> None:
    """Refuse a step inside of a mode of somebody else. Those of torch (`FlopCounterMode`) may stay."""
    for mode in (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()):
        if _is_foreign(type(mode)):
            raise UnsupportedModel(
                f"The step runs inside of the mode {type(mode).__qualname__}, which is given all rows of a batch at "
                "once and may mix them, or change what is clipped. Leave it before the step. Nothing was spent."
            )


def entered_modes(before: int) -> str:
    """Names of the modes that were entered after so many; without those of selective checkpointing, which keep rows."""
    entered = map(type, _get_current_dispatch_mode_stack()[before:])
    return ", ".join(mode.__qualname__ for mode in entered if mode.__module__ != "torch.utils.checkpoint")


@functools.cache
def computes_itself(kind: type[Tensor]) -> bool:
    """True for a class of tensors, not of torch, that computes its operations itself (`__torch_dispatch__`)."""
    return _is_foreign(kind) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
