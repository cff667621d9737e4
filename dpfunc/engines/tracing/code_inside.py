"""Code that is not torch's inside of a function of torch, where no mode sees what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dpfunc.engines.tracing.call import tensors_of

_REVIEWED = ("torch", "torchvision", "dpfunc")
"""Packages whose hooks, modes and classes of tensors keep no numbers: checkpoints, offloading, counters."""


_PLAIN = frozenset((
    Tensor, Parameter, int, float, bool, str, type(None), type(...), slice, torch.Size, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
))  # fmt: skip

number_of_modes = torch._C._len_torch_dispatch_stack


def may_have_code_inside(args: Sequence[Any], kwargs: Mapping[str, Any], modes: int) -> bool:
    """False where no code of others can run inside of a function with these arguments. Quick: it is asked for each.

    Args:
        modes: number of dispatch modes without those of the loss.
    """
    if number_of_modes() != modes or _saving_hooks():
        return True
    return not _are_plain(args) or (bool(kwargs) and not _are_plain(kwargs.values()))


def _are_plain(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind not in _PLAIN and not ((kind is tuple or kind is list) and _are_plain(value)):
            return False
    return True


def code_inside(func: Any, values: Sequence[Any], modes: int) -> str:
    """Code of others that may run inside of a function of torch with these values, in words; empty if there is none.

    Args:
        modes: number of dispatch modes without those of the loss. Whoever calls a step may have modes around it.
    """
    if any(_is_strange(type(mode)) for mode in _get_current_dispatch_mode_stack()[modes:]):
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


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: ())


def _saving_hooks() -> Sequence[Any]:
    """The hooks that take saved tensors now; none in torch 2.6, which does not tell."""
    return _top_hooks(True) or ()


def _is_function(value: Any) -> bool:
    plain = type(value) in (int, float, bool, str, tuple, list, Tensor, Parameter) or isinstance(value, (type, Tensor))
    return not plain and callable(value) and _is_strange(value)


def _has_own_functions(tensor: Tensor) -> bool:
    kind = type(tensor)
    if kind is Tensor or kind is Parameter or not _is_strange(kind):
        return False
    own, usual = (getattr(each, "__func__", each) for each in (kind.__torch_function__, Tensor.__torch_function__))
    return own is not usual and own is not torch._C._disabled_torch_function_impl
