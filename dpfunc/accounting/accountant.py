"""Epsilon of events: the best of several upper bounds, and which one it was.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import decimal
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from dpfunc._utils.validation import expect, one_of, refuse
from dpfunc.accounting._gaussian import gaussian_epsilon, gaussian_mu, gdp_mu
from dpfunc.accounting._losses import (
    DIRECTIONS,
    Atoms,
    Direction,
    Fixed,
    Kind,
    TiltedUnavailable,
    delta_curve,
    epsilon_at,
)
from dpfunc.accounting._pairs import LARGEST_LOSS
from dpfunc.accounting._prv import prv_epsilon
from dpfunc.accounting._rdp import FEW_ORDERS, rdp_epsilon
from dpfunc.accounting._tilted import curve_near, estimated_delta, estimated_epsilon, tilted_epsilon
from dpfunc.accounting.events import GAUSSIAN, LOSSES, RENYI, divided, has_both, largest_loss, law_kind, law_of
from dpfunc.errors import InvalidArgument
from dpfunc.types import Adjacency, Allocated, Event

Method = Literal["tilted", "prv", "rdp", "gaussian", "gdp-approximation"]
METHODS: tuple[str, ...] = ("auto", *get_args(Method))
# The laws of events that each method takes, see `events.law_kind`; those of `gaussian` without sampling.
_TAKEN: dict[str, tuple[str, ...]] = {
    "gaussian": (GAUSSIAN,), "gdp-approximation": (GAUSSIAN,), "prv": (GAUSSIAN,), "tilted": (GAUSSIAN, LOSSES),
    "rdp": (GAUSSIAN, LOSSES, RENYI), "auto": (GAUSSIAN, LOSSES, RENYI),
}  # fmt: skip
BOUNDS = tuple(method for method in METHODS if method != "gdp-approximation")
# Of a plan: `gaussian` refuses sampled batches, and `auto` takes it where it is exact.
ACCOUNTANTS = tuple(method for method in BOUNDS if method != "gaussian")
MAX_KINDS, _FEW_KINDS = 32, 8  # of a Renyi curve
_FINEST = 1.002  # cells of `fewer_kinds`
_TILTED_KINDS = 4000  # more are rounded to so many: a thousand take two seconds
ROUNDING = 1e-14  # of float64, relative, in a sum of largest losses, and in a product of probabilities
_NOT_NEAR = 0.99  # of the estimate of the Renyi bound


def upper(epsilon: float, digits: int = 6) -> str:
    """An `epsilon` in `digits` digits, rounded up: what is printed is an upper bound, too.

    >>> upper(2.000001), upper(2.0), upper(math.inf)
    ('2.00001', '2', 'inf')
    """
    rounded = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING).create_decimal_from_float(epsilon)
    return f"{float(rounded):.{digits}g}"


@dataclass(frozen=True)
class Guarantee:
    """An (epsilon, delta) statement, and how it was obtained.

    Args:
        epsilon: an upper bound, >= 0; inf means no protection. Of `gdp-approximation` no bound. delta: it holds at.
        method: `tilted`, `prv` (numerical composition), `rdp` (Renyi), `gaussian` (exact, of batches with all data).
        adjacency: which data sets count as neighbours. note: its error, and why another method was not used.

    >>> print(Guarantee(1.25, 1e-5, "prv", "add_remove", "about 0.01 above the truth"))
    (epsilon=1.25, delta=1e-05)-DP under add_remove, by prv: about 0.01 above the truth
    >>> float(Guarantee(1.25, 1e-5, "prv", "add_remove"))
    1.25
    """

    epsilon: float
    delta: float
    method: Method
    adjacency: Adjacency
    note: str = ""

    def __float__(self) -> float:
        return self.epsilon

    def __str__(self) -> str:
        tail = f": {self.note}" if self.note else ""
        cost = f"(epsilon={upper(self.epsilon)}, delta={self.delta:g})-DP"
        return f"{cost} under {self.adjacency}, by {self.method}{tail}"


@functools.lru_cache(maxsize=4096)
def cached_epsilon(
    events: tuple[Event, ...], adjacency: Adjacency, delta: float, method: str, fine: bool = False
) -> Guarantee:
    """Compute the epsilon of events with known laws, from validated arguments; 0 <= delta < 1."""
    for event in events:
        if (law := law_kind(event)) not in _TAKEN[method]:
            able = " or ".join(repr(name) for name, taken in _TAKEN.items() if law in taken)
            raise InvalidArgument(
                f"Expected {' or '.join(_TAKEN[method])} for method {method!r}, got {law}, {event!r}. "
                f"Use method {able}."
            )
    if method == "gdp-approximation":
        expect(
            adjacency != "replace_one", "adjacency add_remove or zero_out for the GDP approximation", "adjacency",
            adjacency,
        )  # fmt: skip
        bound: _Bound = (
            gaussian_epsilon(gdp_mu(events), delta), "gdp-approximation",
            "NOT a bound: the central limit under-reports, by up to 550 times for few steps and small sampling "
            "probabilities",
        )  # fmt: skip
    elif method == "gaussian" or (method == "auto" and all_take_part(events)):
        least = min((event.sampling_prob for event in events), default=1.0)
        refuse((
            least < 1,
            "Expected every event to have sampling_prob = 1 for method 'gaussian', which is the exact answer for "
            f"batches of all records, got sampling_prob={least:g}. Use method 'auto'.",
        ))  # fmt: skip
        bound = gaussian_epsilon(gaussian_mu(events), delta), "gaussian", "exact"
    else:
        ways = (_bounded(each, adjacency, delta, method, fine) for each in _ways(events))
        bound = min(ways, key=operator.itemgetter(0))
    epsilon, named, note = bound
    return Guarantee(epsilon if epsilon >= 0 else math.inf, delta, named, adjacency, note)  # of NaN nothing is known


_Bound = tuple[float, Method, str]  # epsilon, the method that found it, and its note


def _ways(events: tuple[Event, ...]) -> tuple[tuple[Event, ...], ...]:
    """The events; and each allocated epoch as one release of all records, better for few batches or large losses."""
    wholes = (Event(1.0, e.noise_multiplier, e.num_steps) if isinstance(e, Allocated) else e for e in events)
    return tuple(dict.fromkeys((events, tuple(wholes))))


def deltas_of(
    events: tuple[Event, ...], adjacency: Adjacency, near: Sequence[float], at: float | None = None
) -> Callable[[float], float]:
    """Delta of the finite losses as a function of epsilon >= 0, rounded up; 1 where `tilted` says nothing.

    Args:
        events, adjacency: of a ledger. near: deltas at and above which it is tight. at: epsilon of interest.
    """
    ways = []
    for way in _ways(events):
        plain, special = divided(way)
        kinds = _kinds(fewer_kinds(plain, _TILTED_KINDS)[0])
        orders = [[delta_curve(replace(law, infinite=np.zeros(())))] for law in sole_laws(way, adjacency)]
        for direction in DIRECTIONS[adjacency] if not orders else ():
            try:
                fixed = _fixed(special, direction)
                orders.append([curve_near(kinds, direction, delta, fixed, at) for delta in near])
            except TiltedUnavailable:
                return lambda epsilon: 1.0
        ways.append(orders)
    return lambda epsilon: min(max(min(curve(epsilon) for curve in curves) for curves in orders) for orders in ways)


def all_take_part(events: tuple[Event, ...]) -> bool:
    """True for Gaussian steps with batches of all records."""
    return all(type(event) is Event and event.sampling_prob == 1 for event in events)


def _bounded(events: tuple[Event, ...], adjacency: Adjacency, delta: float, method: str, fine: bool) -> _Bound:
    named: Method = "prv" if method == "prv" else "rdp" if method == "rdp" else "tilted"  # where each says the same
    if not events:
        return 0.0, named, "nothing spent"
    plain, _ = divided(events)
    if any(event.noise_multiplier == 0 for event in plain):
        return math.inf, named, "a step without noise"
    lost, worst = largest_loss(events, adjacency)
    if delta < lost * (1 - ROUNDING):
        return math.inf, named, "releases that give all away with a larger probability"
    delta -= lost  # no epsilon makes it smaller
    if delta <= lost * ROUNDING or worst == 0:
        return worst, named, "the largest loss that can be"
    bound = _numerically(events, adjacency, delta, method, fine)
    return (worst, named, "the largest loss that can be") if worst < bound[0] else bound


def _numerically(events: tuple[Event, ...], adjacency: Adjacency, delta: float, method: str, fine: bool) -> _Bound:
    """Epsilon of the finite losses, at a delta > 0."""
    if method == "rdp":
        return _by_renyi(events, adjacency, delta, "Renyi bound")
    if method == "prv":
        fewer, rounded = renyi_events(events)
        numerical, error = prv_epsilon(fewer, adjacency, delta)
        return numerical, "prv", f"about {error:.2g} above the truth{rounded}"
    return _tightest(events, adjacency, delta, alone=method == "tilted", fine=fine)


def _tightest(events: tuple[Event, ...], adjacency: Adjacency, delta: float, *, alone: bool, fine: bool) -> _Bound:
    """The bound by tilted composition; if not `alone`, that of Renyi where it is smaller, or the only one."""
    plain, special = divided(events)
    fewer, rounded = fewer_kinds(plain, _TILTED_KINDS)
    if laws := sole_laws(events, adjacency, fine):
        return max(_of_one_law(law, delta) for law in laws), "tilted", "the delta of one law of losses"
    try:
        fixed = {direction: _fixed(special, direction) for direction in DIRECTIONS[adjacency]} if special else {}
        finer = {direction: _fixed(special, direction, fine) for direction in DIRECTIONS[adjacency]} if fine else None
        tight = tilted_epsilon(_kinds(fewer), DIRECTIONS[adjacency], delta, fixed, finer)
    except TiltedUnavailable as refusal:
        if alone:
            raise
        return _by_renyi(events, adjacency, delta, f"no tilted: {refusal}")
    bound: _Bound = tight.epsilon, "tilted", f"an upper bound by construction{rounded}"
    if alone or (tight.epsilon < _NOT_NEAR * tight.renyi and not any(map(has_both, special))):
        return bound  # the Renyi bound cannot be smaller: it is not computed
    return min(bound, _by_renyi(events, adjacency, delta, "below the bound by tilted"), key=operator.itemgetter(0))


def sole_laws(events: tuple[Event, ...], adjacency: Adjacency, fine: bool = False) -> list[Atoms]:
    """The law of losses of a single release, for each order of the neighbours, if float64 holds their exponentials."""
    if len(events) != 1 or events[0].num_steps > 1 or law_kind(events[0]) != LOSSES:
        return []
    laws = [law_of(events[0], direction, fine) for direction in DIRECTIONS[adjacency]]
    return laws if all(np.max(law.loss, initial=0.0) <= LARGEST_LOSS for law in laws) else []


def _of_one_law(law: Atoms, delta: float) -> float:
    order = np.argsort(law.loss)
    return epsilon_at(law.loss[order], law.mass[order], delta) * (1 + 1e-10)


def _by_renyi(events: tuple[Event, ...], adjacency: Adjacency, delta: float, note: str) -> _Bound:
    fewer, rounded = renyi_events(events)
    return rdp_epsilon(fewer, adjacency, delta), "rdp", note + rounded


def _kinds(plain: tuple[Event, ...]) -> list[Kind]:
    return [(event.sampling_prob, event.noise_multiplier, event.num_steps) for event in plain]


def _fixed(special: tuple[Event, ...], direction: Direction, fine: bool = False) -> list[Fixed]:
    return [(event.num_steps, law_of(event, direction, fine)) for event in special]


def rough_epsilon(events: tuple[Event, ...], adjacency: Adjacency, delta: float) -> float:
    if not events:
        return 0.0
    plain, special = divided(events)
    direction = DIRECTIONS[adjacency][0]
    try:
        return estimated_epsilon(_kinds(plain), direction, delta, _fixed(special, direction))
    except TiltedUnavailable:
        return rdp_epsilon(renyi_events(events, _FEW_KINDS)[0], adjacency, delta, FEW_ORDERS)


def rough_delta(events: tuple[Event, ...], adjacency: Adjacency, epsilon: float) -> float:
    plain, special = divided(events)
    try:
        return max(
            estimated_delta(_kinds(plain), direction, epsilon, _fixed(special, direction))
            for direction in DIRECTIONS[adjacency]
        )
    except TiltedUnavailable:
        return 0.5


def renyi_events(events: tuple[Event, ...], max_kinds: int = MAX_KINDS) -> tuple[tuple[Event, ...], str]:
    """Events for Renyi curves, see `fewer_kinds`; those of sampling_prob = 1 as one step: Gaussians add up to one."""
    plain, special = divided(events)
    if full := tuple(event for event in plain if event.sampling_prob == 1):
        sigma = 1 / max(gaussian_mu(full), 1e-300) * (1 - 1e-12)
        plain = (*(event for event in plain if event.sampling_prob < 1), Event(1.0, sigma, 1))
    fewer, rounded = fewer_kinds(plain, max_kinds)
    return (*fewer, *special), rounded


def check_bound(method: str) -> str:
    """A method that may serve as a budget."""
    expect(
        method != "gdp-approximation", f"a method that gives an upper bound, one of {', '.join(BOUNDS)}", "method",
        method, "The GDP approximation under-reports epsilon, so a budget kept by it is overspent.",
    )  # fmt: skip
    return one_of("method", method, BOUNDS)


def fewer_kinds(events: tuple[Event, ...], max_kinds: int = MAX_KINDS) -> tuple[tuple[Event, ...], str]:
    """At most `max_kinds` events that cost at least as much, and a note on what was rounded, "" or "; ..".

    All events of a cell of a geometric grid, as fine as the limit allows, get its smallest noise multiplier and largest
    sampling probability. It starts at those of all, so that scaling all noise multipliers scales what they round to.
    """
    if len(events) <= max_kinds:
        return events, ""
    probs, noises = [event.sampling_prob for event in events], [event.noise_multiplier for event in events]
    smallest, largest = min(noises), max(probs)
    step = min(math.log(_FINEST), math.log(max(noises) / smallest * (largest / min(probs))) / max_kinds)
    while True:
        cells: dict[tuple[int, int], list[Event]] = {}
        for event in events:
            noise = math.floor(math.log(event.noise_multiplier / smallest) / step)
            prob = math.floor(math.log(largest / event.sampling_prob) / step)
            cells.setdefault((noise, prob), []).append(event)
        if len(cells) <= max_kinds:
            worst = (
                Event(
                    max(e.sampling_prob for e in own),
                    min(e.noise_multiplier for e in own),
                    sum(e.num_steps for e in own),
                )
                for own in cells.values()
            )
            return tuple(sorted(worst)), (
                f"; {len(events)} kinds of steps rounded to {len(cells)}, each value by {math.exp(step) - 1:.2g} of "
                "itself at most"
            )
        step *= 1.3
