"""The Renyi curve of one step by quadrature: for orders and neighbours that opacus has no fast series for."""

from __future__ import annotations

import numpy as np

from dpfunc.accounting.losses import Array, log_ratio

_MAX_POINTS = 200_000
_REACH = 14.0  # standard deviations; the mass beyond is below 1e-43


def quadrature_curve(q: float, sigma: float, orders: Array, replace_one: bool) -> Array:
    """`log E_Q[(P/Q)^a] / (a - 1)` at each order a > 1, rounded up; NaN where it would take too many points.

    Remove one record: P = (1-q) N(0, s^2) + q N(1, s^2) against Q = N(0, s^2); to add one costs no more (Mironov,
    Talwar and Zhang 2019, Theorem 5). Replace one: P, Q = (1-q) N(0, s^2) + q N(+-1/2, s^2), which is symmetric.
    The integrand is analytic in a strip around the real line, so the trapezoidal rule converges geometrically:
    Trefethen and Weideman 2014, The Exponentially Convergent Trapezoidal Rule, Theorem 5.1.
    """
    from scipy.special import logsumexp

    step = min(sigma / 10, sigma * sigma / 2)  # the nearest singularity is at least pi s^2 off the line
    curve = np.full(len(orders), np.nan)
    for i, a in enumerate(orders):
        low, high = -0.5 - _REACH * sigma, a + _REACH * sigma  # P^a Q^(1-a) is a sum of bumps between -1/2 and a
        if (high - low) / step > _MAX_POINTS:
            continue
        x = np.arange(low, high, step)
        log_q = -((x / sigma) ** 2) / 2 - np.log(sigma * np.sqrt(2 * np.pi) / step)
        if replace_one:
            ahead, behind = log_ratio(q, (x - 0.25) / 2 / sigma**2), log_ratio(q, (-x - 0.25) / 2 / sigma**2)
            log_terms = log_q + a * ahead - (a - 1) * behind
        else:
            log_terms = log_q + a * log_ratio(q, (x - 0.5) / sigma**2)
        curve[i] = max(0.0, float(logsumexp(log_terms))) / (a - 1) * (1 + 1e-12)
    return curve
