"""The Gaussian mechanism, exactly; and the central-limit approximation that must not be mistaken for it.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import math

from dpfunc.accounting._search import falling_root
from dpfunc.types import Event

_ROUND_UP = 1e-9  # the root finder and log_ndtr are good to about 1e-12
_LEAST = 1e-12  # below, no digit of delta is left, and epsilon is the tail bound
_LARGE = 1e6  # above, epsilon loses digits that the smaller part of delta needs
_CANCELS = 1e-14  # with little mu, what both logarithms have in common is lost: up to this over mu


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon >= 0 of a Gaussian mechanism with sensitivity / standard deviation `mu`, at any delta >= 0.

    Solves `delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)`: Balle and Wang 2018, Improving the
    Gaussian Mechanism for Differential Privacy, Theorem 8; in logarithms. k releases compose to `mu^2 = sum_i mu_i^2`.
    """
    if delta == 0.0 and mu > 0:
        return math.inf
    if mu == 0.0 or math.erf(mu / 8**0.5) <= delta:  # the total variation distance
        return 0.0
    if not mu < 1e100:
        return math.inf
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # the tail bound; delta(high) < delta
    if not _LEAST <= mu <= _LARGE:
        return high * (1 + _ROUND_UP)
    target = math.log(delta)
    # below e^-1e6 of delta only the sign counts
    root = falling_root(lambda epsilon: max(_log_delta(epsilon, mu) - target, -1e6), 0.0, high, rtol=1e-13)
    return min(root * (1.0 + _ROUND_UP + _CANCELS / mu), high)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The delta of the Gaussian mechanism at `epsilon` >= 0, rounded up; see `gaussian_epsilon`."""
    if not mu < 1e100:
        return 1.0
    if mu < _LEAST:
        return math.erf(mu / 8**0.5)
    log_delta = _log_delta(epsilon, mu)
    if log_delta == -math.inf:
        return 0.0
    return min(1.0, math.exp(log_delta) * (1 + _ROUND_UP + _CANCELS / mu * max(1.0, -log_delta)))


def gaussian_true_positives(false_positives: float, mu: float) -> float:
    """The most true positives of a test with this share of false ones, rounded up."""
    from scipy.special import ndtr, ndtri

    return min(1.0, float(ndtr(ndtri(false_positives) + mu)) * (1 + _ROUND_UP))


def _log_delta(epsilon: float, mu: float) -> float:
    from scipy.special import log_ndtr

    if mu > _LARGE:
        return float(log_ndtr(mu / 2 * (1 + 1e-15) - epsilon / mu))  # without what is subtracted, which is not known
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    ratio = -math.expm1(second - first)
    return first + math.log(ratio) if ratio > 0 else -math.inf


def gaussian_mu(events: tuple[Event, ...]) -> float:
    """`sqrt(sum T / sigma^2)` of events in which all records take part."""
    return (
        math.inf
        if any(event.noise_multiplier == 0 for event in events)
        else math.hypot(*(as_float(event.num_steps) ** 0.5 / event.noise_multiplier for event in events))
    )


def gdp_mu(events: tuple[Event, ...]) -> float:
    """`sqrt(sum q^2 T (e^(1/sigma^2) - 1))`, the central limit of Bu et al. 2020, Corollary 5.4. Not a bound."""
    if any(event.noise_multiplier < 0.04 for event in events):  # e^(1/sigma^2) is beyond float64
        return math.inf
    return math.hypot(
        *(
            e.sampling_prob * math.sqrt(math.expm1(e.noise_multiplier**-2.0)) * as_float(e.num_steps) ** 0.5
            for e in events
        )
    )


def as_float(number: int) -> float:
    """An integer as a float, rounded; inf where it does not fit."""
    return float(number) if number < 2**1000 else math.inf
