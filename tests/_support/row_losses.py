"""A small head on rows of two numbers, to which losses that mix rows, or seem to, are attached."""

from __future__ import annotations

import torch

DOUBLE = torch.float64


def params():
    return {"w": torch.tensor([[0.5, -1.0], [2.0, 1.0]], dtype=DOUBLE), "v": torch.tensor([1.0, 0.5], dtype=DOUBLE)}


def batch(seed):
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def head(x, p):
    return (x @ p["w"] * p["v"]).sum(1).square()
