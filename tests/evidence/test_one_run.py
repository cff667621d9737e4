"""One-run audits: figures of others, the error of the first kind, and faults of a run that they find."""

import numpy as np
import pytest
from evidence_loops import RUNS, audited
from scipy.stats import norm

from dpfunc.accounting import Ledger
from dpfunc.errors import InvalidArgument
from dpfunc.evidence import audit, largest_bound, plot
from dpfunc.evidence._one_run import Guesses, grid
from dpfunc.types import Event

FIGURES = {0: (0.0, 0.0), 1: (1.13346, 2.164749), 2: (2.311945, 4.7218075), 4: (4.395568, 9.133752)}


@pytest.mark.parametrize("shift", FIGURES)
def test_figures_of_jax_privacy(shift):
    """10,000 + 10,000 quantiles of the normal as scores, guesses "in" by thresholds on the hull."""
    scores = norm.ppf((np.arange(10_000) + 0.5) / 10_000)
    found = audit(scores + shift, scores, delta=1e-6, guesses="hull")
    assert (found.epsilon, found.epsilon_gaussian) == pytest.approx(FIGURES[shift], rel=1e-5)


@pytest.mark.parametrize(("mu", "guesses"), [(0.0, "grid"), (1.0, "grid"), (0.3, [(50, 50)])])
def test_calibration(mu, guesses):
    """A Gaussian mechanism at its own claim, and scores that know nothing at epsilon 0: refuted in 5 % at most."""
    rng = np.random.default_rng(0)
    claim = Ledger((Event(1.0, 1 / mu, 1),)) if mu else 0.0
    refuted = 0
    for _ in range(60):
        present = rng.random(300) < 0.5
        scores = rng.normal(size=300) + mu * present
        found = audit(scores[present], scores[~present], delta=1e-5, claim=claim, guesses=guesses)
        refuted += bool(found.exceeds or found.epsilon > found.claim)
    assert refuted <= 3


def test_the_worst_mechanism_is_not_refuted_too_often():
    """Randomized response of epsilon 1 attains the binomial tail: the error comes near alpha, and not above."""
    rng = np.random.default_rng(0)
    refuted = 0
    for _ in range(300):
        present = rng.random(200) < 0.5
        told = np.where(rng.random(200) < 1 / (1 + np.exp(-1.0)), present, ~present) + 1e-3 * rng.random(200)
        found = audit(told[present], told[~present], delta=1e-9, claim=1.0, confidence=0.9, guesses=[(100, 100)])
        refuted += found.exceeds
    assert 5 <= refuted <= 40


@pytest.mark.parametrize("fault", RUNS)
def test_power(fault):
    """`python -m benchmarks.evidence` does it 20 times each."""
    found = audited(700 + list(RUNS).index(fault), *RUNS[fault])
    assert found.exceeds == (not fault.startswith("none")), found


def test_guesses():
    assert sum(map(sum, grid(1))) == 1
    assert all(0 < a + b <= m for m in range(1, 60) for a, b in grid(m))
    found = audit([1.0, 1.0], [1.0, 1.0], delta=0.1, guesses=[(2, 2)])
    assert found.best == Guesses(2, 2, 0)  # equal scores in the worst order
    assert audit([2.0], [1.0], delta=0.1, guesses=[(1, 1)]).best.correct == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scores_in": []}, "scores_in"),
        ({"scores_out": [float("nan")]}, "not finite"),
        ({"delta": 0.0}, "0 < delta < 1"),
        ({"confidence": 1.0}, "confidence"),
        ({"guesses": [(3, 2)]}, "1 to 4 guesses"),
        ({"guesses": "all"}, "'grid', 'hull'"),
        ({"claim": -1.0}, "claim"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(InvalidArgument, match=words):
        audit(**({"scores_in": [1.0, 2.0], "scores_out": [0.0, 1.0], "delta": 1e-5} | arguments))


def test_plot(tmp_path):
    scores = np.arange(50.0)
    one = audit(scores + 30, scores, delta=1e-5, claim=0.5)
    plot([one, audit(scores, scores, delta=1e-5, claim=2.0)], tmp_path / "audits.png")
    assert (tmp_path / "audits.png").stat().st_size > 1000
    with pytest.raises(InvalidArgument, match="finite claims"):
        plot([audit(scores, scores, delta=1e-5)], tmp_path / "no.png")


@pytest.mark.parametrize("count", [2, 7, 100, 1000])
def test_no_audit_gives_more(count):
    """Of scores that tell all canaries apart, and of others."""
    most = largest_bound(count, delta=1e-5)
    rng = np.random.default_rng(count)
    for shift in (100.0, 3.0, 0.0):
        inside = count // 2
        found = audit(rng.normal(shift, 1.0, inside), rng.normal(0.0, 1.0, count - inside), delta=1e-5)
        assert found.epsilon <= most[0] * 1.001
        assert found.epsilon_gaussian <= most[1] * 1.001
    if count >= 1000:
        assert most[0] > 4
