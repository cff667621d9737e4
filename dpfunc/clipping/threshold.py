"""Clipping by a threshold: all gradients are scaled by one factor, and long ones are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfunc._utils.validation import positive
from dpfunc.clipping.bounds import check_clip_norm
from dpfunc.clipping.groups import ALL
from dpfunc.types import Groups


@dataclass(frozen=True)
class Threshold:
    """Scale all gradients alike and drop the long ones: `factor = C / Z if norm <= Z else 0`.

    Bu et al. 2021, On the Convergence of Deep Learning with Differential Privacy (global clipping). Directions between
    samples are kept, but samples above the threshold teach nothing: choose Z above most norms.

    Args:
        clip_norm: bound C, 1e-10..1e10; or group -> C_g. One number is the bound on the whole gradient.
        threshold: Z > 0, the norm above which a sample is dropped (in each group for itself).
        groups: which parameters are clipped together.

    >>> Threshold(clip_norm=1.0, threshold=10.0).factors(torch.tensor([[5.0], [11.0]]), torch.tensor([1.0]))
    tensor([[0.1000],
            [0.0000]])
    """

    clip_norm: float | Mapping[str, float]
    threshold: float
    groups: Groups = ALL

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", check_clip_norm(self.clip_norm))
        object.__setattr__(self, "threshold", positive("threshold", self.threshold))

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """`C / Z` for norms up to Z, 0 above."""
        return torch.where(norms_BG <= self.threshold, bounds_G / self.threshold, torch.zeros_like(norms_BG))
