"""Automatic clipping: every gradient gets (nearly) the same norm. AUTO-S, AUTO-V and normalised SGD are one rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dpfunc._utils.validation import named, non_negative, positive
from dpfunc.clipping.bounds import check_clip_norm
from dpfunc.clipping.groups import ALL
from dpfunc.types import Groups


@named
@dataclass(frozen=True)
class Automatic:
    """Normalise every gradient: `factor = C / (norm + gamma)`.

    Bu et al. 2023, Automatic Clipping, eq. (AUTO-S). C only scales the released gradient, together with the noise:
    it acts like a learning rate and has no influence on epsilon or on the signal-to-noise ratio, so it has a value
    that does not need tuning.

    Args:
        clip_norm: bound C, 1e-10..1e10; or group -> C_g. One number is the bound on the whole gradient.
        gamma: stability constant >= 0, in the units of the norm. It keeps small gradients small. The sensitivity is C
            for every gamma. 0 is AUTO-V.
        groups: which parameters are clipped together.

    Guarantees:
        a gradient of zero gives zero, never NaN (tests/clipping/test_bounds.py::test_zero_gradient_stays_zero).

    >>> import torch
    >>> Automatic(gamma=1.0).factors(torch.tensor([[0.0], [3.0]]), torch.tensor([1.0]))
    tensor([[1.0000],
            [0.2500]])
    """

    clip_norm: float | Mapping[str, float] = 1.0
    gamma: float = 0.01
    groups: Groups = ALL

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", check_clip_norm(self.clip_norm))
        object.__setattr__(self, "gamma", non_negative("gamma", self.gamma))

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """`C / (norm + gamma)`; the infinity of 0 / 0 is limited by the ceiling that holds for every rule."""
        return bounds_G / (norms_BG + self.gamma)


def auto_v(clip_norm: float | Mapping[str, float] = 1.0, groups: Groups | None = None) -> Automatic:
    """AUTO-V, `factor = C / norm`: every gradient that is not zero gets norm C. Zero stays zero.

    Bu et al. 2023, Automatic Clipping, eq. (AUTO-V).

    >>> auto_v().gamma
    0.0
    """
    return Automatic(clip_norm, gamma=0.0, groups=groups or ALL)


def normalized(clip_norm: float | Mapping[str, float], regularizer: float, groups: Groups | None = None) -> Automatic:
    """Normalised SGD, `factor = C / (r + norm)`: the formula of AUTO-S with r for gamma, so it is that rule.

    Yang et al. 2022, Normalized/Clipped SGD with Perturbation, Algorithm 2 (DP-NSGD).

    >>> normalized(1.0, regularizer=0.1) == Automatic(1.0, gamma=0.1)
    True
    """
    return Automatic(clip_norm, gamma=positive("regularizer", regularizer), groups=groups or ALL)
