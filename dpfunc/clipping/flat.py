"""Clip to a ball: the rule of DP-SGD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfunc._utils.validation import named
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
