"""Compare epsilon with dp_accounting, or with exact sums, on random plans of all kinds of events.

`pip install dp-accounting`, then `python tools/events_fuzz.py --plans 2000`. Of each kind it prints how many plans are
below an optimistic estimate of dp_accounting or below the exact value, and the largest excess over the other end.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from dpfunc.accounting import (
    Allocated,
    Capped,
    DiscreteGaussian,
    DiscreteLaplace,
    Laplace,
    Ledger,
    MixtureOfGaussians,
    Opaque,
    RandomizedResponse,
    epsilon,
)
from dpfunc.types import Adjacency, Event

Estimate = tuple[float, float]  # epsilon from below and from above
Plan = tuple[tuple[Event, ...], Adjacency, Callable[[float], Estimate]]


def pld() -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution


def by_peer(make: Callable[[bool], Any]) -> Callable[[float], Estimate]:
    """The optimistic and the pessimistic estimate of dp_accounting; `make` has True for the pessimistic one."""
    return lambda at: (make(False).get_epsilon_for_delta(at), make(True).get_epsilon_for_delta(at))


def by_sum(delta_at: Callable[[float], float]) -> Callable[[float], Estimate]:
    """The exact epsilon, by bisection."""

    def solve(at: float) -> Estimate:
        low, high = 0.0, 200.0
        if delta_at(low) <= at:
            return 0.0, 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if delta_at(middle) > at else (low, middle)
        return low, high

    return solve


def poisson(rng: np.random.Generator) -> Plan:
    q, sigma, steps = 10 ** rng.uniform(-2.5, -0.1), rng.uniform(0.8, 4), int(10 ** rng.uniform(0, 1.5))
    make = pld().from_gaussian_mechanism
    return (Event(q, sigma, steps),), "add_remove", by_peer(
        lambda high: make(sigma, sampling_prob=q, pessimistic_estimate=high).self_compose(steps)
    )  # fmt: skip


def laplace(rng: np.random.Generator) -> Plan:
    q, scale, steps = float(rng.choice([1.0, rng.uniform(0.02, 0.9)])), rng.uniform(0.3, 8), int(rng.integers(1, 12))
    make = pld().from_laplace_mechanism
    return (Laplace(q, scale, steps),), "add_remove", by_peer(
        lambda high: make(scale, sampling_prob=q, pessimistic_estimate=high).self_compose(steps)
    )  # fmt: skip


def discrete_laplace(rng: np.random.Generator) -> Plan:
    k, steps = int(rng.integers(1, 6)), int(rng.integers(1, 12))
    a = rng.uniform(0.05, 2) / k
    make = pld().from_discrete_laplace_mechanism
    return (DiscreteLaplace(1.0, 1 / (a * k), steps, k),), "add_remove", by_peer(
        lambda high: make(a, k, pessimistic_estimate=high).self_compose(steps)
    )  # fmt: skip


def response(rng: np.random.Generator) -> Plan:
    noise, number, steps = rng.uniform(0.1, 0.95), int(rng.integers(2, 9)), int(rng.integers(1, 12))
    make = pld().from_randomized_response
    return (RandomizedResponse(steps, noise, number),), "replace_one", by_peer(
        lambda high: make(noise, number, pessimistic_estimate=high).self_compose(steps)
    )  # fmt: skip


def mixture(rng: np.random.Generator) -> Plan:
    """One step in closed form: the ratio rises with the output. The peer takes a minute for such a plan."""
    from scipy.special import ndtr

    distances, probs = rng.uniform(0, 2, 3), rng.dirichlet([3, 1, 1])
    s = rng.uniform(0.6, 4)

    def ratio(x: float) -> float:
        return float(probs @ np.exp((distances * x - distances**2 / 2) / s**2))

    def delta_at(at: float) -> float:
        found = []
        for sign in (1, -1):
            low, high = -60 * s, 60 * s + 60
            for _ in range(100):
                middle = (low + high) / 2
                low, high = (middle, high) if ratio(middle) < math.exp(sign * at) else (low, middle)
            with_record = float(probs @ ndtr(sign * (distances - low) / s))
            without = float(ndtr(-sign * low / s))
            p, q = (with_record, without) if sign == 1 else (without, with_record)
            found.append(p - math.exp(at) * q)
        return max(found)

    event = MixtureOfGaussians(s, 1, tuple(distances.tolist()), tuple(probs.tolist()))
    return (event,), "add_remove", by_sum(delta_at)


def capped(rng: np.random.Generator) -> Plan:
    """The peer has no optimistic estimate: its pessimistic one, less the width of its cells."""
    n, q, s, steps = int(rng.integers(20, 200)), rng.uniform(0.05, 0.6), rng.uniform(0.8, 4), int(rng.integers(1, 10))
    cap = max(1, int(n * q * rng.uniform(0.9, 1.8)))
    found = pld().from_truncated_subsampled_gaussian_mechanism(n, q, cap, s).self_compose(steps)

    def both(at: float) -> Estimate:
        high = found.get_epsilon_for_delta(at)
        return high - 1e-4 * (steps + 1), high

    return (Capped(q, s, steps, n, cap),), "add_remove", both


def opaque(rng: np.random.Generator) -> Plan:
    kinds = [(int(rng.integers(1, 8)), rng.uniform(0.05, 1.5), float(rng.choice([0.0, 1e-9]))) for _ in range(2)]
    found, masses = np.zeros(1), np.ones(1)
    for steps, each, lost in kinds:
        share, k = 1 / (1 + math.exp(-each)), np.arange(steps + 1)
        chances = np.array([math.comb(steps, i) for i in k]) * share**k * (1 - share) ** (steps - k)
        found = np.add.outer(found, (2 * k - steps) * each).ravel()
        masses = np.outer(masses, chances * (1 - lost) ** steps).ravel()
    infinite = 1 - math.prod((1 - lost) ** steps for steps, _, lost in kinds)
    events = tuple(Opaque(steps, epsilon=each, delta=lost) for steps, each, lost in kinds)
    return events, "add_remove", by_sum(lambda at: float(masses @ np.maximum(0.0, -np.expm1(at - found))) + infinite)


def discrete_gaussian(rng: np.random.Generator) -> Plan:
    """Two steps, by a sum over both outputs, for a record removed and added."""
    k, sigma, q = int(rng.integers(1, 4)), rng.uniform(0.7, 3), float(rng.choice([1.0, rng.uniform(0.05, 0.9)]))
    s = sigma * k
    x = np.arange(-math.ceil(12 * s), math.ceil(12 * s) + k + 1)
    plain, moved = (np.exp(-((x - mean) ** 2) / (2 * s * s)) for mean in (0, k))
    plain, moved = plain / plain.sum(), (1 - q) * plain / plain.sum() + q * moved / plain.sum()
    one, two = (np.outer(each, each).ravel() for each in (plain, moved))

    def delta_at(at: float) -> float:
        ratio = math.exp(at)
        return max(float(np.maximum(0, two - ratio * one).sum()), float(np.maximum(0, one - ratio * two).sum()))

    return (DiscreteGaussian(q, sigma, 2, k),), "add_remove", by_sum(delta_at)


def allocated(rng: np.random.Generator) -> Plan:
    """Two batches: given the first ratio, the mean over the other one is in closed form."""
    from scipy.special import ndtr

    s = math.exp(rng.uniform(math.log(0.5), math.log(6)))
    z = np.linspace(-9, 9, 8001)
    weight = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    first = np.exp(z / s - 0.5 / s**2)

    def delta_at(at: float) -> float:
        ends = []
        for sign in (1, -1):
            left = 2 * math.exp(sign * at) - first
            place = np.log(np.maximum(left, 1e-300)) * s
            above = np.where(left > 0, ndtr(0.5 / s - place) - left * ndtr(-place - 0.5 / s), 1 - left)
            below = np.where(left > 0, left * ndtr(place + 0.5 / s) - ndtr(place - 0.5 / s), 0.0)
            ends.append(float(weight @ (above if sign == 1 else below * math.exp(at))) / 2)
        return max(ends)

    return (Allocated(s, 1, 2),), "add_remove", by_sum(delta_at)


KINDS = (poisson, laplace, discrete_laplace, response, mixture, capped, opaque, discrete_gaussian, allocated)


def compare(plan: Plan, at: float, fine: bool) -> tuple[float, float, float]:
    events, adjacency, estimate = plan
    found = epsilon(Ledger(events, adjacency), at, fine=fine).epsilon
    return (found, *estimate(at))


@click.command(help=__doc__.splitlines()[0])
@click.option("--plans", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--fine", is_flag=True, help="The bound on a lattice.")
def main(plans: int, seed: int, fine: bool) -> None:
    """Compare, and print a summary."""
    logging.disable()  # the peer warns of each optimistic estimate
    rng = np.random.default_rng(seed)
    rows: dict[str, list[tuple[float, float, float]]] = {kind.__name__: [] for kind in KINDS}
    for kind in itertools.islice(itertools.cycle(KINDS), plans):
        at = float(10 ** rng.uniform(-7, -2))
        plan = kind(rng)
        row = compare(plan, at, fine)
        rows[kind.__name__].append(row)
        found, low, high = row
        if found < low * (1 - 1e-8) - 1e-12 or found > 1.001 * high + 1e-6:
            click.echo(f"{plan[0]} at {at:.3g}: {found:.9g}, expected {low:.9g} to {high:.9g}")
    summary = {
        name: {
            "plans": len(found),
            "below": sum(each < low * (1 - 1e-8) - 1e-12 for each, low, _ in found),
            "more than 0.1 % above": sum(each > 1.001 * high + 1e-6 for each, _, high in found),
            "largest excess": max((each / high - 1 for each, _, high in found if high > 1e-3), default=0.0),
        }
        for name, found in rows.items()
    }
    click.echo(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
