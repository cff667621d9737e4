"""A noise mechanism with a state: it remembers the noise of the step before."""

from __future__ import annotations

from dataclasses import replace

import torch

from dpfunc import noise


def remembering(noise_multiplier, weight=0.5):
    """`sum + z_t - weight z_(t-1)`, as correlated noise is; for tests of its state only, nothing accounts for it."""
    plain = noise.gaussian(noise_multiplier)

    def init(params):
        return {"steps": 0, "previous": {name: torch.zeros_like(p.detach()) for name, p in params.items()}}

    def add(clipped, state, key):
        # Noise on zeros, and not a noisy sum minus the sum: the rounding of that depends on the data, and the state
        # takes it into the next release.
        zeros = {name: torch.zeros_like(value) for name, value in clipped.sums.items()}
        drawn, _ = plain.add(replace(clipped, sums=zeros), (), key)
        noise = {name: value - weight * state["previous"][name] for name, value in drawn.items()}
        released = {name: value + noise[name] for name, value in clipped.sums.items()}
        return released, {"steps": state["steps"] + 1, "previous": drawn}

    return noise.Mechanism(init, add)
