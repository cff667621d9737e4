"""The finer bound, on a lattice: never below the truth, within 1e-6 of it, whatever it is aimed at."""

import math
from dataclasses import replace

import numpy as np
import pytest
from accounting_oracle import Undecided, agreed_delta, delta_bracket, epsilon_by_inversion

from dpfunc.accounting import Capped, Laplace, Ledger, MixtureOfGaussians, Opaque, epsilon
from dpfunc.accounting import _tilted_aim as aims
from dpfunc.accounting._gaussian import gaussian_epsilon
from dpfunc.accounting._lattice import lattice_epsilon
from dpfunc.accounting._tilted import one_direction
from dpfunc.noise.strategies import optimal_bands
from dpfunc.types import Event

# BandMF with samples in cycles, n 1000, q .001, sigma 1, delta 1e-6. First the upper bounds of another library, on a
# grid of its own; the second ones are inversions of the Laplace transform.
AMPLIFIED = {1: (0.185571, 0.18551626), 8: (0.819755, 0.81975365), 32: (1.947697, 1.94769692)}


def aimed(kinds, direction, delta, about):
    table = aims.loss_table(kinds, direction, delta)
    t = aims.saddle(table, about)
    return table, aims.make_aim(table, about, max(t, 1 / about), t, math.log(delta))


@pytest.mark.parametrize("bands", AMPLIFIED)
def test_cyclic_samples_amplify(bands):
    """BandMF with samples in cycles costs Poisson steps with `bands q`, one a cycle."""
    published, truth = AMPLIFIED[bands]
    matrix = optimal_bands(1000, bands)
    event = Event(bands * 0.001, 1 / matrix.sensitivity(1000, 1000, 1), math.ceil(1000 / bands))
    exact = epsilon_by_inversion([(event.sampling_prob, 1.0, event.num_steps)], 1e-6, guess=truth)
    assert exact == pytest.approx(truth, rel=1e-7)
    assert exact <= published * (1 + 1e-6)
    assert exact * (1 - 1e-8) <= epsilon(Ledger((event,)), 1e-6, fine=True).epsilon <= exact * (1 + 1e-6)


def test_a_five_fold_mixture_of_gaussians():
    """17.193115: `test_mixture_gaussian_dp_event` of dp_accounting 0.6, pld_privacy_accountant_test.py."""
    events = (
        MixtureOfGaussians(1.0, 3, (0.0, 1.0, 2.0), (0.2, 0.6, 0.2)),
        MixtureOfGaussians(2.0, 2, (0.0, 2.0, 3.0), (0.33, 0.34, 0.33)),
    )
    assert epsilon(Ledger(events), 1e-6, fine=True).epsilon == pytest.approx(17.193115, rel=1e-6)


@pytest.mark.parametrize(("direction", "number"), [("remove", 3), ("add", 2), ("replace", 2)])
def test_random_ledgers_against_the_inversion(direction, number):
    """Of one to three kinds of steps: each bound holds, and a millionth less does not."""
    rng, told = np.random.default_rng(3), 0
    while told < number:
        events = [
            (float(10 ** rng.uniform(-2.5, -0.1)), float(rng.uniform(0.6, 6)), int(10 ** rng.uniform(1.7, 3.5)))
            for _ in range(rng.integers(1, 4))
        ]
        delta = float(10 ** rng.uniform(-10, -3))
        found = one_direction(events, direction, delta, finer=()).epsilon
        if found == 0 or found == one_direction(events, direction, delta).epsilon:
            continue  # too many points
        try:
            assert agreed_delta(found, events, direction) <= delta * (1 + 1e-9)
            assert agreed_delta(found * (1 - 1e-6), events, direction) > delta
        except Undecided:
            continue
        told += 1


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
@pytest.mark.parametrize("kind", [(0.1, 1.0, 3), (0.6, 1.2, 2), (0.02, 2.5, 30)])
def test_few_steps_against_rounded_losses(kind, direction):
    """Losses rounded down and up to a grid of their own enclose delta."""
    found = one_direction([kind], direction, 1e-6, finer=()).epsilon
    low, _ = delta_bracket(found, [kind], direction)
    _, high = delta_bracket(found * (1 - 1e-4), [kind], direction)
    assert low <= 1e-6 <= high


@pytest.mark.parametrize("factor", [0.3, 0.8, 4.0])
def test_no_aim_can_make_it_too_low(factor):
    """Parameters for another epsilon, another tilt, a shorter period and wider cells: above the truth all the same."""
    kinds, delta, truth = [(0.02, 1.0, 400)], 1e-6, epsilon_by_inversion([(0.02, 1.0, 400)], 1e-6)
    table, aim = aimed(kinds, "remove", delta, truth)
    for change in ("epsilon", "slope", "tilt", "period"):
        other = replace(aim, **{change: getattr(aim, change) * factor})
        assert lattice_epsilon(table, other, delta) >= truth * (1 - 1e-8), change
    assert lattice_epsilon(table, aim, delta) <= truth * (1 + 1e-6)


def test_steps_of_all_records_are_exact():
    """A Gaussian on the lattice is the closed form; many points are refused, and the other bound stays."""
    table, aim = aimed([(1.0, 3.0, 5)], "replace", 1e-6, 5.0)
    assert lattice_epsilon(table, aim, 1e-6) == pytest.approx(gaussian_epsilon(math.sqrt(5) / 3, 1e-6), rel=1e-6)
    many = Ledger((Event(1e-3, 1.0, 10**8),))
    assert epsilon(many, 1e-6, fine=True) == epsilon(many, 1e-6)


SPECIAL = {
    "Laplace": Laplace(0.3, 2.0, 8),
    "pure": Opaque(6, epsilon=0.3, delta=0.0),
    "with a delta": Opaque(6, epsilon=0.3, delta=1e-9),
    "cut batches": Capped(0.1, 2.0, 20, dataset_size=100, cap=12),
    "one release": Laplace(0.3, 2.0, 1),
}


@pytest.mark.parametrize("event", SPECIAL.values(), ids=SPECIAL)
def test_given_laws_cost_hardly_less(event):
    """Alone and beside Gaussian steps: never above the usual bound, which is at most 1e-3 too high."""
    for ledger in (Ledger((event,)), Ledger((event, Event(0.1, 2.0, 20)))):
        usual, finer = epsilon(ledger, 1e-5).epsilon, epsilon(ledger, 1e-5, fine=True).epsilon
        assert usual * (1 - 1e-3) <= finer <= usual


def test_pure_releases_are_those_of_randomised_response():
    """Binomial sums: n releases of epsilon each give delta(at) = sum over k of C(n, k) (p^k q^(n-k) - e^at ..)_+."""
    n, each, at = 6, 0.3, 1.1
    p = math.exp(each) / (1 + math.exp(each))
    terms = [
        math.comb(n, k) * max(0.0, p**k * (1 - p) ** (n - k) - math.exp(at) * p ** (n - k) * (1 - p) ** k)
        for k in range(n + 1)
    ]
    found = epsilon(Ledger((Opaque(n, epsilon=each, delta=0.0),)), sum(terms), fine=True).epsilon
    assert at * (1 - 1e-9) <= found <= at * (1 + 1e-5)
