"""Python files with a loop, as `dpfunc verify` and `dpfunc audit` take them."""

from __future__ import annotations

HEAD = """
import torch
import dpfunc
from dpfunc import clipping, sampling

plan = dpfunc.Plan(sampling.Poisson(60, 0.5), clipping.Flat(1.0), noise_multiplier=2.0, num_steps=5, delta=1e-3)
dp_step = dpfunc.make_dp_step(lambda params, x: (params["w"] * x).sum(1), plan)
data = torch.randn(60, 500, generator=torch.Generator().manual_seed(0))
"""
PLAIN = (
    HEAD
    + """
def train(dp_step, data, key):
    params = {"w": torch.zeros(500)}
    state = dp_step.init(params, key)
    yield params, state
    for indices in dp_step.plan.batches(state):
        grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
        params = {"w": params["w"] - 0.1 * grads["w"]}
        yield params, state
"""
)
LOOP = (
    HEAD
    + """
def init(dp_step, data, key):
    params = {"w": torch.zeros(500)}
    return params, dp_step.init(params, key)

def step(dp_step, data, carry):
    params, state = carry
    indices = dp_step.plan.draw(state, state.step)
    grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
    params = {"w": params["w"] - 0.1 * grads["w"]}
    return None if state.step == state.limit else (params, state)
"""
)
IN_DATA = """
canaries = 30 * torch.eye(500)[:300]
"""
NO_NOISE = """
from dataclasses import dataclass, replace
from dpfunc.noise import Gaussian, gaussian

@dataclass(frozen=True)
class Less(Gaussian):
    def mechanism(self, noise_multiplier, allocation, source):
        return gaussian(1e-3 * noise_multiplier, allocation=allocation, source=source)

dp_step = replace(dp_step, plan=replace(plan, noise=Less()))
"""


def written(folder, text):
    path = folder / "loop.py"
    path.write_text(text)
    return path
