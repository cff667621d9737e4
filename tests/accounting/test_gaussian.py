"""The closed form of full batches: never below the truth in 60 digits, and close to it."""

import mpmath
import pytest

from dpfunc.accounting._gaussian import gaussian_epsilon


def log_delta(epsilon, mu):
    return mpmath.log(mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("mu", [3.7 * 10.0**power for power in range(-14, 2)])
@pytest.mark.parametrize("share", [0.1, 1e-3, 1e-15, 1e-100])
def test_epsilon_is_never_below_the_truth(mu, share):
    """With little mu, float64 loses the digits in which both terms of delta differ: that is rounded up."""
    delta = min(share * mu, share)
    epsilon = gaussian_epsilon(mu, delta)
    with mpmath.workdps(60):
        mean, target = mpmath.mpf(mu), mpmath.log(mpmath.mpf(delta))
        assert log_delta(mpmath.mpf(epsilon), mean) <= target
        if mu >= 1e-9:  # and not far above it
            less = mpmath.mpf(epsilon) * (1 - 2e-9 - 2e-14 / mean)
            assert log_delta(less, mean) > target
