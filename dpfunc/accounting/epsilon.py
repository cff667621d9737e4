"""epsilon of a ledger: which accountant answers, and why."""

from __future__ import annotations

import math
from functools import lru_cache

from dpfunc.accounting.exact import gaussian_epsilon
from dpfunc.accounting.guarantee import Guarantee
from dpfunc.accounting.ledger import Ledger
from dpfunc.accounting.pld import replace_one_epsilon
from dpfunc.accounting.prv import NotApplicable, prv_epsilon
from dpfunc.accounting.rdp import rdp_epsilon
from dpfunc.checks import one_of, open_unit
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event

METHODS = ("auto", "prv", "rdp", "gdp-approximation")


def epsilon(ledger: Ledger, delta: float, method: str = "auto") -> Guarantee:
    """The epsilon that a ledger has spent at a delta: an upper bound.

    Args:
        ledger: what was released.
        delta: 0 < delta < 1.
        method: `auto` is the smaller of the valid bounds and says which. `prv`: numerical composition, within 0.01,
            for delta >= 1e-9 (`pld`, our own, for replace-one neighbours). `rdp`: Renyi, valid for any delta and
            looser, by up to several times for few steps. Without sampling both give way to the exact Gaussian formula.
            `gdp-approximation`: the central limit of Gaussian DP, which UNDER-reports by up to 550 times; never a
            budget, only to compare with papers that used it.

    Returns:
        A `Guarantee`; its note says why another method did not answer. An empty ledger has epsilon 0; noise multiplier
        0 has epsilon infinity.

    Raises:
        InvalidArgument: delta outside (0, 1), an unknown method, or `prv` where it cannot answer.

    Guarantees:
        never below the truth (tests/accounting/test_reference.py); monotone (tests/accounting/test_epsilon.py).

    >>> print(epsilon(Ledger((Event(1.0, 5.0, 10),)), delta=1e-5))
    epsilon = 2.594 at delta = 1e-05 (gaussian, add_remove; exact, no sampling)
    """
    if not isinstance(ledger, Ledger):
        raise InvalidArgument(f"Expected a Ledger, got {type(ledger).__name__}.")
    return _epsilon(ledger, open_unit("delta", delta), one_of("method", method, METHODS))


@lru_cache(maxsize=4096)
def _epsilon(ledger: Ledger, delta: float, method: str) -> Guarantee:
    def answer(value: float, by: str, note: str = "") -> Guarantee:
        return Guarantee(value, delta, by, ledger.adjacency, note)

    events = ledger.events
    if not events:
        return answer(0.0, method, "nothing was released")
    if any(event.noise_multiplier == 0 for event in events):
        return answer(math.inf, method, "a release without noise")
    if method == "gdp-approximation":
        return answer(_gdp(ledger, delta), method, "NOT a bound: it under-reports by up to 550 times")
    if all(event.sampling_prob == 1 for event in events):
        return answer(gaussian_epsilon(events, delta), "gaussian", "exact, no sampling")
    if ledger.adjacency == "replace_one":
        return _replace_one(ledger, delta, method)
    rdp = answer(rdp_epsilon(events, delta), "rdp")
    if method == "rdp":
        return rdp
    try:
        prv = answer(prv_epsilon(events, delta), "prv")
    except NotApplicable as reason:
        if method == "prv":
            raise InvalidArgument(f'Expected a ledger that PRV can compose: {reason}. Use method="rdp".') from reason
        return answer(rdp.epsilon, "rdp", f"{reason}")
    return prv if method == "prv" or prv.epsilon <= rdp.epsilon else rdp


def _replace_one(ledger: Ledger, delta: float, method: str) -> Guarantee:
    """Replacing a record is removing one and adding another, so group privacy of two gives a bound for any delta."""
    halved = tuple(Event(e.sampling_prob, 2 * e.noise_multiplier, e.num_steps) for e in ledger.events)
    two_moves, exponent = _two_moves(halved, delta)
    rdp = Guarantee(two_moves, delta, "rdp", "replace_one", f"group privacy of two, from delta = {exponent:.2g}")
    if method == "rdp":
        return rdp
    try:
        value = replace_one_epsilon(ledger.events, delta, rdp.epsilon)
    except NotApplicable as reason:
        if method == "prv":
            raise InvalidArgument(f'Expected a ledger that can be composed: {reason}. Use method="rdp".') from reason
        return Guarantee(rdp.epsilon, delta, "rdp", "replace_one", f"{reason}; {rdp.note}")
    pld = Guarantee(value, delta, "pld", "replace_one", "")
    return pld if method == "prv" or pld.epsilon <= rdp.epsilon else rdp


def _two_moves(events: tuple[Event, ...], delta: float) -> tuple[float, float]:
    """(2 e, (1 + exp(e)) d)-DP from an (e, d) of add/remove: Dwork & Roth 2014, Theorem 2.2 and its proof."""
    best, chosen = math.inf, delta
    for exponent in range(1, 400):
        inner = delta * 2.0**-exponent
        one = rdp_epsilon(events, inner)
        if one < 700 and inner * (1 + math.exp(one)) <= delta and 2 * one < best:
            best, chosen = 2 * one, inner
            break  # epsilon grows as delta shrinks, so the first delta that fits is the best of these
    return best, chosen


def _gdp(ledger: Ledger, delta: float) -> float:
    """`mu = q sqrt(T (exp(1/s^2) - 1))`, summed in squares; Bu et al. 2020, Deep Learning with Gaussian DP."""
    mu_squared = sum(
        e.sampling_prob**2 * e.num_steps * math.expm1(min(1 / e.noise_multiplier**2, 700.0)) for e in ledger.events
    )
    return gaussian_epsilon((Event(1.0, 1 / math.sqrt(mu_squared), 1),), delta)
