"""Functions with a backward pass of their own, for tests of what a user's may do in it."""

from __future__ import annotations

import torch


class Identity(torch.autograd.Function):
    """The identity; subclasses give it a `backward`."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
