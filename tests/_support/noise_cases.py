"""The table that every noise mechanism joins: adding one is adding a line; and noise for tests of its state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpfunc import Plan, clipping, noise
from dpfunc.accounting import Event
from dpfunc.sampling import CyclicPoisson, InOrder, Poisson, Shuffled, ShuffledOnce
from dpfunc.types import Schedule, schedule_at

NUM_RECORDS, STEPS = 12, 5  # an odd number: half of the records are in one batch more
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
    inverse: Any = (
        None  # (STEPS, STEPS), C^-1: row t has the weights of z_0, z_1, .. in the noise of step t; None: z_t alone
    )
    sampler: Any = ALL_RECORDS
    noise_multiplier: Any = 1.5
    slow: bool = False  # a variant of another line
    spare: float = 1e-3  # by how much of itself the squared distance of neighbours is below what the events say

    def covariance(self):
        each = np.diag([schedule_at(self.noise_multiplier, step) for step in range(STEPS)])
        mixed = each if self.inverse is None else self.inverse @ each
        return mixed @ mixed.T

    def plan(self, **facts):
        settings = {"clip": clipping.Flat(1.0), "num_steps": STEPS, "delta": 1e-3, "adjacency": "zero_out"}
        return Plan(self.sampler, noise_multiplier=self.noise_multiplier, noise=self.noise, **{**settings, **facts})


ONCE = ShuffledOnce(NUM_RECORDS, 6)  # two steps an epoch
BANDS, BUFFERS = noise.BandMF((0.8, 0.6)), noise.BLT((0.5, 0.2), (0.9, 0.4))


def inverse_of(*coefficients):
    """C^-1 of a Toeplitz matrix with this first column, by solving."""
    rows = sum(np.eye(STEPS, k=-place) * value for place, value in enumerate(coefficients[:STEPS]))
    return np.linalg.inv(rows)


def lambda_cgd(decay):
    left = STEPS - np.arange(STEPS)
    scales = np.sqrt((1 - decay ** (2 * left)) / (1 - decay**2))
    return np.diag(scales) @ (np.eye(STEPS) - decay * np.eye(STEPS, k=-1))


ROOT = [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128]
GEOMETRIC = [1, *(0.5 * 0.9**k + 0.2 * 0.4**k for k in range(STEPS - 1))]
MECHANISMS = {
    "gaussian": Case(noise.Gaussian(), slow=True),
    "gaussian of a schedule": Case(noise.Gaussian(), noise_multiplier=Schedule(((2, 1.0), (1, 2.0)))),
    "lagged, of a user": Case(Lagged(), np.eye(STEPS) - 0.5 * np.eye(STEPS, k=-1)),
    "lambda-CGD": Case(noise.Correlated(noise.LambdaCGD(0.7)), lambda_cgd(0.7), ONCE),
    "BISR": Case(
        noise.Correlated(noise.BISR(3)), sum(np.eye(STEPS, k=-k) * w for k, w in enumerate((1, -1 / 2, -1 / 8))), ONCE
    ),
    "BSR, in one epoch": Case(noise.Correlated(noise.BSR()), inverse_of(*ROOT), Shuffled(NUM_RECORDS, 2), slow=True),
    "BandMF": Case(noise.Correlated(BANDS), inverse_of(0.8, 0.6), ONCE, slow=True),
    "BandMF, buffers": Case(noise.Correlated(BANDS, "state"), inverse_of(0.8, 0.6), ONCE),
    "BandMF, of cycles": Case(
        noise.Correlated(BANDS), inverse_of(0.8, 0.6), CyclicPoisson(NUM_RECORDS, 0.5, 2), spare=0.13
    ),
    "BLT": Case(noise.Correlated(BUFFERS), inverse_of(*GEOMETRIC), InOrder(NUM_RECORDS, 6), slow=True),
    "BLT, buffers": Case(noise.Correlated(BUFFERS, "state"), inverse_of(*GEOMETRIC), InOrder(NUM_RECORDS, 6)),
}
