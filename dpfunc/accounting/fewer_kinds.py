"""Fewer kinds of events, at a cost that is never smaller."""

from __future__ import annotations

import math

from dpfunc.accounting.ledger import canonical
from dpfunc.types import Event

MAX_KINDS = 32
_FINEST = 1.002


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
