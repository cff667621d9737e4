"""A noise mechanism with a state: it remembers the noise of the step before."""

from __future__ import annotations

import torch

from dpfunc import noise


def remembering(noise_multiplier, weight=0.5):
    """`sum + z_t - weight z_(t-1)`, as correlated noise is; for tests of its state only, nothing accounts for it."""
    plain = noise.gaussian(noise_multiplier)

    def init(params):
        return {"steps": 0, "previous": {name: torch.zeros_like(p.detach()) for name, p in params.items()}}

    def add(clipped, state, key):
        noisy, _ = plain.add(clipped, (), key)
        drawn = {name: noisy[name] - value for name, value in clipped.sums.items()}
        released = {name: value - weight * state["previous"][name] for name, value in noisy.items()}
        return released, {"steps": state["steps"] + 1, "previous": drawn}

    return noise.Mechanism(init, add)
