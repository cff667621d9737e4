"""The table that every noise mechanism joins: adding one is adding a line; and noise for tests of its state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpfunc import Event, Plan, Schedule, clipping, noise
from dpfunc.sampling import Poisson
from dpfunc.types import schedule_at

NUM_RECORDS, STEPS = 12, 5
ALL_RECORDS = Poisson(NUM_RECORDS, 1.0)


def remembering(noise_multiplier, weight=0.5):
    """`sum + z_t - weight z_(t-1)`, as correlated noise is; for tests of its state only, nothing accounts for it."""
    plain = noise.gaussian(noise_multiplier)

    def init(params):
        return {"steps": 0, "previous": {name: torch.zeros_like(p.detach()) for name, p in params.items()}}

    def add(clipped, state, turn):
        # Noise on zeros, and not a noisy sum minus the sum: the rounding of that depends on the data, and the state
        # takes it into the next release.
        zeros = {name: torch.zeros_like(value) for name, value in clipped.sums.items()}
        drawn, _ = plain.add(replace(clipped, sums=zeros), (), turn)
        noise = {name: value - weight * state["previous"][name] for name, value in drawn.items()}
        released = {name: value + noise[name] for name, value in clipped.sums.items()}
        return released, {"steps": state["steps"] + 1, "previous": drawn}

    return noise.Mechanism(init, add)


@dataclass(frozen=True)
class Lagged:
    """`sum + z_t - weight z_(t-1)` of a user, drawn again from the key of the step before; charged as a whole."""

    weight: float = 0.5

    def check(self, run):
        """Nothing is refused: each record may take part in each step."""

    def events(self, run, start, stop):
        columns = self.weight ** np.arange(run.num_steps)
        sensitivity = np.linalg.norm(columns.cumsum())  # of C, whose inverse subtracts, times a vector of ones
        return (Event(1.0, run.noise_multiplier / sensitivity, 1),) if start == 0 < stop else ()

    def mechanism(self, run):
        plain = noise.Gaussian().mechanism(run)

        def add(clipped, state, turn):
            released, _ = plain.add(clipped, (), turn)
            if turn.step == 0:
                return released, state
            zeros = {name: torch.zeros_like(value) for name, value in clipped.sums.items()}
            before, _ = plain.add(replace(clipped, sums=zeros), (), turn._replace(key=turn.key_of(turn.step - 1)))
            return {name: value - self.weight * before[name] for name, value in released.items()}, state

        return noise.Mechanism(lambda params: {"noise": "of all keys"}, add)


@dataclass(frozen=True)
class Case:
    """A mechanism, with the covariance of its noise over the steps, relative to the squared sensitivity."""

    noise: Any
    inverse: Any = None  # (STEPS, STEPS): what is added, of independent noise; None: that of each step alone
    sampler: Any = ALL_RECORDS
    noise_multiplier: Any = 1.5

    def covariance(self):
        each = np.diag([schedule_at(self.noise_multiplier, step) for step in range(STEPS)])
        mixed = each if self.inverse is None else self.inverse @ each
        return mixed @ mixed.T

    def plan(self, **facts):
        settings = {"clip": clipping.Flat(1.0), "num_steps": STEPS, "delta": 1e-3, "adjacency": "zero_out"}
        return Plan(self.sampler, noise_multiplier=self.noise_multiplier, noise=self.noise, **{**settings, **facts})


MECHANISMS = {
    "gaussian": Case(noise.Gaussian()),
    "gaussian of a schedule": Case(noise.Gaussian(), noise_multiplier=Schedule(((2, 1.0), (1, 2.0)))),
    "lagged, of a user": Case(Lagged(), np.eye(STEPS) - 0.5 * np.eye(STEPS, k=-1)),
}
