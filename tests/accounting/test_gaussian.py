"""The closed form of full batches: never below the truth in 60 digits, and close to it."""

import mpmath
import pytest

from dpfunc.accounting._gaussian import gaussian_delta, gaussian_epsilon


def log_delta(epsilon, mu):
    return mpmath.log(mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("mu", [3.7 * 10.0**power for power in (*range(-14, 2), 5, 6, 9, 20)])
@pytest.mark.parametrize("share", [0.1, 1e-3, 1e-15, 1e-100])
def test_epsilon_is_never_below_the_truth(mu, share):
    """With little mu, and with large epsilon, float64 loses the digits in which both terms of delta differ."""
    delta = min(share * mu, share)
    epsilon = gaussian_epsilon(mu, delta)
    with mpmath.workdps(60):
        mean, target = mpmath.mpf(mu), mpmath.log(mpmath.mpf(delta))
        assert log_delta(mpmath.mpf(epsilon), mean) <= target
        if mu >= 1e-9:  # and not far above it
            less = mpmath.mpf(epsilon) * (1 - (2e-9 if mu < 1e6 else 1e-5) - 2e-14 / mean)
            assert log_delta(less, mean) > target


@pytest.mark.parametrize("mu", [3.7e5, 3.7e6, 3.7e9, 3.7e20])
@pytest.mark.parametrize("z", [-3.0, 0.0, 3.0])
def test_delta_of_hardly_any_noise_is_never_below_the_truth(mu, z):
    epsilon = mu * (mu / 2 - z)
    delta = gaussian_delta(epsilon, mu)
    with mpmath.workdps(60):
        assert mpmath.log(delta) >= log_delta(mpmath.mpf(epsilon), mpmath.mpf(mu))
    assert gaussian_delta(1.0, mu) == 1.0
