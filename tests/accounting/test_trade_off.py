"""delta, and what an attacker can reach: exact for Gaussians, and never below tests that are known."""

import functools
import math

import numpy as np
import pytest
from accounting_oracle import agreed_delta
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpfunc.accounting import Laplace, Ledger, Opaque, TradeOff, _lattice, _tilted, delta_at, epsilon
from dpfunc.accounting._tilted import curve_near
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event

GAUSSIAN = Ledger((Event(1.0, 1.0, 1),))
SAMPLED = Ledger((Event(0.1, 0.8, 5),))


@given(mu=st.floats(0.01, 6.0), rate=st.floats(1e-4, 0.9))
@settings(max_examples=30, deadline=None)
def test_a_gaussian_has_its_own_curve(mu, rate):
    """Never below, and at most 2e-5 of itself above: `Phi(Phi^-1(rate) + mu)`; advantage `2 Phi(mu / 2) - 1`."""
    limits = TradeOff(Ledger((Event(1.0, 1 / mu, 1),)))
    exact = norm.cdf(norm.ppf(rate) + mu)
    assert exact * (1 - 1e-9) <= limits.true_positives(rate) <= exact * (1 + 2e-5)
    assert limits.false_negatives(rate) == 1 - limits.true_positives(rate)
    assert limits.advantage() == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-6)
    for prior in (0.5, 0.1, 0.9):
        threshold = math.log((1 - prior) / prior) / mu + mu / 2  # of the best guess
        exact = prior * norm.sf(threshold - mu) + (1 - prior) * norm.cdf(threshold)
        assert exact * (1 - 1e-9) <= limits.bayes_success(prior) <= exact * (1 + 1e-6)


@given(at=st.floats(0.05, 3.0))
@settings(max_examples=5, deadline=None)
def test_delta_is_the_inverse_of_epsilon(at):
    for ledger in (GAUSSIAN, Ledger((Opaque(3, epsilon=0.5, delta=1e-4),))):
        found = delta_at(ledger, at)
        if found < 1:
            assert epsilon(ledger, found * (1 + 1e-9) + 1e-300).epsilon <= at * (1 + 1e-6)
            assert found * 0.99 < 1e-4 or epsilon(ledger, found * 0.99).epsilon >= at * (1 - 1e-3)


@pytest.mark.parametrize(("event", "at"), [(Event(0.00175, 3.03, 19), 0.5), (Event(0.002, 1.49, 3), 0.1)])
def test_tiny_deltas_are_tight(event, at):
    """Of few steps, where the first estimate of delta is much too large."""
    ledger = Ledger((event,))
    found = delta_at(ledger, at)
    assert 0 < found < 1e-11
    assert epsilon(ledger, found * (1 - 1e-2)).epsilon >= at * (1 - 1e-3)


@pytest.mark.parametrize("at", [0.2, 1.0])
def test_delta_against_integration(at):
    """Two sampled steps, by a sum over both outputs; both orders."""
    q, sigma = 0.2, 0.9
    x = np.arange(-9.0, 11.0, 0.01)
    none = norm.pdf(x, 0, sigma) * 0.01
    ratio = 1 - q + q * np.exp((x - 0.5) / sigma**2)
    both, weight = ratio[:, None] * ratio[None, :], none[:, None] * none[None, :]
    removed = float(np.sum(weight * np.maximum(both - math.exp(at), 0.0)))
    added = float(np.sum(weight * np.maximum(1 - math.exp(at) * both, 0.0)))
    found = delta_at(Ledger((Event(q, sigma, 2),)), at)
    assert max(removed, added) * (1 - 1e-6) <= found <= max(removed, added) * (1 + 2e-3)


def test_no_test_does_better():
    """Attackers who add up the losses of all steps, on 1e5 draws of each world, with 4 deviations."""
    rng, (q, sigma, steps) = np.random.default_rng(0), (0.1, 0.8, 5)
    total = np.zeros((2, 100_000))
    for _ in range(steps):
        there = (rng.random(total.shape) < q) * np.array([[0.0], [1.0]])
        x = there + sigma * rng.standard_normal(total.shape)
        total += np.log(1 - q + q * np.exp((x - 0.5) / sigma**2))
    limits = TradeOff(SAMPLED)
    rate, found = 0.1, limits.true_positives(0.1)
    reached = float(np.mean(total[1] > np.quantile(total[0], 1 - rate)))
    slack = 4 * math.sqrt(rate / 100_000) * 30
    assert reached - slack <= found <= max(reached + slack, rate) * 1.3
    gain = max(np.mean(total[1] > c) - np.mean(total[0] > c) for c in np.linspace(-1, 4, 50))
    assert gain - 0.01 <= limits.advantage() <= gain + 0.05


def composed_pure(eps, steps, at):
    """delta of randomised responses, as a sum over outcomes."""
    share = 1 / (1 + math.exp(-eps))
    chances = [math.comb(steps, k) * share**k * (1 - share) ** (steps - k) for k in range(steps + 1)]
    return sum(chance * max(0.0, 1 - math.exp(at - (2 * k - steps) * eps)) for k, chance in enumerate(chances))


@functools.lru_cache
def laplace_law(steps, width=1 / 1024):
    """Losses of Laplace releases of scale 1, by convolution: of one they are 2 x - 1 between the two modes."""
    loss = np.arange(-1.0, 1.0 + width / 2, width)
    inside = np.diff(np.exp((loss - 1) / 2) / 2)
    mass = np.append(inside, 0.0) / 2 + np.append(0.0, inside) / 2
    mass[[0, -1]] += math.exp(-1) / 2, 0.5
    total = mass
    for _ in range(steps - 1):
        total = np.convolve(total, mass)
    return total, np.arange(len(total)) * width - steps


def composed_laplace(steps, at):
    mass, loss = laplace_law(steps)
    return float(mass @ np.maximum(0.0, -np.expm1(at - loss)))


@pytest.mark.parametrize(
    ("ledger", "largest", "exact", "rate"),
    [(Ledger((Opaque(5, epsilon=1.0, delta=0.0),)), 5.0, lambda at: composed_pure(1.0, 5, at), rate) for rate in (0.01, 0.3)]
    + [(Ledger((Laplace(1.0, 1.0, 3),)), 3.0, lambda at: composed_laplace(3, at), rate) for rate in (0.01, 0.1)],
    ids=["randomised 0.01", "randomised 0.3", "Laplace 0.01", "Laplace 0.1"],
)  # fmt: skip
def test_pure_releases_have_their_own_curve(ledger, largest, exact, rate):
    """Both bounds count, each with its own minimum: five responses of epsilon 1 reach .382 at .01, and not .761."""
    at = np.linspace(0.0, largest, 301)
    deltas = np.array([exact(each) for each in at])
    bounds = np.append(np.exp(at) * rate + deltas, 1 - np.exp(-at) * (1 - deltas - rate))
    truth = float(bounds.min())
    assert truth * (1 - 1e-4) <= TradeOff(ledger).true_positives(rate) <= truth * (1 + 1e-3)


KINDS = [(0.02, 1.0, 300), (0.1, 2.0, 40)]


def without_lattice(monkeypatch):
    """Every lattice would be too large: the curve is that of a line of integration."""
    monkeypatch.setattr(_tilted, "lattice_law", lambda *_: _lattice.UNBOUNDED)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.6])
def test_a_line_of_integration_bounds_as_a_lattice_does(rate, monkeypatch):
    """Which of both is taken follows from the number of steps, and hardly changes what is found."""
    many, one = Ledger((Event(0.01, 1.0, 1000), Event(1.0, 40.0, 10))), Ledger((Event(0.01, 1.0, 1),))
    cost = epsilon(many, 1e-7).epsilon
    by_lattice = [TradeOff(ledger).true_positives(rate) for ledger in (many, one)]
    deltas = delta_at(many, cost), delta_at(one, 0.1)
    without_lattice(monkeypatch)
    assert [TradeOff(ledger).true_positives(rate) for ledger in (many, one)] == pytest.approx(by_lattice, rel=2e-5)
    assert delta_at(many, cost) == pytest.approx(deltas[0], rel=1e-4)
    assert delta_at(one, 0.1) == pytest.approx(deltas[1], rel=2e-5)


def test_steps_too_many_for_a_lattice():
    """Deltas come back that are large or tiny, and of an epsilon whose exponential float64 does not hold."""
    for event, deltas in ((Event(1e-4, 1.0, 10**7), (1e-3, 1e-30)), (Event(0.2, 0.5, 10**5), (1e-3, 1e-100))):
        ledger = Ledger((event,))
        for delta in deltas:
            assert delta_at(ledger, epsilon(ledger, delta).epsilon) == pytest.approx(delta, rel=2e-2)
    rare = Ledger((Event(1e-4, 1.0, 10**7),))  # of which no estimate is near the truth there
    assert delta_at(rare, 16.0) < 1e-40


@pytest.mark.parametrize("line", [False, True], ids=["lattice", "line"])
@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
def test_the_curve_of_delta_is_above_the_truth_everywhere(direction, line, monkeypatch):
    """Whatever delta it is aimed at; and near it hardly above."""
    if line:
        without_lattice(monkeypatch)
    aimed = {near: curve_near(KINDS, direction, near, ()) for near in (1e-9, 1e-4, 0.03)}
    for at in (0.1, 0.4, 1.0, 2.0, 3.0):
        truth = agreed_delta(at, KINDS, direction)
        assert all(curve(at) >= truth * (1 - 1e-9) for curve in aimed.values())
        assert min((curve(at) for near, curve in aimed.items() if near <= truth), default=truth) <= truth * (1 + 1e-4)


def test_ends_of_pure_releases():
    for event, largest in ((Opaque(2, epsilon=1.0, delta=0.0), 2.0), (Laplace(1.0, 1.0, 3), 3.0)):
        assert delta_at(Ledger((event,)), largest) == delta_at(Ledger((event,)), 2 * largest) == 0
        assert TradeOff(Ledger((event,))).true_positives(1e-6) == pytest.approx(1e-6 * math.exp(largest), rel=1e-9)


def test_ends():
    nothing, all_ = Ledger(), Ledger((Event(1.0, 0.0, 1),))
    assert (delta_at(nothing, 0.0), TradeOff(nothing).true_positives(0.1)) == (0, 0.1)
    assert TradeOff(nothing).bayes_success(0.7) == 0.7
    assert (delta_at(all_, 5.0), TradeOff(all_).true_positives(0.1), TradeOff(all_).bayes_success()) == (1, 1, 1)
    assert delta_at(Ledger((Event(1.0, 1e3, 1),)), 5.0) < 1e-300
    assert TradeOff(GAUSSIAN).bayes_success(1.0) == 1.0
    pure = Ledger((Opaque(1, epsilon=1.0, delta=0.0),))
    assert TradeOff(pure).advantage() == pytest.approx(math.tanh(0.5), rel=1e-4)
    assert TradeOff(pure).true_positives(0.1) == pytest.approx(0.1 * math.e, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [(lambda: delta_at(GAUSSIAN, -1.0), "epsilon"), (lambda: delta_at(GAUSSIAN, math.nan), "epsilon"),
     (lambda: TradeOff(GAUSSIAN).true_positives(0.0), "false_positives"), (lambda: TradeOff(3), "a Ledger"),
     (lambda: TradeOff(GAUSSIAN).bayes_success(1.5), "0 <= prior <= 1")],
)  # fmt: skip
def test_refused(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()
