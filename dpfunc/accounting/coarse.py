"""Fewer kinds of events, at a cost that is never smaller."""

from __future__ import annotations

import math

from dpfunc.accounting.ledger import canonical
from dpfunc.types import Event

MAX_KINDS = 32
FINEST = 1.002


def coarsen(events: tuple[Event, ...], max_kinds: int = MAX_KINDS) -> tuple[tuple[Event, ...], str]:
    """At most `max_kinds` events that cost at least as much, and a note on what was rounded ("" for nothing).

    Noise multipliers are rounded down, and sampling probabilities up, to a geometric grid that is as fine as the
    limit allows. The grid hangs on the smallest noise and the largest probability, so that scaling all noise
    multipliers scales their rounded values.
    """
    if len(events) <= max_kinds:
        return events, ""
    smallest = min(event.noise_multiplier for event in events)
    largest = max(event.sampling_prob for event in events)
    step = math.log(FINEST)
    while True:
        rounded = canonical(
            Event(round_up(e.sampling_prob, largest, step), round_down(e.noise_multiplier, smallest, step), e.num_steps)
            for e in events
        )
        if len(rounded) <= max_kinds:
            ratio = math.exp(step)
            return rounded, f"{len(events)} kinds of steps rounded to {len(rounded)}, at most {ratio - 1:.2g} per value"
        step *= 1.5


def round_down(value: float, smallest: float, step: float) -> float:
    """The largest `smallest e^(k step)` that is at most `value`."""
    steps = math.floor(math.log(value / smallest) / step)
    below = smallest * math.exp(steps * step)
    return below if below <= value else smallest * math.exp((steps - 1) * step)


def round_up(value: float, largest: float, step: float) -> float:
    """The smallest `largest e^(-k step)` that is at least `value`."""
    steps = math.floor(math.log(largest / value) / step)
    above = largest * math.exp(-steps * step)
    return above if above >= value else min(largest, largest * math.exp(-(steps - 1) * step))
