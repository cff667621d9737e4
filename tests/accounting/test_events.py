"""Kinds of events beside plain ones: never below exact computations of small cases, hardly above them, and monotone."""

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpfunc.accounting import (
    ZCDP,
    Allocated,
    Capped,
    DiscreteLaplace,
    Laplace,
    Ledger,
    MixtureOfGaussians,
    Opaque,
    TradeOff,
    delta_at,
    epsilon,
)
from dpfunc.accounting._losses import DIRECTIONS
from dpfunc.accounting._rdp import rdp_epsilon
from dpfunc.accounting.events import law_of
from dpfunc.errors import InvalidArgument
from dpfunc.types import ADJACENCIES, Event

WIDTH = 5e-3
GRID = np.arange(-11.0, 11.0, WIDTH)  # outputs of one step with noise of standard deviation 1
EPSILONS = (0.0, 0.3, 1.0, 2.0, 4.0, 6.0)


def hockey_stick(p, q, at):
    return float(np.sum(np.maximum(p - math.exp(at) * q, 0.0)) * WIDTH)


def of_one_step(event, adjacency, at):
    """delta of one step, the larger of both orders, from the law that accountants compose."""
    found = []
    for direction in DIRECTIONS[adjacency]:
        law = law_of(event, direction)
        found.append(float(law.mass @ np.maximum(-np.expm1(at - law.loss), 0.0)) + float(law.infinite))
    return max(found)


def density(sums, weights, sigma=1.0):
    return sum(w * stats.norm.pdf(GRID, s, sigma) for s, w in zip(sums, weights, strict=True))


def batches(n, q, cap):
    """Each batch of a Poisson sample that is cut to `cap`, with its probability."""
    for size in range(n + 1):
        for drawn in itertools.combinations(range(n), size):
            chance = q**size * (1 - q) ** (n - size)
            kept = list(itertools.combinations(drawn, min(size, cap)))
            for batch in kept:
                yield batch, chance / len(kept)


def output(values, q, cap):
    """The density of one step on records whose clipped gradients are these numbers."""
    chances = Counter()
    for batch, chance in batches(len(values), q, cap):
        chances[sum(values[i] for i in batch)] += chance
    return density(chances.keys(), chances.values())


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one", "add_remove"])
@pytest.mark.parametrize(
    ("n", "q", "cap"), [(4, 0.5, 2), (3, 0.5, 2), (4, 0.2, 1), (4, 1.0, 2), (5, 1.0, 1), (3, 1.0, 2)]
)
def test_cut_batches_against_enumeration(n, q, cap, adjacency):
    """All neighbours with gradients of -1, 0 and 1 for one record, and of two values for the others; both orders."""
    if adjacency == "add_remove" and q == 1:
        with pytest.raises(InvalidArgument, match="zero_out or replace_one for Capped"):
            Ledger((Capped(q, 1.0, 1, n, cap),), adjacency)
        return
    sensitivity = 2.0 if adjacency == "replace_one" else 1.0
    ledger = Ledger((Capped(q, 1 / sensitivity, 1, n, cap),), adjacency)
    worst = dict.fromkeys(EPSILONS, 0.0)
    for own, other in itertools.product((-1.0, 0.0, 1.0), repeat=2):
        for high in range(n):
            others = [1.0] * high + [-1.0] * (n - 1 - high)
            p = output([own, *others], q, cap)
            changed = {"replace_one": [other, *others], "zero_out": [0.0, *others], "add_remove": others}[adjacency]
            r = output(changed, q, cap)
            for at in EPSILONS:
                worst[at] = max(worst[at], hockey_stick(p, r, at), hockey_stick(r, p, at))
    for at in EPSILONS:
        bound = of_one_step(ledger.events[0], adjacency, at)
        assert worst[at] <= bound * (1 + 1e-6) + 1e-9, at
        if q == 1 and adjacency != "add_remove":  # the pair is the worst one, in zero-out up to the other order
            assert bound <= worst[at] * (1.35 if adjacency == "zero_out" else 1.001) + 1e-7, at


def losses(p, q):
    keep = (p > 1e-30) & (q > 1e-30)
    return np.log(p[keep] / q[keep]), p[keep] * WIDTH


def two_steps(first, second, at):
    """delta of two independent steps, each a pair (P, Q), by a sum over both outputs (coarse)."""
    (one, mass), (two, weight) = (losses(*pair) for pair in (first, second))
    total = one[::10, None] + two[None, ::10]
    return float(np.sum(np.maximum(1 - np.exp(at - total), 0.0) * (10 * mass[::10, None]) * (10 * weight[None, ::10])))


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_batches_without_replacement_compose(adjacency):
    """Two steps of the worst pairs of one step, each combined with each: a bound of one step is not enough for that."""
    n, cap = 4, 1
    records = {"zero_out": ([1.0, 0.0], 1.0), "replace_one": ([1.0, -1.0], 2.0)}[adjacency]
    ledger = Ledger((Capped(1.0, 1 / records[1], 2, n, cap),), adjacency)
    pairs = [tuple(output([own, *[other] * (n - 1)], 1.0, cap) for own in records[0]) for other in (-1.0, 0.0, 1.0)]
    pairs += [(q, p) for p, q in pairs]
    for at in (0.1, 1.0):
        mixed = itertools.combinations_with_replacement(pairs, 2)
        assert max(two_steps(first, second, at) for first, second in mixed) <= delta_at(ledger, at) * (1 + 1e-4)


def test_figures_of_the_field():
    """dp-accounting 0.6 gives 17.904330 for these five cut batches, add/remove and zero-out; 4.84 and 1.828 for plans."""
    few = (Capped(0.5, 1.0, 3, 4, 2), Capped(0.5, 1.0, 2, 3, 2))
    for adjacency in ("add_remove", "zero_out"):
        assert epsilon(Ledger(few, adjacency), 1e-6).epsilon == pytest.approx(17.904330, abs=4e-4)
    for cap, published in ((550, 4.836), (600, 1.838), (650, 1.8283)):
        found = epsilon(Ledger((Capped(0.01, 1.0, 1000, 50_000, cap),), "zero_out"), 1e-5).epsilon
        assert found == pytest.approx(published, abs=1e-3)


def laplace_delta(q, scale, ahead, behind, at):
    """delta of two mixtures of Laplace densities, by a sum over outputs."""
    x = np.arange(-15.0, 15.0, 1e-3) + 5e-4
    p, r = ((1 - q) * stats.laplace.pdf(x, 0, scale) + q * stats.laplace.pdf(x, m, scale) for m in (ahead, behind))
    return float(np.sum(np.maximum(p - math.exp(at) * r, 0.0)) * 1e-3)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("q", "scale"), [(1.0, 1.0), (0.3, 0.7), (0.01, 0.4)])
def test_laplace_against_integration(q, scale, adjacency):
    """A replaced record moves a count from 1 to 0, which is also the count without it: it is no half of the distance."""
    ledger = Ledger((Laplace(q, scale, 1),), adjacency)
    means = {"add_remove": [(1.0, 0.0)], "replace_one": [(1.0, 0.0), (0.5, -0.5)]}[adjacency]
    for at in (0.0, 0.2, 0.8):
        truth = max(laplace_delta(q, scale, *pair, at) for own in means for pair in (own, own[::-1]))
        found = of_one_step(ledger.events[0], adjacency, at)
        assert truth * (1 - 1e-5) - 1e-9 <= found <= truth * (1 + 1e-3) + 1e-7
    worst = math.log1p(q * math.expm1(1 / scale))
    assert worst * (1 - 1e-4) <= epsilon(ledger, 1e-12).epsilon <= worst * (1 + 1e-4)


def composed(eps, lost, steps, at):
    """delta of (eps, lost)-private releases: Kairouz, Oh and Viswanath 2015, Theorem 3.3, as a sum over outcomes."""
    share = 1 / (1 + math.exp(-eps))
    total = sum(
        math.comb(steps, k) * share**k * (1 - share) ** (steps - k) * max(0.0, 1 - math.exp(at - (2 * k - steps) * eps))
        for k in range(steps + 1)
    )
    return 1 - (1 - lost) ** steps * (1 - total)


@pytest.mark.parametrize(("eps", "lost", "steps"), [(0.1, 0.0, 30), (1.0, 1e-6, 5), (0.02, 1e-8, 400)])
def test_opaque_releases_compose_as_randomized_response(eps, lost, steps):
    ledger = Ledger((Opaque(steps, epsilon=eps, delta=lost),))
    for at in (1e-3, 1e-4):
        found = epsilon(ledger, at).epsilon
        assert composed(eps, lost, steps, found) <= at <= composed(eps, lost, steps, found * (1 - 2e-4) - 1e-9) * 1.001
    assert epsilon(Ledger((Opaque(1, epsilon=3.0, delta=1e-6),)), 1e-7).epsilon == math.inf
    assert epsilon(Ledger((Opaque(1, epsilon=3.0, delta=0.0),)), 1e-9).epsilon <= 3.0 * (1 + 1e-4)


def test_zcdp_is_the_renyi_bound_of_a_gaussian():
    """A Gaussian release with sigma = 3 is 1/18-zCDP; rho adds up; no tight method may say less than Renyi's."""
    gaussian, stated = Ledger((Event(1.0, 3.0, 4),)), Ledger((ZCDP(4, rho=1 / 18),))
    for at in (1e-3, 1e-8):
        assert epsilon(stated, at).epsilon == pytest.approx(epsilon(gaussian, at, "rdp").epsilon, rel=1e-9)
    assert epsilon(stated, 1e-5).method == "rdp"
    for method in ("tilted", "prv", "gaussian", "gdp-approximation"):
        with pytest.raises(InvalidArgument, match="'rdp'|'auto'"):
            epsilon(stated, 1e-5, method)


SPECIAL = st.one_of(
    st.builds(Capped, st.floats(0.05, 0.9), st.floats(0.7, 3.0), st.just(1), st.just(50), st.integers(2, 60)),
    st.builds(Laplace, st.floats(0.1, 1.0), st.floats(0.5, 3.0), st.just(1)),
    st.builds(Opaque, st.just(1), epsilon=st.floats(0.01, 1.0), delta=st.sampled_from([0.0, 1e-9])),
    st.builds(ZCDP, st.just(1), rho=st.floats(0.001, 0.5)),
    st.builds(Allocated, st.sampled_from([0.8, 1.5]), st.just(1), num_batches=st.sampled_from([3, 20])),
)


@given(first=SPECIAL, second=SPECIAL, steps=st.integers(2, 20))
@settings(max_examples=12, deadline=None)
def test_more_costs_more(first, second, steps):
    """A composition costs at least its parts, and at most the sum of pure parts; n steps at least one; JSON is exact."""
    many = Ledger((first,) * steps, "zero_out")
    assert many.events[0].num_steps == steps
    one, other = Ledger((first,), "zero_out"), Ledger((second,), "zero_out")
    both = one.compose(other)
    costs = [each.epsilon(1e-5).epsilon for each in (one, other, both, many)]
    slack = 1 - 2e-4 if not any(isinstance(each, ZCDP) for each in (first, second)) else 1 - 0.7
    assert max(costs[:2]) * slack <= costs[2] + 1e-6
    assert costs[0] * (1 - 2e-4) <= costs[3] + 1e-6
    assert Ledger.from_json(both.to_json()) == both
    assert costs[2] <= both.epsilon(1e-5, "rdp").epsilon * (1 + 1e-9)


def test_stated_deltas_compose():
    """Independent failures multiply: 1 - .9 * .8, and 1 - .999^10; exact ends, in every way to ask."""
    two = Ledger((Opaque(1, epsilon=1.0, delta=0.1), Opaque(1, epsilon=2.0, delta=0.2)))
    assert delta_at(two, 3.0) == pytest.approx(0.28, rel=1e-12)
    for method in ("auto", "tilted", "rdp"):
        assert epsilon(two, 0.28, method).epsilon == 3.0
        assert epsilon(two, 0.2799999, method).epsilon == math.inf
    truth = 0.91938870259  # of two randomised responses, as a sum over outcomes
    assert truth <= TradeOff(two).true_positives(0.1) <= truth * (1 + 2e-6)
    lost = Ledger((Opaque(10, epsilon=0.0, delta=0.001),))
    assert delta_at(lost, 0.0) == pytest.approx(1 - 0.999**10, rel=1e-12)
    assert epsilon(lost, 0.00996).epsilon == 0.0
    assert epsilon(lost, 0.00995).epsilon == math.inf


@pytest.mark.parametrize("steps", [1, 3])
def test_pure_releases_end_at_their_epsilon(steps):
    for event, largest in ((Opaque(steps, epsilon=1.0, delta=0.0), 1.0), (Laplace(1.0, 0.5, steps), 2.0)):
        ledger = Ledger((event,))
        assert delta_at(ledger, steps * largest) == 0
        assert delta_at(ledger, 0.99 * steps * largest) > 1e-9
        assert epsilon(ledger, 1e-300).epsilon <= steps * largest


def test_a_tiny_delta_of_one_release_is_not_lost_in_rounding():
    """Two sums of masses that differ by 1e-20 are equal in float64: epsilon was half of what it is, or an IndexError."""
    for loss in np.linspace(0.5, 20.0, 40).tolist():
        sampled = math.log1p(0.3 * math.expm1(loss))
        for event, largest in (
            (Laplace(1.0, 1 / loss, 1), loss), (Laplace(0.3, 1 / loss, 1), sampled),
            (DiscreteLaplace(1.0, 1 / loss, 1, sensitivity=5), loss),
        ):  # fmt: skip
            for delta in (1e-17, 1e-20, 1e-300):
                assert largest * (1 - 1e-9) <= epsilon(Ledger((event,)), delta).epsilon <= largest * (1 + 1e-9)
    nothing = MixtureOfGaussians(1.0, 1, distances=(0.0,), probs=(1.0,))
    assert epsilon(Ledger((nothing,)), 1e-9).epsilon == 0.0


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of the absurd scale
def test_a_cost_that_is_no_number_is_none_below_the_truth():
    """`max(0.0, nan)` is 0.0, and a tiny Renyi curve of a sample was rounded to 0: both said that nothing was spent."""
    for method in ("auto", "rdp"):
        assert epsilon(Ledger((Laplace(1.0, 1e-306, 1),)), 1e-5, method).epsilon >= 1e305
    whole = epsilon(Ledger((ZCDP(10**16, rho=1e-18),)), 1e-5).epsilon
    found = [epsilon(Ledger((ZCDP(10**16, rho=1e-18, sampling_prob=q),)), 1e-5).epsilon for q in (0.3, 0.45, 0.6, 0.9)]
    assert found == sorted(found)
    assert 0.5 * whole < found[0] < found[-1] < whole
    assert epsilon(Ledger((ZCDP(10**400, rho=1e-20, sampling_prob=0.5),)), 1e-5).epsilon == math.inf
    lost = Event(0.5, 1e9, 10**9)  # costs little, and more than nothing
    assert rdp_epsilon((lost,), "add_remove", 1e-5, (2.0,)) > -math.log(2) + math.log(1e5) - math.log(2)


@pytest.mark.parametrize("scale", [0.05, 0.03, 0.01, 1e-3])
def test_little_laplace_noise(scale):
    """It was refused: e^(1/scale) in float64 lost the masses. Exact: `1 - e^((epsilon - 1/scale) / 2)` of a release."""
    for adjacency in ("add_remove", "replace_one"):
        ledger = Ledger((Laplace(1.0, scale, 1),), adjacency)
        truth = 1 / scale + 2 * math.log1p(-1e-6)
        for method in ("auto", "tilted", "rdp"):
            assert truth - 1e-9 <= epsilon(ledger, 1e-6, method).epsilon <= 1 / scale
    sampled = epsilon(Ledger((Laplace(0.3, scale, 1),)), 1e-6).epsilon
    assert math.log1p(0.3 * math.expm1(min(1 / scale, 700.0))) - 1e-4 <= sampled <= 1 / scale


def test_limits_of_each_kind():
    """All records without replacement are one release; a replaced record of an epoch has no amplification."""
    for adjacency in ("zero_out", "replace_one"):
        part, whole = (Ledger((Capped(1.0, 1.0, 20, 1000, cap),), adjacency).epsilon(1e-5) for cap in (500, 1000))
        assert part.epsilon < whole.epsilon == Ledger((Event(1.0, 1.0, 20),), adjacency).epsilon(1e-5).epsilon
    for adjacency, cap in itertools.product(ADJACENCIES, (1000, 2000)):  # no batch is ever cut
        for q in (1.0, 0.3):
            found = Ledger((Capped(q, 1.0, 20, 1000, cap),), adjacency).epsilon(1e-5)
            assert found == Ledger((Event(q, 1.0, 20),), adjacency).epsilon(1e-5)
    epoch, plain = (Ledger((e,), "replace_one") for e in (Allocated(1.0, 3, num_batches=50), Event(1.0, 1.0, 3)))
    assert epoch.epsilon(1e-5).epsilon == pytest.approx(plain.epsilon(1e-5).epsilon, rel=1e-4)


def test_no_noise_is_no_protection():
    capped = (Capped(q, 0.0, 1, 10, 3) for q in (0.5, 1.0))
    for event in (*capped, Laplace(0.5, 0.0, 1), Allocated(0.0, 1, num_batches=3)):
        assert Ledger((event,), "zero_out").epsilon(1e-5).epsilon == math.inf
        assert delta_at(Ledger((event,), "zero_out"), 3.0) == 1.0


def test_what_a_file_says_of_a_kind_must_be_true():
    """Fields that a kind sets by itself are in the file, so that all events have a noise multiplier; no other value."""
    from dpfunc.accounting.ledger import from_values, to_values

    values = to_values(Opaque(3, epsilon=0.5, delta=1e-8))
    assert from_values(json.loads(json.dumps(values))) == Opaque(3, epsilon=0.5, delta=1e-8)
    for name, value in (("noise_multiplier", 5.0), ("sampling_prob", 0.1)):
        with pytest.raises(InvalidArgument, match=name):
            from_values({**values, name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: Opaque(1, epsilon=-1.0, delta=0.0), "epsilon"), (lambda: Opaque(1, epsilon=1.0, delta=1.0), "delta < 1"),
     (lambda: ZCDP(1, rho=0.0), "rho"), (lambda: Capped(0.5, 1.0, 1, 0, 1), "dataset_size >= 1"),
     (lambda: Capped(0.5, 1.0, 1, 1, 0), "cap >= 1"), (lambda: Laplace(1.5, 1.0, 1), "sampling_prob"),
     (lambda: Allocated(1.0, 1, num_batches=0), "num_batches >= 1")],
)  # fmt: skip
def test_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_special_events_beside_plain_ones():
    """A census of Laplace noise after DP-SGD; the mixed ledger costs more than training, less than the sum."""
    training, census = Event(0.01, 1.0, 1000), Laplace(1.0, 10.0, 1)
    parts = [Ledger((each,)).epsilon(1e-5).epsilon for each in (training, census)]
    found = Ledger((training, census)).epsilon(1e-5)
    assert parts[0] < found.epsilon < sum(parts)
    assert found.method == "tilted"
