"""The cost of the best of a random number of runs, compared with exact distributions of what a search releases."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpfunc.accounting import Ledger, Opaque, RunCount, calibrate_search, selection_epsilon
from dpfunc.accounting._rdp import ORDERS
from dpfunc.accounting.selection import selection_curve
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.types import Event

A = np.array(ORDERS)
SHAPES = st.sampled_from([-0.5, 0.0, 0.5, 1.0, 3.0, math.inf])
MEANS = st.one_of(st.just(1.0), st.floats(1.0, 50.0))


def generating(runs, x):
    """E[x^K], from the closed forms."""
    if runs.shape == math.inf:
        return np.exp(runs.mean * (x - 1))
    if runs.gamma == 1:
        return x
    if runs.shape == 0:
        return np.log1p(-(1 - runs.gamma) * x) / math.log(runs.gamma)
    return ((1 - (1 - runs.gamma) * x) ** -runs.shape - 1) / (runs.gamma**-runs.shape - 1)


def released(runs, p):
    """Exact law of the best of K runs, whose outcomes have the probabilities p, the worst one first; then of none."""
    below = np.concatenate([[0.0], np.cumsum(p)])
    none = math.exp(-runs.mean) if runs.shape == math.inf else 0.0
    return np.concatenate([np.diff(generating(runs, np.minimum(below, 1.0))), [none]])


def divergences(p, q):
    kept = p > 0
    with np.errstate(divide="ignore"):
        logs = A[:, None] * np.log(p[kept]) + (1 - A[:, None]) * np.log(q[kept])
    top = logs.max(axis=1)
    return (top + np.log(np.exp(logs - top[:, None]).sum(axis=1))) / (A - 1)


def both_ways(p, q):
    return np.maximum(divergences(p, q), divergences(q, p))


@st.composite
def neighbours(draw):
    """Laws of the outcome of one run for two neighbouring data sets; far apart or near each other."""
    size = draw(st.integers(2, 6))
    p = np.array(draw(st.lists(st.floats(1e-3, 1.0), min_size=size, max_size=size)))
    far = draw(st.floats(0.0, 3.0))
    q = p * np.exp(far * np.array(draw(st.lists(st.floats(-1, 1), min_size=size, max_size=size))))
    return p / p.sum(), q / q.sum()


RESPONSE = (np.array([0.75, 0.25]), np.array([0.25, 0.75]))
RARE = (np.array([0.99, 0.01]), np.array([0.9999, 1e-4]))
RARER = (np.array([0.8, 0.2]), np.array([1 - 1e-6, 1e-6]))
COMMON = (np.array([0.9, 0.1]), np.array([0.3, 0.7]))


@settings(max_examples=60)
@given(neighbours(), MEANS, SHAPES)
@example(RESPONSE, 8.0, 1.0)
@example(RARE, 8.0, 1.0)  # finds a formula without R(a)
@example(RARER, 8.0, 1.0)  # without log(mean)
@example(COMMON, 200.0, 10.0)  # without the 1, the shape, or log(1/gamma) of the middle term
@example((np.array([0.999, 0.001]), np.array([0.998, 0.002])), 30.0, math.inf)
@example((np.array([0.5, 0.5]), np.array([0.5, 0.5])), 1.0, math.inf)
def test_the_curve_bounds_the_exact_divergence(pair, mean, shape):
    runs = RunCount(mean, shape)
    bound = selection_curve(both_ways(*pair), ORDERS, runs)
    exact = both_ways(*(released(runs, p) for p in pair))
    assert (exact <= bound + 1e-9 * (1 + A)).all()


@pytest.mark.parametrize("shape", [-0.5, 0.0, 0.3, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("mean", [1.0, 1.5, 8.0, 40.0])
def test_the_number_of_runs_has_its_law(mean, shape):
    """Quantiles are those of the generating function: so many runs are drawn as the formula counts."""
    runs = RunCount(mean, shape)
    k = np.array([runs.quantile(u) for u in (np.arange(4000) + 0.5) / 4000])
    assert k.min() >= (0 if shape == math.inf else 1)
    for x in (0.2, 0.9):
        assert np.mean(x**k) == pytest.approx(generating(runs, x), abs=2e-3)
    if shape > 0:
        assert np.mean(k) == pytest.approx(mean, rel=0.05)
    assert (np.diff(k) >= 0).all()


@pytest.mark.parametrize("runs", [RunCount(8.0, 1.0), RunCount(8.0, math.inf), RunCount(3.0, 0.0)])
def test_epsilon_bounds_a_search_exactly(runs):
    """One run releases a Gaussian number, the score: integrate what the best of K tells, at the epsilon that is claimed."""
    delta, sigma = 1e-5, 4.0
    found = selection_epsilon(runs, [Ledger((Event(1.0, sigma, 1),))], delta).epsilon
    x = np.linspace(-12 * sigma, 12 * sigma + 1, 40001)

    def density(center):
        z = (x - center) / sigma
        below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
        h = 1e-6
        slope = (generating(runs, below + h) - generating(runs, below - h)) / (2 * h)
        return np.exp(-z * z / 2) / (sigma * math.sqrt(2 * math.pi)) * slope

    p, q = density(0.0), density(1.0)

    def excess(level):
        step = x[1] - x[0]
        return max(np.maximum(one - math.exp(level) * other, 0).sum() * step for one, other in ((p, q), (q, p)))

    assert excess(found) <= delta
    one = Ledger((Event(1.0, sigma, 1),)).epsilon(delta).epsilon
    assert excess(one) > delta  # a search costs more than one of its runs
    assert found > one


def test_one_run_costs_one_run():
    ledger = Ledger((Event(0.02, 1.3, 200),))
    for shape in (-0.5, 0.0, 1.0, 7.0):
        assert selection_epsilon(RunCount(1.0, shape), [ledger], 1e-5).epsilon == pytest.approx(
            ledger.epsilon(1e-5, "rdp").epsilon
        )


def test_candidates_cost_as_the_worst_of_them_and_earlier_runs_are_counted():
    runs, little, much = RunCount(4.0, 1.0), Ledger((Event(1.0, 9.0, 1),)), Ledger((Event(1.0, 3.0, 1),))
    cost = selection_epsilon(runs, [much], 1e-5).epsilon
    assert selection_epsilon(runs, [little, much], 1e-5).epsilon == cost
    assert selection_epsilon(runs, [much], 1e-5, spent=much).epsilon > cost


def test_a_search_is_calibrated():
    runs, score = RunCount(8.0, 1.0), Ledger((Event(1.0, 6.0, 1),))

    def ledgers(scale):
        return [Ledger((Event(0.3, scale, 50),)), Ledger((Event(0.2, 1.2 * scale, 50),)), score]

    scale = calibrate_search(runs, ledgers, epsilon=3.0, delta=1e-5)
    assert selection_epsilon(runs, ledgers(scale), 1e-5).epsilon <= 3.0
    assert selection_epsilon(runs, ledgers(scale * (1 - 2e-4)), 1e-5).epsilon > 3.0
    with pytest.raises(DPFuncError, match="the score alone cost"):
        calibrate_search(runs, lambda s: [*ledgers(s), Ledger((Event(1.0, 0.5, 1),))], epsilon=3.0, delta=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [(0.5, 1.0), (math.nan, 1.0), (math.inf, 1.0), (2e4, 1.0), (8.0, -1.0), (8.0, math.nan), (8.0, -math.inf),
     ("8", 1.0)],
)  # fmt: skip
def test_wrong_numbers_of_runs_are_refused(wrong):
    with pytest.raises(InvalidArgument, match="Expected"):
        RunCount(*wrong)


def test_wrong_questions_are_refused():
    runs, ledger = RunCount(8.0, 1.0), Ledger((Event(1.0, 6.0, 1),))
    other = Ledger((Event(1.0, 6.0, 1),), "replace_one")
    for ledgers, delta, spent in (
        ([], 1e-5, None), (ledger, 1e-5, None), ([ledger], 0.0, None), ([ledger], 1e-5, other), ([ledger, other], 1e-5, None),
    ):  # fmt: skip
        with pytest.raises(DPFuncError, match="Expected"):
            selection_epsilon(runs, ledgers, delta, spent=spent)
    for u in (-0.1, 1.0, math.nan):
        with pytest.raises(InvalidArgument):
            runs.quantile(u)


def test_stated_deltas_are_counted():
    """Those of earlier runs lower the delta that is left; those of a run, which there are many of, are refused."""
    run, runs = Ledger((Event(0.1, 5.0, 10),)), RunCount(8.0, 1.0)
    spent = Ledger((Opaque(1, 1.0, 1e-3),))
    pure = Ledger((Opaque(1, 1.0, 0.0),))
    assert selection_epsilon(runs, [run], 1e-5, spent=spent).epsilon == math.inf
    assert selection_epsilon(runs, [run], 2e-3, spent=spent).epsilon == pytest.approx(
        selection_epsilon(runs, [run], 1e-3, spent=pure).epsilon, rel=1e-2
    )
    with pytest.raises(InvalidArgument, match="no delta of their own"):
        selection_epsilon(runs, [run, spent], 1e-2)
