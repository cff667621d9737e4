"""Figures of a certificate: epsilon by two accountants, the trade-off curve, and what an attacker can reach.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dpfunc._utils.validation import expect
from dpfunc.accounting import Ledger
from dpfunc.accounting._rdp import composed_curve, converted
from dpfunc.accounting._trade_off import RATES, Point, curve, tight_method, true_positives
from dpfunc.accounting.accountant import fewer_kinds
from dpfunc.accounting.events import divided

ROUNDING = 1e-6  # relative; other versions of numpy and scipy round in other ways
RECORDED = 1e-4  # relative: up to which the epsilon of a record may be below the one that is computed now
_ORDERS = tuple(round(64 * 1.15**k) for k in range(20))  # beside those that Opacus has by itself
_OPACUS = (*(1 + k / 10 for k in range(1, 100)), *map(float, range(12, 64)))
_ERRORS = {
    "tilted": "an upper bound, at most 0.1 % above the truth, nearly always 0.01 %",
    "gaussian": "exact, rounded up by 1e-9 of itself",
    "rdp of a search": "an upper bound for the best of several runs: Papernot and Steinke 2022, Theorems 2 and 6",
    "opacus": "an upper bound, typically 5 to 30 % above the truth",
    "rdp": "an upper bound, typically 5 to 30 % above the truth; it shares the privacy loss of a step with the first",
}


def figures_of(ledger: Ledger, delta: float) -> dict[str, Any]:
    """The figures of steps that a ledger holds; refused where one has no noise."""
    points, method = curve(ledger, delta), tight_method(ledger)
    tight, second = dict(points)[delta], "opacus" if _is_plain(ledger) else "rdp"
    expect(
        math.isfinite(tight), "steps with noise", "epsilon", tight, "Nothing is protected, so nothing can be certified."
    )
    other = by_renyi(ledger, delta) if second == "opacus" else ledger.epsilon(delta, "rdp").epsilon
    return result_values(points, (method, tight), (second, other))


def result_values(points: Sequence[Point], *epsilons: tuple[str, float]) -> dict[str, Any]:
    """A trade-off curve, what an attacker can reach, and the epsilons that accountants have found."""
    return {
        "epsilon": min(value for _, value in epsilons),
        "accountants": [{"name": name, "epsilon": value, "error": _ERRORS[name]} for name, value in epsilons],
        "curve": [list(point) for point in points],
        "attacker": [{"false_positives": rate, "true_positives": true_positives(points, rate)} for rate in RATES],
    }


def by_renyi(ledger: Ledger, delta: float) -> float:
    """Epsilon of the Renyi accountant at the orders of Opacus. A check of a certificate needs no Opacus for it."""
    orders = (*_OPACUS, *map(float, _ORDERS))
    return converted(composed_curve(fewer_kinds(ledger.law)[0], ledger.adjacency, orders), orders, delta)


def _is_plain(ledger: Ledger) -> bool:
    """True if the accountant of Opacus has the events and the neighbours."""
    return ledger.adjacency != "replace_one" and not divided(ledger.law)[1]


def compare_with_opacus(ledger: Ledger, delta: float, result: Mapping[str, Any]) -> None:
    """Compare the second accountant, which a check computes without Opacus, with Opacus itself."""
    if not _is_plain(ledger):
        return
    from opacus.accountants import RDPAccountant

    accountant, known = RDPAccountant(), result["accountants"][1]["epsilon"]
    accountant.history.extend((e.noise_multiplier, e.sampling_prob, e.num_steps) for e in fewer_kinds(ledger.law)[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is the", UserWarning)  # of Opacus: looser, and still a bound
        epsilon = float(accountant.get_epsilon(delta, alphas=[*RDPAccountant.DEFAULT_ALPHAS, *_ORDERS]))
    expect(
        math.isclose(max(epsilon, 0.0), known, rel_tol=ROUNDING, abs_tol=1e-9),
        f"epsilon={known:.9g} by the accountant of Opacus", "epsilon", epsilon, "Report these steps.",
    )  # fmt: skip
