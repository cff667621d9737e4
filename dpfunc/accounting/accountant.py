"""Epsilon of a ledger: the best of several upper bounds, and which one it was."""

from __future__ import annotations

import functools
import math
from typing import get_args

from dpfunc._utils.validation import fail, one_of, open_unit
from dpfunc.accounting.gaussian import gaussian_epsilon, gaussian_mu, gdp_mu
from dpfunc.accounting.guarantee import Guarantee, Method
from dpfunc.accounting.ledger import Ledger, canonical
from dpfunc.accounting.losses import DIRECTIONS
from dpfunc.accounting.prv import FEW_KINDS, prv_epsilon
from dpfunc.accounting.rdp import rdp_epsilon
from dpfunc.accounting.tilted import tilted_epsilon
from dpfunc.accounting.tilted_law import Kind, TiltedUnavailable
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event

METHODS: tuple[str, ...] = ("auto", *get_args(Method))
BOUNDS = tuple(method for method in METHODS if method != "gdp-approximation")
# Of a plan: `gaussian` refuses sampled batches, and `auto` takes it where it is exact.
ACCOUNTANTS = tuple(method for method in BOUNDS if method != "gaussian")
MAX_KINDS = 32  # of a Renyi curve
_FINEST = 1.002  # cells of `fewer_kinds`
_TILTED_KINDS = 4000  # more are rounded to so many: a thousand take two seconds
_GDP_NOTE = (
    "NOT a bound: the central limit under-reports, by up to 550 times for few steps and small sampling probabilities"
)
_NOT_NEAR = 0.99  # of the estimate of the Renyi bound


def epsilon(ledger: Ledger, delta: float, method: str = "auto") -> Guarantee:
    """The epsilon that a ledger costs at `delta`: an upper bound, and how it was found.

    Args:
        ledger: what was released.
        delta: 0 < delta < 1; choose it below 1 / number of records.
        method: `auto`: exact where every record is in every batch, else the smaller of `tilted` and `rdp`.
            `tilted`: numerical composition, within 1e-3 of the truth (relative), and nearly always within 1e-4 (see
            docs/accounting.md), for delta >= 1e-200 and noise multipliers >= 0.05.
            `prv`: numerical composition, about 0.01 (or 2 %) above the truth; refused for delta < 1e-9 and where
            its grid does not fit. `rdp`: Renyi, always possible, typically 5-30 % above. `gaussian`: exact, for
            sampling_prob = 1 only. `gdp-approximation`: a central limit that UNDER-REPORTS, by up to 550 times for
            few steps and small sampling_prob; to compare with older reports, never for a budget.

    Returns:
        A `Guarantee`. It depends on public facts only. Equal ledgers give the same answer (it is cached).

    Raises:
        InvalidArgument: delta or method outside its domain, or a method that cannot answer for this ledger.

    Guarantees:
        never below the truth (tests/accounting/test_reference.py::test_never_below_the_truth), and `tilted` hardly
        above it (tests/accounting/test_tilted.py::test_random_ledgers_against_the_inversion,
        tests/accounting/test_peer.py::test_random_plans_are_between_the_estimates_of_a_peer);
        no warning of numpy, scipy or opacus (tests/accounting/test_inputs.py::test_no_warning_leaks).

    >>> events = (Event(sampling_prob=0.01, noise_multiplier=1.0, num_steps=1000),)
    >>> print(f"{epsilon(Ledger(events), delta=1e-5).epsilon:.2f}")
    1.83
    """
    if not isinstance(ledger, Ledger):
        raise fail("a Ledger", "ledger", ledger, "Use Ledger((Event(...), ...)).")
    one_of("method", method, METHODS)
    return cached_epsilon(ledger, open_unit("delta", delta), method)


@functools.lru_cache(maxsize=4096)
def cached_epsilon(ledger: Ledger, delta: float, method: str) -> Guarantee:
    """Compute `epsilon` from arguments that were validated; equal questions are answered from a cache."""
    answer = functools.partial(Guarantee, delta=delta, adjacency=ledger.adjacency)
    if method == "gdp-approximation":
        if ledger.adjacency == "replace_one":
            raise fail("adjacency add_remove or zero_out for the GDP approximation", "adjacency", ledger.adjacency)
        return answer(gaussian_epsilon(gdp_mu(ledger.events), delta), method="gdp-approximation", note=_GDP_NOTE)
    full = all(event.sampling_prob == 1 for event in ledger.events)
    if method == "gaussian" and not full:
        raise InvalidArgument(
            "Expected every event to have sampling_prob = 1 for method 'gaussian', which is the exact answer for "
            f"batches of all records, got {ledger}. Use method 'auto'."
        )
    if full and method in ("auto", "gaussian"):
        return answer(gaussian_epsilon(gaussian_mu(ledger.events), delta), method="gaussian", note="exact")
    if not ledger.events:
        return answer(0.0, method=_named(method), note="nothing spent")
    if any(event.noise_multiplier == 0 for event in ledger.events):
        return answer(math.inf, method=_named(method), note="a step without noise")
    return _bounded(ledger, delta, method)


def _named(method: str) -> Method:
    """The method to name where each would say the same."""
    return "tilted" if method in ("auto", "tilted") else "prv" if method == "prv" else "rdp"


def _bounded(ledger: Ledger, delta: float, method: str) -> Guarantee:
    """The bound by one method, or the smaller one of two, for a ledger with noise in each event."""
    if method == "prv":
        return _by_prv(ledger, delta)
    if method == "rdp":
        return _by_renyi(ledger, delta, "Renyi bound")
    try:
        tight, renyi = _by_tilted(ledger, delta)
    except TiltedUnavailable as refusal:
        if method == "tilted":
            raise
        return _by_renyi(ledger, delta, f"no tilted: {refusal}")
    if method == "tilted" or tight.epsilon < _NOT_NEAR * renyi:
        return tight  # the Renyi bound cannot be smaller: it is not computed
    other = _by_renyi(ledger, delta, "below the bound by tilted")
    return other if other.epsilon < tight.epsilon else tight


def _by_tilted(ledger: Ledger, delta: float) -> tuple[Guarantee, float]:
    """The bound by discrete losses that dominate; and about what the Renyi bound is."""
    events, rounded = fewer_kinds(ledger.events, _TILTED_KINDS)
    found = tilted_epsilon(kinds_of(events), DIRECTIONS[ledger.adjacency], delta)
    note = _joined("an upper bound by construction", rounded)
    return Guarantee(found.epsilon, delta, "tilted", ledger.adjacency, note), found.renyi


def _by_renyi(ledger: Ledger, delta: float, note: str) -> Guarantee:
    """The smallest bound over orders of Renyi differential privacy; `note` goes into the answer."""
    events, rounded = renyi_events(ledger)
    renyi = rdp_epsilon(events, ledger.adjacency, delta)
    return Guarantee(renyi, delta, "rdp", ledger.adjacency, _joined(note, rounded))


def _by_prv(ledger: Ledger, delta: float) -> Guarantee:
    """The bound by numerical composition over opacus; its grid needs the Renyi bound."""
    events, rounded = renyi_events(ledger)
    renyi = rdp_epsilon(events, ledger.adjacency, delta, few=len(events) > FEW_KINDS)
    numerical, error = prv_epsilon(events, ledger.adjacency, delta, renyi)
    note = _joined(f"about {error:.2g} above the truth", rounded)
    return Guarantee(numerical, delta, "prv", ledger.adjacency, note)


def kinds_of(events: tuple[Event, ...]) -> list[Kind]:
    """Events as (sampling_prob, noise_multiplier, number of steps)."""
    return [(event.sampling_prob, event.noise_multiplier, event.num_steps) for event in events]


def _joined(*notes: str) -> str:
    """The notes that say something, in one line."""
    return "; ".join(filter(None, notes))


def renyi_events(ledger: Ledger, max_kinds: int = MAX_KINDS) -> tuple[tuple[Event, ...], str]:
    """Events for Renyi curves, see `fewer_kinds`; those of sampling_prob = 1 as one step: Gaussians add up to one."""
    full = tuple(event for event in ledger.events if event.sampling_prob == 1)
    if not full:
        return fewer_kinds(ledger.events, max_kinds)
    sigma = 1 / max(gaussian_mu(full), 1e-300) * (1 - 1e-12)
    sampled = (event for event in ledger.events if event.sampling_prob < 1)
    return fewer_kinds((*sampled, Event(1.0, sigma, 1)), max_kinds)


def check_bound(method: str) -> str:
    """A method that may serve as a budget."""
    if method == "gdp-approximation":
        hint = "The GDP approximation under-reports epsilon, so a budget kept by it is overspent."
        raise fail(f"a method that gives an upper bound, one of {', '.join(BOUNDS)}", "method", method, hint)
    return one_of("method", method, BOUNDS)


def fewer_kinds(events: tuple[Event, ...], max_kinds: int = MAX_KINDS) -> tuple[tuple[Event, ...], str]:
    """At most `max_kinds` events that cost at least as much, and a note on what was rounded ("" for nothing).

    Events are put into cells of a geometric grid, as fine as the limit allows; all events of a cell get its smallest
    noise multiplier and its largest sampling probability. The grid starts at the smallest noise and the
    largest probability of all, so that scaling all noise multipliers scales what they are rounded to.
    """
    if len(events) <= max_kinds:
        return events, ""
    smallest = min(event.noise_multiplier for event in events)
    largest = max(event.sampling_prob for event in events)
    noisiest = max(event.noise_multiplier for event in events)
    rarest = min(event.sampling_prob for event in events)
    step = min(math.log(_FINEST), math.log(noisiest / smallest * (largest / rarest)) / max_kinds)
    while True:
        cells: dict[tuple[int, int], list[Event]] = {}
        for event in events:
            noise = math.floor(math.log(event.noise_multiplier / smallest) / step)
            prob = math.floor(math.log(largest / event.sampling_prob) / step)
            cells.setdefault((noise, prob), []).append(event)
        if len(cells) <= max_kinds:
            ratio = math.exp(step) - 1
            note = f"{len(events)} kinds of steps rounded to {len(cells)}, each value by {ratio:.2g} of itself at most"
            return canonical(_worst(cell) for cell in cells.values()), note
        step *= 1.3


def _worst(cell: list[Event]) -> Event:
    """The steps of all events with the least noise and the largest probability among them."""
    return Event(
        max(event.sampling_prob for event in cell),
        min(event.noise_multiplier for event in cell),
        sum(event.num_steps for event in cell),
    )
