"""Tensors that nothing was written into between two calls."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfunc._utils.dtensor import local

_HEAD = 8


class _Known(NamedTuple):
    """A tensor, torch's counter of writes in place, and its first numbers: `tensor.data` is written uncounted."""

    tensor: weakref.ReferenceType[Tensor]
    version: int
    head: Tensor


@dataclass(frozen=True)
class _Versions:
    """Tensors by name, without keeping them in memory, as they were at one moment.

    >>> import torch
    >>> params = {"w": torch.zeros(2)}
    >>> before = _Versions.of(params)
    >>> before.still(params), before.still({"w": torch.zeros(2)})
    (True, False)
    >>> before.still({"w": params["w"].add_(1.0)})
    False
    """

    known: Mapping[str, _Known]

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> _Versions:
        """The present versions. Inference tensors have none, and are never unchanged."""
        return cls(
            {name: _Known(weakref.ref(p), _version(p), _head(p)) for name, p in params.items() if not p.is_inference()}
        )

    def still(self, params: Mapping[str, Tensor]) -> bool:
        """True if these are the same tensors, and nothing was written into any of them. A copy is another tensor."""
        if not params or self.known.keys() != params.keys():
            return False
        pairs = [(self.known[name], p) for name, p in params.items()]
        counted = all(known.tensor() is p and known.version == _version(p) for known, p in pairs)
        return counted and all(torch.equal(known.head, _head(p)) for known, p in pairs)


@dataclass
class Calls:
    """Facts about the earlier calls of one private step, by which usual mistakes are found; no result depends on them.

    They live as long as the step.

    >>> import torch
    >>> params, calls = {"w": torch.zeros(2)}, Calls()
    >>> calls.note(params, stateless=False, without_gradient=False)
    >>> calls.changed_nothing(params), calls.changed_nothing(params)
    (True, False)
    """

    stateless: bool = False
    """True after a call without a state, which is a run of its own."""
    without_gradient: int = 0
    """Steps whose batch had records, none of them with a finite gradient."""
    _first: _Versions | None = None
    _compared: bool = False

    def note(self, params: Mapping[str, Tensor], stateless: bool, without_gradient: bool) -> None:
        """Note a call whose result was released. Parameters are those of the first one."""
        self.stateless = self.stateless or stateless
        self.without_gradient += without_gradient
        if self._first is None:
            self._first = _Versions.of(params)

    def changed_nothing(self, params: Mapping[str, Tensor]) -> bool:
        """True at the second call, if nothing was written into the parameters since the first."""
        if self._first is None or self._compared:
            return False
        self._compared = True
        return self._first.still(params)


def _version(tensor: Any) -> int:
    return int(tensor._version)


def _head(tensor: Tensor) -> Tensor:
    own = local(tensor).detach()
    return own[(0,) * (own.ndim - 1)][:_HEAD].clone() if own.ndim and own.numel() else own.clone()
