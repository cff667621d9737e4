"""Devices that tests run on: the CPU, and a GPU where there is one (`make gpu`)."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

torch.backends.cudnn.allow_tf32 = False  # of a GPU: comparisons are of float32
GPU = [pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else []
devices = pytest.mark.parametrize("device", ["cpu", *GPU])


def default_of(device):
    """Inside, a loss makes its tensors on a device; on the CPU as it does without."""
    return nullcontext() if device == "cpu" else torch.device(device)
