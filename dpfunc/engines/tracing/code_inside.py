"""Code that is not torch's inside of a function of torch, where no mode sees what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dpfunc.engines.tracing.call import tensors_of

_REVIEWED = ("torch", "torchvision", "dpfunc")
"""Packages whose hooks, modes and classes of tensors keep no numbers: checkpoints, offloading, counters."""


def code_inside(func: Any, values: Sequence[Any]) -> str:
    """Code of others that may run inside of a function of torch with these values, in words; empty if there is none."""
    if any(_is_strange(type(mode)) for mode in _get_current_dispatch_mode_stack()):
        return "a dispatch mode of the loss, which may keep numbers of the batch"
    if any(map(_is_strange, _saving_hooks())):
        return "hooks on saved tensors, which may keep numbers of the batch"
    if not getattr(func, "__name__", "").startswith("register_") and any(map(_is_function, values)):
        return f"a function that {func.__name__} calls, which may keep numbers of the batch"
    if any(map(_has_own_functions, tensors_of(values))):
        return "a class of tensors with functions of its own, which may keep numbers of the batch"
    return ""


def _is_strange(value: Any) -> bool:
    return str(getattr(value, "__module__", None) or "?").partition(".")[0] not in _REVIEWED


def _saving_hooks() -> Sequence[Any]:
    """The hooks that take saved tensors now; none in torch 2.6, which does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return () if top is None else top(True) or ()


def _is_function(value: Any) -> bool:
    plain = type(value) in (int, float, bool, str, tuple, list, Tensor, Parameter) or isinstance(value, (type, Tensor))
    return not plain and callable(value) and _is_strange(value)


def _has_own_functions(tensor: Tensor) -> bool:
    kind = type(tensor)
    if kind is Tensor or kind is Parameter or not _is_strange(kind):
        return False
    own, usual = (getattr(each, "__func__", each) for each in (kind.__torch_function__, Tensor.__torch_function__))
    return own is not usual and own is not torch._C._disabled_torch_function_impl
