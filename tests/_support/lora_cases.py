"""Adapters with values in both matrices."""

from __future__ import annotations

import torch

from dpfunc.rng import insecure_key

KEY = insecure_key(0)


IDS = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))


def random_b(params):
    generator = torch.Generator().manual_seed(7)
    return {n: 10 * torch.randn(p.shape, generator=generator) if "lora_B" in n else p for n, p in params.items()}
