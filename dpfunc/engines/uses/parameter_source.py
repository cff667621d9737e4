"""Parameters for which a module computes with tensors of its own: uses are recognised by those tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from dpfunc.types import Params


class _ParameterSource(Protocol):
    """Source of the tensors that a module computes with."""

    def leaves(self, params: Params) -> Mapping[str, Tensor]:
        """The module's own tensors, which hold these values when it runs: name -> tensor that requires a gradient."""
        ...

    def reduced(self, name: str, total: Tensor) -> Tensor:
        """Part of a weighted sum that this process keeps."""
        ...


_source: ContextVar[_ParameterSource | None] = ContextVar("dpfunc_parameter_source", default=None)


@contextmanager
def using_source(source: _ParameterSource) -> Iterator[None]:
    """Inside, the tensors of a module are used in place of parameters."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def has_parameter_source() -> bool:
    """True if the tensors of a module are used in place of parameters.

    >>> has_parameter_source()
    False
    """
    return _source.get() is not None


def leaves_of(params: Params) -> dict[str, Tensor]:
    """Tensors that require gradients, by which the uses of parameters are recognised.

    >>> import torch
    >>> leaves_of({"w": torch.ones(1)})["w"].requires_grad
    True
    """
    source = _source.get()
    if source is not None:
        return dict(source.leaves(params))
    return {name: param.detach().requires_grad_() for name, param in params.items()}


def reduced(name: str, total: Tensor) -> Tensor:
    """Part of a weighted sum that this process keeps; by default all of it."""
    source = _source.get()
    return total if source is None else source.reduced(name, total)
