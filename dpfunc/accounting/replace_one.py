"""The Renyi curve of replacing one record under Poisson sampling, by quadrature."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MAX_POINTS = 200_000  # beyond it the convexity bound is used


def replace_one_curve(q: float, sigma: float, orders: Array) -> Array:
    """`log E_Q[(P/Q)^a] / (a - 1)` for P, Q = (1-q) N(0, s^2) + q N(+-1/2, s^2): NaN where it is too costly.

    Both directions are the same by symmetry. The integrand is analytic in a strip around the real line, so the
    trapezoidal rule converges geometrically: Trefethen and Weideman 2014, The Exponentially Convergent Trapezoidal
    Rule, Theorem 5.1.
    """
    from scipy.special import logsumexp

    step = min(sigma / 10, sigma * sigma / 2)  # the nearest singularity is 2 pi s^2 off the line
    curve = np.full(len(orders), np.nan)
    for i, a in enumerate(orders):
        # P^a Q^(1-a) is a mixture-like bump between -1/2 and a - 1/2
        low, high = -0.5 - 14 * sigma, max(a, 1.0) + 14 * sigma
        if (high - low) / step > MAX_POINTS:
            continue
        x = np.arange(low, high, step)
        common = -((x / sigma) ** 2) / 2 - np.log(sigma * np.sqrt(2 * np.pi))
        log_p = common + mixture(q, (x - 0.25) / 2 / sigma**2)
        log_q = common + mixture(q, (-x - 0.25) / 2 / sigma**2)
        total = logsumexp(a * log_p - (a - 1) * log_q) + np.log(step)
        curve[i] = max(0.0, float(total)) / (a - 1) * (1 + 1e-9) + 1e-12 / (a - 1)
    return curve


def mixture(q: float, exponent: Array) -> Array:
    """`log(1 - q + q e^exponent)`."""
    return np.asarray(np.logaddexp(np.log1p(-q), np.log(q) + exponent))
