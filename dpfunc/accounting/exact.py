"""Without sampling the composition is one Gaussian mechanism, whose guarantee has an exact form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from dpfunc.types import Event


def bisect(exceeds: Callable[[float], bool], low: float, high: float, relative: float) -> float:
    """The smallest value (to a relative precision, from above) at which `exceeds` turns false between low and high."""
    while high - low > relative * high:
        middle = 0.5 * (low + high)
        if exceeds(middle):
            low = middle
        else:
            high = middle
    return high


def combined_sigma(events: Iterable[Event]) -> float:
    """The noise multiplier of one release that says as much as all: `1 / sqrt(sum_i steps_i / sigma_i^2)`."""
    return 1 / math.sqrt(sum(event.num_steps / event.noise_multiplier**2 for event in events))


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """delta of the Gaussian mechanism: `Phi(1/2s - e s) - exp(e) Phi(-1/2s - e s)`.

    Balle & Wang 2018, Improving the Gaussian Mechanism for Differential Privacy, Theorem 8.
    """
    from scipy.special import log_ndtr

    first = float(log_ndtr(0.5 / sigma - epsilon * sigma))
    second = epsilon + float(log_ndtr(-0.5 / sigma - epsilon * sigma))
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def gaussian_epsilon(events: Iterable[Event], delta: float) -> float:
    """Exact epsilon (to 1e-9 relative, from above) of events without sampling."""
    sigma = combined_sigma(events)
    if gaussian_delta(sigma, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(sigma, high) > delta:
        high *= 2
    return bisect(lambda e: gaussian_delta(sigma, e) > delta, 0.0, high, 1e-9)
