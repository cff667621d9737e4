"""Clip rules: the factor of a gradient, from its norm and its bound. Fields `clip_norm` and `groups`: see `Flat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfunc._utils.validation import named, non_negative, positive
from dpfunc.clipping.bounds import check_clip_norm
from dpfunc.clipping.groups import ALL
from dpfunc.types import Groups


@named
@dataclass(frozen=True)
class Flat:
    """Scale a gradient down to norm C, and leave it alone inside the ball: `factor = min(1, C / norm)`.

    Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1.

    Args:
        clip_norm: bound C in the units of the gradient, 1e-10..1e10; or group -> C_g. One number is the bound on the
            whole gradient: with G groups each gets C / sqrt(G).
        groups: which parameters are clipped together.

    Guarantees:
        a gradient with norm <= C (1 - 2**-13) is not changed
        (tests/clipping/test_bounds.py::test_flat_is_a_no_op_inside_the_ball).

    >>> Flat(clip_norm=1.0).factors(torch.tensor([[0.5], [4.0]]), torch.tensor([1.0]))
    tensor([[1.0000],
            [0.2500]])
    """

    clip_norm: float | Mapping[str, float]
    groups: Groups = ALL

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", check_clip_norm(self.clip_norm))

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """`C / max(norm, C)`, which needs no constant against 0 / 0."""
        return bounds_G / torch.maximum(norms_BG, bounds_G)


@named
@dataclass(frozen=True)
class Automatic:
    """Normalise every gradient: `factor = C / (norm + gamma)`.

    Bu et al. 2023, Automatic Clipping, eq. (AUTO-S). C only scales the released gradient, together with the noise:
    it acts like a learning rate and has no influence on epsilon or on the signal-to-noise ratio, so it has a value
    that does not need tuning.

    Args:
        gamma: stability constant >= 0, in the units of the norm. It keeps small gradients small. The sensitivity is C
            for every gamma. 0 is AUTO-V.
        clip_norm, groups: as of `Flat`.

    Guarantees:
        a gradient of zero gives zero, never NaN (tests/clipping/test_bounds.py::test_zero_gradient_stays_zero).

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


@dataclass(frozen=True)
class PSAC:
    """Weigh gradients by norm without monotone preference for small ones: `factor = C / (norm + r / (norm + r))`.

    Xia et al. 2023, Differentially Private Learning with Per-Sample Adaptive Clipping, Algorithm 1.

    Args:
        regularizer: r > 0. Gradients far below r get weight near C, as with `Flat`, so that small gradients, which
            tend to point elsewhere than the mean, do not dominate.
        clip_norm, groups: as of `Flat`.

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


@dataclass(frozen=True)
class Threshold:
    """Scale all gradients alike and drop the long ones: `factor = C / Z if norm <= Z else 0`.

    Bu et al. 2021, On the Convergence of Deep Learning with Differential Privacy (global clipping). Directions between
    samples are kept, but samples above the threshold teach nothing: choose Z above most norms.

    Args:
        threshold: Z > 0, the norm above which a sample is dropped (in each group for itself).
        clip_norm, groups: as of `Flat`.

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
