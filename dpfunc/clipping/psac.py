"""Per-sample adaptive clipping (PSAC), with weights that need not fall with the norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dpfunc._utils.validation import positive
from dpfunc.clipping.bounds import check_clip_norm
from dpfunc.clipping.groups import ALL
from dpfunc.types import Groups


@dataclass(frozen=True)
class PSAC:
    """Weigh gradients by norm without monotone preference for small ones: `factor = C / (norm + r / (norm + r))`.

    Xia et al. 2023, Differentially Private Learning with Per-Sample Adaptive Clipping, Algorithm 1.

    Args:
        clip_norm: bound C, 1e-10..1e10; or group -> C_g. One number is the bound on the whole gradient.
        regularizer: r > 0. Gradients far below r get weight near C, as with `Flat`, so that small gradients, which
            tend to point elsewhere than the mean, do not dominate.
        groups: which parameters are clipped together.

    >>> import torch
    >>> PSAC(clip_norm=1.0, regularizer=0.1).factors(torch.tensor([[0.0], [9.9]]), torch.tensor([1.0]))
    tensor([[1.0000],
            [0.1009]])
    """

    clip_norm: float | Mapping[str, float]
    regularizer: float
    groups: Groups = ALL

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", check_clip_norm(self.clip_norm))
        object.__setattr__(self, "regularizer", positive("regularizer", self.regularizer))

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """`C / (norm + r / (norm + r))`; at norm 0 the factor is C."""
        r = self.regularizer
        return bounds_G / (norms_BG + r / (norms_BG + r))
