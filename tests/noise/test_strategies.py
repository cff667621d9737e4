"""Strategies of correlated noise against dense matrices, searches over all participations, and published values.

Published values are those that another library computed in float64, for n = 512 steps, 64 steps
between participations and at most 8 of them; and of arXiv 2601.22334 for lambda-CGD.
"""

import itertools
import math

import numpy as np
import pytest
from scipy.special import binom

from dpfunc.errors import InvalidArgument
from dpfunc.noise import BISR, BLT, BSR, BandMF, LambdaCGD, optimal_bands, optimal_buffers, prefix_errors

STEPS, RUN = 512, (512, 64, 8)
DIGITS = 1e-6  # relative

STRATEGIES = {
    "BSR": BSR(),
    "BSR, 3 bands": BSR(3),
    "BISR, 1 band": BISR(1),
    "BISR, 3 bands": BISR(3),
    "BandMF, 1 band": BandMF((2.0,)),
    "BandMF, 3 bands": optimal_bands(9, 3),
    "BandMF, mixed signs": BandMF((1.0, -0.5, 0.7)),
    "BandMF, rising": BandMF((0.2, 0.5, 0.9, 0.1)),
    "BLT": BLT((0.3, 0.2), (0.9, 0.4)),
    "BLT, rising": BLT((1.5,), (0.9,)),
    "lambda-CGD": LambdaCGD(0.8),
    "lambda-CGD, independent": LambdaCGD(0.0),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def inverse_of(strategy, n):
    """C^-1 from its rows."""
    matrix = np.zeros((n, n))
    for step in range(n):
        row = strategy.row(n, step)
        matrix[step, step + 1 - len(row) : step + 1] = row[::-1]
    return matrix


def participations(n, separation, most):
    """All sets of steps in which a record may take part, of the largest size and of smaller ones."""
    for size in range(1, most + 1):
        for steps in itertools.combinations(range(n), size):
            if all(b - a >= separation for a, b in itertools.pairwise(steps)):
                yield list(steps)


def largest_move(matrix, separation, most, directions):
    """The largest norm of C u: of numbers of any sign, or with all products of columns counted as positive."""
    products = matrix.T @ matrix
    best = 0.0
    for steps in participations(len(matrix), separation, most):
        inner = products[np.ix_(steps, steps)]
        if directions == "all alike":
            best = max(best, np.abs(inner).sum())
        else:
            for signs in itertools.product((1, -1), repeat=len(steps)):
                best = max(best, np.array(signs) @ inner @ np.array(signs))
    return math.sqrt(best)


@every_strategy
@pytest.mark.parametrize(("separation", "most"), [(1, 1), (1, 3), (2, 2), (2, 9), (3, 2), (4, 9), (9, 9)])
def test_sensitivity_against_all_participations(strategy, separation, most):
    n = 9
    matrix = np.linalg.inv(inverse_of(strategy, n))
    found = strategy.sensitivity(n, separation, most)
    below = largest_move(matrix, separation, min(most, 5), "signs")
    assert found >= below * (1 - 1e-12)
    column = matrix[:, 0]
    falls = np.all(np.diff(column) <= 1e-12) and np.all(column >= -1e-12)
    if falls or most == 1 or (strategy.bands or n) <= separation or isinstance(strategy, LambdaCGD):
        exact = largest_move(matrix, separation, min(most, 5 if separation == 2 else 3), "all alike")
        assert found == pytest.approx(exact, rel=1e-12)


def test_sensitivity_is_not_exact_where_nothing_proves_it():
    """The bound for coefficients that rise is above the truth, and not by more than the larger matrix says."""
    matrix = np.linalg.inv(inverse_of(BandMF((0.2, 0.5, 0.9, 0.1)), 9))
    found = BandMF((0.2, 0.5, 0.9, 0.1)).sensitivity(9, 2, 2)
    assert largest_move(matrix, 2, 2, "all alike") < found
    assert found == pytest.approx(BandMF((0.9, 0.9, 0.9, 0.1)).sensitivity(9, 2, 2), rel=1e-12)


def test_sensitivity_of_lambda_cgd_in_a_long_run():
    """Powers of 10,000 steps are 0 in float64: their ratios are not."""
    short, long = (LambdaCGD(0.5).sensitivity(n, 50, 3) for n in (200, 100_000))
    assert long == pytest.approx(short, rel=1e-12)
    steps = np.arange(100) * 1000
    norms = np.sqrt(1 - 0.999 ** (2.0 * (100_000 - steps)))
    pairs = 0.999 ** np.abs(steps[:, None] - steps) * np.minimum.outer(norms, norms) / np.maximum.outer(norms, norms)
    assert LambdaCGD(0.999).sensitivity(100_000, 1000, 100) == pytest.approx(pairs.sum() ** 0.5, rel=1e-12)


@every_strategy
def test_bands_are_those_of_the_matrix(strategy):
    n = 9
    matrix = np.linalg.inv(inverse_of(strategy, n))
    used = max(i - j for i in range(n) for j in range(i + 1) if abs(matrix[i, j]) > 1e-12) + 1
    assert used == (n if strategy.bands is None else strategy.bands)


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES.values() if not isinstance(each, LambdaCGD)])
def test_columns_are_inverse_to_each_other(strategy):
    product = np.convolve(strategy.coefficients(12), strategy.inverse(12))[:12]
    assert product == pytest.approx(np.eye(12)[0], abs=1e-9)


@every_strategy
def test_buffers_release_what_the_rows_say(strategy):
    n = 9
    recursion = strategy.recursion(n)
    if recursion is None:
        assert isinstance(strategy, (BISR, LambdaCGD)) or strategy.bands is None
        return
    noise = np.random.default_rng(0).standard_normal(n)
    buffers = np.zeros(len(recursion.read))
    released = []
    for drawn in noise:
        released.append(recursion.scale * drawn + recursion.read @ buffers)
        buffers = recursion.keep @ buffers + recursion.write * released[-1]
    assert released == pytest.approx(inverse_of(strategy, n) @ noise, rel=1e-12, abs=1e-12)


@every_strategy
def test_errors_of_prefix_sums_against_matrices(strategy):
    n = 9
    sums = np.tril(np.ones((n, n))) @ inverse_of(strategy, n)
    assert prefix_errors(strategy, n) == pytest.approx((sums**2).sum(1), rel=1e-12)


SQUARE_ROOTS = {  # squared sensitivity, mean and largest squared error of prefix sums of noise of standard deviation 1
    "BSR": (BSR(), 55.62010971, 2.73517652, 3.05184086),
    "BSR, 32 bands": (BSR(32), 17.33580304, 7.82417416, 14.14609584),
}
INVERSE_ROOTS = {  # the roots of the errors, of noise in proportion to the sensitivity
    4: (12.97921974, 18.42158858, 25.75281942),
    32: (22.40769827, 9.97989609, 12.57418135),
}


def test_square_roots_have_their_published_values():
    assert BSR().coefficients(6) == pytest.approx([1, 0.5, 0.375, 0.3125, 0.2734375, 0.24609375], rel=1e-15)
    assert BSR().inverse(5) == pytest.approx([1, -0.5, -0.125, -0.0625, -0.0390625], rel=1e-15)
    for strategy, square, mean, largest in SQUARE_ROOTS.values():
        errors = prefix_errors(strategy, STEPS)
        found = strategy.sensitivity(*RUN) ** 2, errors.mean(), errors.max()
        assert found == pytest.approx((square, mean, largest), rel=DIGITS / 100)
    for bands, (square, mean, largest) in INVERSE_ROOTS.items():
        errors, sensitivity = prefix_errors(BISR(bands), STEPS), BISR(bands).sensitivity(*RUN)
        found = sensitivity**2, sensitivity * errors.mean() ** 0.5, sensitivity * errors.max() ** 0.5
        assert found == pytest.approx((square, mean, largest), rel=DIGITS / 100)


@pytest.mark.parametrize(("n", "largest"), [(16, 1.943879), (256, 2.831050), (1024, 3.272554), (10_000, 3.998010)])
def test_largest_error_of_the_square_root_factorisation(n, largest):
    found = prefix_errors(BSR(), n).max()
    assert found == pytest.approx(largest, rel=DIGITS)
    k = np.arange(min(n, 400))
    assert prefix_errors(BSR(), len(k)).max() == pytest.approx(((binom(2 * k, k) / 4.0**k) ** 2).sum(), rel=1e-12)


def test_lambda_cgd_has_its_published_values():
    """The scale of step t is the norm of a column of the matrix of decay^(i - j)."""
    for step, scale in ((0, 2.29415734), (50, 2.29412687)):
        row = LambdaCGD(0.9).row(100, step)
        assert row[0] == pytest.approx(scale, rel=DIGITS / 100)
        assert row[1:] == pytest.approx([-0.9 * scale][: min(step, 1)], rel=DIGITS / 100)
    columns = np.linalg.inv(inverse_of(LambdaCGD(0.9), 100))
    assert np.linalg.norm(columns, axis=0) == pytest.approx(np.ones(100), rel=1e-12)


def test_optimal_bands_have_their_published_values():
    """The squared error of one participation, and what eight cost: as much as eight releases."""
    for bands, mean, first in (
        (1, 256.5, (1.0,)),
        (8, 37.835631, (0.53624497, 0.39068602, 0.35212132)),
        (32, 14.820266, ()),
    ):
        found = optimal_bands(STEPS, bands)
        assert found.sensitivity(STEPS, STEPS, 1) ** 2 * prefix_errors(found, STEPS).mean() == pytest.approx(
            mean, rel=DIGITS / 10
        )
        assert found.weights[: len(first)] == pytest.approx(first, rel=DIGITS / 10)
        assert found.sensitivity(*RUN) ** 2 == pytest.approx(8, rel=DIGITS / 1e6)


PUBLISHED_BUFFERS = BLT((0.0122853238, 0.1878393665), (0.9999528892, 0.9857068667))


def test_published_buffers_have_their_published_error():
    n = 100_000
    found = PUBLISHED_BUFFERS.sensitivity(n, n, 1) ** 2 * prefix_errors(PUBLISHED_BUFFERS, n).max()
    assert found == pytest.approx(28.0555303, rel=DIGITS / 100)


@pytest.mark.slow
def test_optimal_buffers_have_their_published_values():
    found = optimal_buffers(100_000, 2)
    assert found.scales == pytest.approx(PUBLISHED_BUFFERS.scales, rel=DIGITS)
    assert found.decays == pytest.approx(PUBLISHED_BUFFERS.decays, rel=DIGITS / 100)


def error_of(strategy, n, kind, separation, most):
    errors = prefix_errors(strategy, n)
    return strategy.sensitivity(n, separation, most) ** 2 * (errors.mean() if kind == "mean" else errors.max())


@pytest.mark.parametrize("kind", ["mean", "largest"])
def test_optima_are_optima(kind):
    """Changes of the values in random directions make the error larger, by the square of their size."""
    n, separation, most = 60, 15, 4
    random = np.random.default_rng(1)
    bands, buffers = optimal_bands(n, 6, kind), optimal_buffers(n, 2, kind, separation, most)
    for size in (1e-3, 1e-2):
        for _ in range(20):
            moved = BandMF(tuple(np.array(bands.weights) + size * random.standard_normal(6)))
            assert error_of(moved, n, kind, n, 1) > error_of(bands, n, kind, n, 1)
            factors = np.exp(size * random.standard_normal(4))
            gaps = (1 - np.array(buffers.decays)) * factors[:2]
            other = BLT(tuple(np.array(buffers.scales) * factors[2:]), tuple(1 - gaps))
            assert error_of(other, n, kind, separation, most) > error_of(buffers, n, kind, separation, most)


def test_more_buffers_and_bands_have_less_error():
    """Up to that of the square root, which is nearly the best for one participation."""
    n = 1000
    of_buffers = [error_of(optimal_buffers(n, count), n, "largest", n, 1) for count in (1, 2, 4)]
    of_bands = [error_of(optimal_bands(n, count, "largest"), n, "largest", n, 1) for count in (1, 4, 64)]
    root = error_of(BSR(), n, "largest", n, 1)
    assert of_bands[0] == pytest.approx(n, rel=1e-12)
    assert of_bands[0] > of_bands[1] > of_bands[2] > root * 0.98
    assert of_buffers[0] > of_buffers[1] > of_buffers[2] > root * 0.98
    assert of_buffers[2] < 1.001 * root


def test_buffers_of_a_long_run_are_those_of_their_recursion():
    """Decays near 1: the column of the inverse agrees with the buffers, which have no polynomial to lose digits in."""
    strategy = BLT((0.005, 0.019, 0.089, 0.33), (0.99998672, 0.9996, 0.9916, 0.83))
    recursion, n = strategy.recursion(20_000), 20_000
    buffers, column = np.zeros(4), np.zeros(n)
    for step in range(n):
        column[step] = recursion.scale * (step == 0) + recursion.read @ buffers
        buffers = recursion.keep @ buffers + recursion.write * column[step]
    assert strategy.inverse(n) == pytest.approx(column, abs=1e-13)


def test_values_are_kept_and_nobody_can_write_them():
    assert BSR(8).inverse(50) is BSR(8).inverse(50)
    assert optimal_bands(50, 4) is optimal_bands(50, 4)
    with pytest.raises(ValueError, match="read-only"):
        BISR(4).coefficients(50)[0] = 2.0


REFUSED = {
    "bands of 0": (lambda: BSR(0), "bands"),
    "inverse bands of 0": (lambda: BISR(0), "bands"),
    "decay of 1": (lambda: LambdaCGD(1.0), "decay"),
    "negative decay": (lambda: LambdaCGD(-0.1), "decay"),
    "no weights": (lambda: BandMF(()), "weights"),
    "a list": (lambda: BandMF([1.0]), "weights"),
    "no inverse": (lambda: BandMF((0.0, 1.0)), "weights"),
    "infinite": (lambda: BandMF((1.0, math.inf)), "weights"),
    "as many decays": (lambda: BLT((0.5,), (0.5, 0.4)), "decays"),
    "a decay of 1": (lambda: BLT((0.5,), (1.0,)), "decays"),
    "a scale of 0": (lambda: BLT((0.0,), (0.5,)), "scales"),
    "no scales": (lambda: BLT((), ()), "scales"),
    "more bands than steps": (lambda: optimal_bands(4, 5), "bands"),
    "an unknown error": (lambda: optimal_bands(4, 2, "worst"), "error"),
    "no buffers": (lambda: optimal_buffers(10, 0), "buffers"),
    "many buffers": (lambda: optimal_buffers(10, 9), "buffers"),
    "one step": (lambda: optimal_buffers(1, 1), "num_steps"),
    "no separation": (lambda: BSR().sensitivity(5, 0, 1), "separation"),
    "no participation": (lambda: LambdaCGD(0.5).sensitivity(5, 1, 0), "participations"),
    "no steps": (lambda: prefix_errors(BSR(), 0), "num_steps"),
    "a step too late": (lambda: LambdaCGD(0.5).row(5, 5), "step"),
    "a step of a Toeplitz matrix too late": (lambda: BSR().row(5, 5), "step"),
}


@pytest.mark.parametrize(("made", "name"), REFUSED.values(), ids=REFUSED)
def test_arguments_outside_their_domain(made, name):
    with pytest.raises(InvalidArgument, match=name):
        made()


def test_lists_are_refused_by_name():
    """Arguments are checked before the cache looks them up."""
    for made, name in (
        (lambda: optimal_bands([4], 2), "num_steps"),
        (lambda: optimal_bands(4, [2]), "bands"),
        (lambda: optimal_bands(4, 2, ["mean"]), "error"),
        (lambda: optimal_buffers([10], 1), "num_steps"),
        (lambda: optimal_buffers(10, 1, ["mean"]), "error"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            made()
