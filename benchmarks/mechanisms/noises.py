"""Noise and sampling of each contestant at one budget: public numbers, and the errors of prefix sums that they give."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dpfunc.accounting import Allocated, Ledger, calibrate, calibrate_noise
from dpfunc.noise import BISR, BSR, LambdaCGD, Strategy, optimal_bands, optimal_buffers, prefix_errors

Sampler = Literal["poisson", "order", "cycles", "allocated"]
INDEPENDENT = BISR(1)
DECAYS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
BANDS = (2, 3, 4, 8, 16, 32, 64)
BUFFERS = (1, 2, 3)
FAMILIES = ("lambda-CGD", "BSR", "BISR", "BandMF", "BLT", "BandMF, cycles")

noise_of = cache(calibrate_noise)


@dataclass(frozen=True)
class Budget:
    """Epsilon, delta, batches of an epoch m and epochs."""

    epsilon: float
    delta: float
    batches: int
    epochs: int

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.batches * self.epochs


@dataclass(frozen=True)
class NoiseOf:
    """How records are drawn, the matrix, and the standard deviation of z in sensitivities of a step."""

    sampler: Sampler
    cycle: int
    strategy: Strategy
    std: float
    says: str

    def errors(self, steps: int) -> np.ndarray:
        """Standard deviations of the prefix sums of the noise."""
        return self.std * np.sqrt(prefix_errors(self.strategy, steps))

    def mean_error(self, steps: int) -> float:
        """Root of the mean squared error of prefix sums."""
        return float(np.sqrt((self.errors(steps) ** 2).mean()))


def independent(budget: Budget) -> NoiseOf:
    """Poisson samples and independent noise."""
    std = noise_of(epsilon=budget.epsilon, delta=budget.delta, sampling_prob=1 / budget.batches, num_steps=budget.steps)
    return NoiseOf("poisson", 1, INDEPENDENT, std, "")


@cache
def allocated(budget: Budget) -> NoiseOf:
    """Independent noise; each record is in one random batch of each epoch."""

    def ledger(std: float) -> Ledger:
        return Ledger((Allocated(std, budget.epochs, num_batches=budget.batches),))

    return NoiseOf("allocated", 1, INDEPENDENT, calibrate(ledger, epsilon=budget.epsilon, delta=budget.delta), "")


def in_order(budget: Budget, strategy: Strategy, says: str) -> NoiseOf:
    """The same batches in the same order in each epoch: one Gaussian release, without any gain of sampling."""
    one = noise_of(epsilon=budget.epsilon, delta=budget.delta, sampling_prob=1.0, num_steps=1)
    return NoiseOf(
        "order", budget.batches, strategy, one * strategy.sensitivity(budget.steps, budget.batches, budget.epochs), says
    )


def in_cycles(budget: Budget, bands: int) -> NoiseOf:
    """A banded matrix, and Poisson samples of one of as many groups of records as there are bands."""
    strategy = optimal_bands(budget.steps, bands)
    std = noise_of(
        epsilon=budget.epsilon, delta=budget.delta, sampling_prob=bands / budget.batches,
        num_steps=math.ceil(budget.steps / bands),
    )  # fmt: skip
    return NoiseOf("cycles", bands, strategy, std, f"{bands} bands")


def family(name: str, budget: Budget) -> Iterator[NoiseOf]:
    """All members of a family of strategies."""
    steps, most = budget.steps, budget.batches
    bands = sorted({each for each in (*BANDS, most) if each <= steps})
    if name == "lambda-CGD":
        yield from (in_order(budget, LambdaCGD(decay), f"lambda {decay:g}") for decay in DECAYS)
    elif name == "BSR":
        yield from (in_order(budget, BSR(each), f"{each} bands") for each in bands)
    elif name == "BISR":
        yield from (in_order(budget, BISR(each), f"{each} bands") for each in bands)
    elif name == "BandMF":
        yield from (in_order(budget, optimal_bands(steps, each), f"{each} bands") for each in bands if each <= most)
    elif name == "BLT":
        for each in BUFFERS:
            found = optimal_buffers(steps, each, "mean", budget.batches, budget.epochs)
            yield in_order(budget, found, f"{each} buffers")
    else:
        yield from (in_cycles(budget, each) for each in bands if each <= most)


@cache
def best(name: str, budget: Budget) -> NoiseOf:
    """The member of a family with the least mean error of prefix sums at this budget: a choice without data."""
    return min(family(name, budget), key=lambda found: found.mean_error(budget.steps))


def best_of_all(budget: Budget) -> tuple[str, NoiseOf]:
    """The family with the least mean error, and its member."""
    name = min(FAMILIES, key=lambda each: best(each, budget).mean_error(budget.steps))
    return name, best(name, budget)


def correlated(strategy: Strategy, steps: int, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """`C^-1 z` (steps, ...) for standard normal z, by the rows of C^-1."""
    matrix = torch.zeros(steps, steps)
    for step in range(steps):
        row = torch.tensor(strategy.row(steps, step).copy(), dtype=torch.float32)
        matrix[step, step + 1 - len(row) : step + 1] = row.flip(0)
    drawn = torch.randn(steps, math.prod(shape), generator=source)
    return (drawn if strategy == INDEPENDENT else matrix @ drawn).view(steps, *shape)


def batches(noise: NoiseOf, budget: Budget, n: int, source: torch.Generator) -> Iterator[Tensor]:
    """Records of each step."""
    m, q = budget.batches, 1 / budget.batches
    place = torch.randperm(n, generator=source) % max(noise.cycle, 1)
    for step in range(budget.steps):
        if noise.sampler == "poisson":
            chosen = torch.rand(n, generator=source) < q
        elif noise.sampler == "order":
            chosen = place == step % m
        elif noise.sampler == "cycles":
            drawn = torch.rand(n, generator=source) < q * noise.cycle
            chosen = drawn & (place == step % noise.cycle)
        else:
            if step % m == 0:
                place = torch.randint(m, (n,), generator=source)
            chosen = place == step % m
        yield torch.nonzero(chosen)[:, 0]
