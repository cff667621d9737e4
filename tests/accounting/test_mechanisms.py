"""Discrete noise, answers, mixtures, trees: against sums over all outputs, and against figures of dp_accounting 0.6."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from dpfunc.accounting import (
    ZCDP,
    Allocated,
    Capped,
    DiscreteGaussian,
    DiscreteLaplace,
    Exponential,
    Laplace,
    Ledger,
    MixtureOfGaussians,
    Opaque,
    RandomizedResponse,
    Tree,
    delta_at,
    epsilon,
)
from dpfunc.accounting.events import law_of
from dpfunc.accounting.ledger import from_values, to_values
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event


def of_law(event, direction, at):
    law = law_of(event, direction)
    return float(law.mass @ np.maximum(0.0, -np.expm1(at - law.loss))) + float(law.infinite)


def hockey_stick(p, q, at):
    return float(np.maximum(p - math.exp(at) * q, 0.0).sum())


def noise_of(event, shift, x):
    """Masses of discrete noise, normalised by a sum."""
    scale = event.noise_multiplier * event.sensitivity
    squares = isinstance(event, DiscreteGaussian)

    def weights(at):
        return np.exp(-(at**2) / (2 * scale**2) if squares else -np.abs(at) / scale)

    return weights(x - shift) / weights(np.arange(-3000.0, 3001.0)).sum()


@pytest.mark.parametrize("kind", [DiscreteGaussian, DiscreteLaplace])
@pytest.mark.parametrize(("q", "noise", "k"), [(1.0, 0.7, 1), (0.2, 1.5, 3), (1.0, 2.0, 40), (0.05, 0.8, 5)])
def test_discrete_noise_against_sums(kind, q, noise, k):
    event = kind(q, noise, 1, sensitivity=k)
    x = np.arange(-2500.0, 2501.0)
    plain, moved = noise_of(event, 0, x), noise_of(event, k, x)
    mixed = (1 - q) * plain + q * moved
    for at in (0.0, 0.2, 1.0):
        for direction, pair in (("remove", (mixed, plain)), ("add", (plain, mixed)), ("replace", (moved, plain))):
            truth = hockey_stick(*pair, at)
            assert truth * (1 - 1e-9) - 1e-14 <= of_law(event, direction, at) <= truth * (1 + 1e-9) + 1e-14


def test_many_integers_are_put_together():
    """Of much discrete noise cells hold several integers, as those of Gaussian and Laplace noise: near their costs."""
    wide = DiscreteGaussian(1.0, 2.0, 10, sensitivity=500)
    gaussian = epsilon(Ledger((Event(1.0, 2.0, 10),)), 1e-6).epsilon
    assert epsilon(Ledger((wide,)), 1e-6).epsilon == pytest.approx(gaussian, rel=1e-4)
    steps = DiscreteLaplace(1.0, 2.0, 1, sensitivity=20_000)
    assert delta_at(Ledger((steps,)), 0.3) == pytest.approx(1 - math.exp((0.3 - 0.5) / 2), rel=1e-4)
    with pytest.raises(InvalidArgument, match="noise_multiplier \\* sensitivity <= 100000"):
        DiscreteGaussian(1.0, 10.0, 1, sensitivity=20_000)


# events, adjacency, delta, epsilon: tests of pld_privacy_accountant and rdp_privacy_accountant of dp_accounting 0.6
PEER = {
    "mixtures of Gaussians": (
        (MixtureOfGaussians(1.0, 3, (0.0, 1.0, 2.0), (0.2, 0.6, 0.2)), MixtureOfGaussians(2.0, 2, (0.0, 2.0, 3.0), (0.33, 0.34, 0.33))),
        "add_remove", 1e-6, 17.193115, 1e-4,
    ),
    "discrete Laplace": ((DiscreteLaplace(1.0, 1.0, 3), DiscreteLaplace(1.0, 2.0, 2)), "add_remove", 0.0, 4.0, 1e-12),
    "randomised response": ((RandomizedResponse(1, 0.5, 4),), "replace_one", 0.0, math.log(5.0), 1e-12),
    "tree": ((Tree(4.0, 1, 1000),), "add_remove", 1e-5, epsilon(Ledger((Event(1.0, 4.0, 10),)), 1e-5).epsilon, 1e-12),
}  # fmt: skip


@pytest.mark.parametrize(("events", "adjacency", "at", "published", "above"), PEER.values(), ids=PEER)
def test_figures_of_a_peer(events, adjacency, at, published, above):
    found = epsilon(Ledger(events, adjacency), at).epsilon
    assert published * (1 - 3e-8) <= found <= published * (1 + above)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_mixtures_of_gaussians(direction):
    event = MixtureOfGaussians(0.8, 1, (0.0, 0.5, 2.0), (0.9, 0.07, 0.03))
    x = np.arange(-9.0, 11.0, 1e-4)
    plain = norm.pdf(x, 0, 0.8) * 1e-4
    mixed = sum(p * norm.pdf(x, c, 0.8) * 1e-4 for c, p in zip(event.distances, event.probs, strict=True))
    pair = (mixed, plain) if direction == "remove" else (plain, mixed)
    for at in (0.0, 0.05, 0.5, 2.0):
        truth = hockey_stick(*pair, at)
        assert truth * (1 - 1e-5) - 1e-12 <= of_law(event, direction, at) <= truth * (1 + 1e-3) + 1e-8
    sampled = MixtureOfGaussians(1.0, 50, (0.0, 1.0), (0.98, 0.02))
    plain_steps = epsilon(Ledger((Event(0.02, 1.0, 50),)), 1e-6).epsilon
    assert epsilon(Ledger((sampled,)), 1e-6).epsilon == pytest.approx(plain_steps, rel=2e-3)


def test_randomised_response_against_enumeration():
    """Three answers of a person, true or another one, by a sum over all outcomes."""
    event, at = RandomizedResponse(3, noise=0.4, num_answers=3), 1.5
    true, false = 1 - 0.4 + 0.4 / 3, 0.4 / 3
    truth = 0.0
    for outcome in itertools.product(range(3), repeat=3):
        p = math.prod(true if y == 0 else false for y in outcome)
        q = math.prod(true if y == 1 else false for y in outcome)
        truth += max(0.0, p - math.exp(at) * q)
    assert truth * (1 - 1e-9) <= delta_at(Ledger((event,), "replace_one"), at) <= truth * (1 + 2e-3)
    for free in (RandomizedResponse(3, noise=1.0, num_answers=4), RandomizedResponse(3, noise=0.0, num_answers=1)):
        assert epsilon(Ledger((free,), "replace_one"), 0.0).epsilon == 0
    assert epsilon(Ledger((RandomizedResponse(1, 0.0, 2),), "zero_out"), 1e-3).epsilon == math.inf
    with pytest.raises(InvalidArgument, match="zero_out or replace_one"):
        Ledger((event,))


def test_choices_are_bounded_both_ways():
    """Many small choices cost less than as many pure releases; one costs its epsilon."""
    many, pure = Ledger((Exponential(1000, 0.05),)), Ledger((Opaque(1000, epsilon=0.05, delta=0.0),))
    assert epsilon(many, 1e-6).epsilon < 0.7 * epsilon(pure, 1e-6).epsilon
    curve = min(
        1000 * 0.05**2 / 8 * a + (math.log(1e6) - math.log(a)) / (a - 1) + math.log1p(-1 / a) for a in range(2, 500)
    )
    assert epsilon(many, 1e-6).epsilon == pytest.approx(curve, rel=2e-3)
    assert epsilon(Ledger((Exponential(1, 0.3),)), 0.0).epsilon == 0.3


def test_sampled_zcdp_is_above_sampled_gaussians():
    """A Gaussian release is 1/(2 sigma^2)-zCDP, also on a sample; xi is added to each order."""
    gaussian, stated = Ledger((Event(0.05, 2.0, 20),)), Ledger((ZCDP(20, rho=1 / 8, sampling_prob=0.05),))
    full = Ledger((ZCDP(20, rho=1 / 8),))
    costs = [epsilon(each, 1e-6, "rdp").epsilon for each in (gaussian, stated, full)]
    assert costs == sorted(costs)
    assert costs[1] < 0.8 * costs[2]
    more = epsilon(Ledger((ZCDP(20, rho=1 / 8, xi=0.01),)), 1e-6).epsilon
    assert more == pytest.approx(costs[2] + 20 * 0.01, rel=1e-9)


def test_the_blocks_of_the_page_run():
    page = (Path(__file__).parents[2] / "docs" / "accounting.md").read_text()
    blocks = re.findall("```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})


EVENTS = [
    DiscreteGaussian(0.5, 1.0, 3, 2), DiscreteLaplace(1.0, 1.0, 3), RandomizedResponse(2, 0.5, 3), Exponential(2, 0.5),
    MixtureOfGaussians(1.0, 2, (0.0, 1.0), (0.5, 0.5)), Tree(2.0, 1, 9), ZCDP(2, rho=0.1), ZCDP(2, rho=0.1, xi=0.5, sampling_prob=0.5),
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_files_and_ledgers(event):
    """Exact in files; with more steps it costs more; beside a plain step it costs more than each."""
    assert from_values(json.loads(json.dumps(to_values(event)))) == event
    ledger = Ledger((event,), "zero_out")
    both = ledger.compose(Ledger((Event(0.1, 2.0, 5),), "zero_out"))
    costs = [each.epsilon(1e-5).epsilon for each in (ledger, both, ledger.compose(ledger))]
    assert 0 < costs[0] < costs[1] < math.inf
    assert costs[0] < costs[2]
    assert Ledger.from_json(both.to_json()) == both


def test_files_of_before_are_read():
    old = {"kind": "zcdp", "sampling_prob": 1.0, "noise_multiplier": 0.0, "num_steps": 2, "rho": 0.1}
    assert from_values(old) == ZCDP(2, rho=0.1)
    assert to_values(ZCDP(2, rho=0.1)) == old


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: DiscreteLaplace(1.0, 1.0, 1, sensitivity=0), "sensitivity"),
     (lambda: DiscreteLaplace(1.0, 1.0, 1, sensitivity=10**10), "sensitivity <= 10000000.*larger units"),
     (lambda: DiscreteGaussian(1.0, 1e-9, 1, sensitivity=10**10), "sensitivity <= 10000000"), (lambda: RandomizedResponse(1, 1.5, 2), "noise"),
     (lambda: Exponential(1, 0.0), "epsilon"), (lambda: MixtureOfGaussians(1.0, 1, (0.0, 1.0), (0.5, 0.6)), "sum to 1"),
     (lambda: MixtureOfGaussians(1.0, 1, (0.0, -1.0), (0.5, 0.5)), "distances"), (lambda: Tree(1.0, 1, 0), "num_leaves"),
     (lambda: MixtureOfGaussians(1.0, 1, 3, (1.0,)), "a tuple of numbers"), (lambda: ZCDP(1, rho=0.1, xi=-1.0), "xi")],
)  # fmt: skip
def test_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


LITTLE = {  # kind -> an event with this noise
    "Laplace": lambda noise: Laplace(0.1, noise, 1),
    "discrete Laplace": lambda noise: DiscreteLaplace(0.1, noise, 2),
    "discrete Gaussian": lambda noise: DiscreteGaussian(0.1, noise, 1, sensitivity=3),
    "mixture": lambda noise: MixtureOfGaussians(noise, 1, (0.0, 1.0), (0.9, 0.1)),
    "rare mixture": lambda noise: MixtureOfGaussians(noise / 3, 1, (0.0, 1.0), (1 - 1e-6, 1e-6)),
    "capped": lambda noise: Capped(0.5, noise, 2, dataset_size=50, cap=20),
    "capped, fixed size": lambda noise: Capped(1.0, noise, 2, dataset_size=50, cap=20),
    "allocated": lambda noise: Allocated(noise, 3, num_batches=10),
    "Gaussian": lambda noise: Event(1.0, noise, 10),
}


@pytest.mark.parametrize("kind", LITTLE)
def test_hardly_any_noise_has_a_cost(kind):
    """No error and no memory: what float64 cannot hold counts as infinite."""
    costs = []
    for noise in (0.2, 0.06, 1e-3, 1e-6, 1e-9, 1e-200, 1e-306, 5e-324):
        ledger = Ledger((LITTLE[kind](noise),), "zero_out")
        costs.append(ledger.epsilon(1e-12).epsilon)
        assert delta_at(ledger, 1.0) >= (0.99e-6 if "rare" in kind else 0.06)
    assert costs == sorted(costs)
    assert costs[-1] == math.inf
