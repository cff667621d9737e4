"""Tensors that nothing was written into between two calls."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Versions:
    """Tensors by name, without keeping them in memory, with the counters that torch raises at each write in place.

    >>> import torch
    >>> params = {"w": torch.zeros(2)}
    >>> before = Versions.of(params)
    >>> before.still(params), before.still({"w": torch.zeros(2)})
    (True, False)
    >>> before.still({"w": params["w"].add_(1.0)})
    False
    """

    known: Mapping[str, tuple[weakref.ReferenceType[Tensor], int]]

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> Versions:
        """The present versions. Inference tensors have none, and are never unchanged."""
        return cls({name: (weakref.ref(p), _version(p)) for name, p in params.items() if not p.is_inference()})

    def still(self, params: Mapping[str, Tensor]) -> bool:
        """True if these are the same tensors, and nothing was written into any of them. A copy is another tensor."""
        return bool(params) and self.known.keys() == params.keys() and all(
            self.known[name][0]() is p and self.known[name][1] == _version(p) for name, p in params.items()
        )  # fmt: skip


def _version(tensor: Any) -> int:  # noqa: ANN401  (torch does not type its counter)
    return int(tensor._version)
