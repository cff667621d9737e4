"""Per-sample gradients as values that know their norms and weighted sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Rounding of a float32 sum grows with its length; pieces of this length keep it near 1e-7 and stay in the cache.
PIECE = 2**16


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms and sums: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Dense:
    """B gradients of one parameter, in memory: (B, *shape)."""

    grads_B: Tensor

    def sq_norms(self) -> Tensor:
        """Squared norms (B,) in float32 or float64."""
        flat_BP = self.grads_B.flatten(1)
        dtype = accumulation_dtype(flat_BP.dtype)
        if torch.compiler.is_compiling():
            return flat_BP.to(dtype).square().sum(1)
        pieces = [piece.to(dtype).square().sum(1) for piece in torch.split(flat_BP, PIECE, dim=1)]
        return torch.stack(pieces).sum(0) if pieces else flat_BP.new_zeros(flat_BP.shape[0], dtype=dtype)

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """`sum_i factors_B[i] * grads_B[i]`; rows with factor 0 are taken out first, since 0 * inf is NaN."""
        flat_BP = self.grads_B.flatten(1)
        flat_BP = flat_BP.to(accumulation_dtype(flat_BP.dtype))
        kept_B = factors_B != 0
        if torch.compiler.is_compiling() or not bool(kept_B.all()):
            flat_BP = torch.where(kept_B[:, None], flat_BP, torch.zeros_like(flat_BP))
        return (factors_B.to(flat_BP.dtype) @ flat_BP).reshape(self.grads_B.shape[1:])


@dataclass(frozen=True)
class PerSample:
    """The gradients of all parameters for B samples."""

    losses_B: Tensor
    grads: Mapping[str, Dense]

    def sq_norms(self) -> dict[str, Tensor]:
        """Squared norms: name -> (B,)."""
        return {name: grad.sq_norms() for name, grad in self.grads.items()}

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted sums over the samples: name -> parameter shape."""
        return {name: grad.weighted_sum(factors[name]) for name, grad in self.grads.items()}
