"""Random factors of per-sample gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from dpfunc.engines._per_sample import Gather, Outer, PerSample

ROWS, WIDTH = 6, 5
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 4)


class Draw:
    """Random factors for B samples of one dtype; half and bfloat16 values are exact in float64 as well."""

    def __init__(self, seed, size, dtype=torch.float64, length=None):
        self.generator, self.size, self.dtype = torch.Generator().manual_seed(seed), size, dtype
        self.length = 1 + seed % 7 if length is None else length

    def normal(self, *shape):
        return torch.randn(self.size, *shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def ids(self):
        return torch.randint(ROWS, (self.size, self.length), generator=self.generator)


def sq_norms(grad):
    """Those of one parameter, as a step gets them."""
    return PerSample(torch.zeros(1), {"w": grad}).sq_norms()["w"]


def weighted_sum(grad, factors_B):
    return PerSample(torch.zeros(1), {"w": grad}).weighted_sum({"w": factors_B})["w"]


def close(got, expected, tolerance, scale):
    return bool((got.double() - expected).norm() <= tolerance * scale + 1e-30)


def with_changed(grad, change):
    """The same with all floating tensors changed."""
    changes = {}
    for name, value in vars(grad).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            changes[name] = change(value)
        elif isinstance(value, (Gather, Outer)):
            changes[name] = with_changed(value, change)
    return replace(grad, **changes)


def with_bad_row(grad, row, bad):
    def change(value):
        value = value.clone()
        value[row] = bad
        return value

    return with_changed(grad, change)
