"""`grid_sample` of a trained image, as a table of positions is read between its entries: a matrix product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def sampler(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same as `grid_sample`; of one image, the grid gives the weight of each of its numbers.

    Args:
        plain: `grid_sample` without dispatch.
    """

    def grid_sample(
        input: Tensor,
        grid: Tensor,
        mode: str = "bilinear",
        padding_mode: str = "zeros",
        align_corners: bool | None = None,
    ) -> Tensor:
        if input.ndim != 4 or input.shape[0] != 1:
            return plain(input, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)
        _, channels, height, width = input.shape
        count = height * width
        each = torch.eye(count, dtype=input.dtype, device=input.device).view(1, count, height, width)
        parts = plain(each, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)
        return F.linear(parts.movedim(1, -1), input.reshape(channels, count)).movedim(-1, 1)

    return grid_sample
