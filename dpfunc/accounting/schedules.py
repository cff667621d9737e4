"""The ledger of a run whose sampling probability or noise changes over time."""

from __future__ import annotations

import itertools

from dpfunc._utils.validation import integer
from dpfunc.accounting.ledger import Ledger
from dpfunc.types import Adjacency, Event, Schedule, schedule_at


def schedule_ledger(
    sampling_prob: float | Schedule,
    noise_multiplier: float | Schedule,
    num_steps: int,
    adjacency: Adjacency = "add_remove",
) -> Ledger:
    """Build the ledger of `num_steps` steps; the time it takes grows with the pieces, not with the steps.

    Args:
        sampling_prob: 0 < q <= 1, or a schedule of it.
        noise_multiplier: >= 0, or a schedule of it.
        num_steps: steps of the run, >= 0; the last value of a schedule goes on.
        adjacency: which data sets are neighbours.

    Raises:
        InvalidArgument: an argument outside its domain.

    Guarantees:
        equals the ledger of the single steps (tests/accounting/test_schedules.py::test_pieces_equal_single_steps).

    >>> schedule_ledger(0.1, Schedule(((100, 1.2), (200, 0.9))), num_steps=150)
    Ledger(150 steps, add_remove: (q=0.1, sigma=0.9) x 50 + (q=0.1, sigma=1.2) x 100)
    """
    end = integer("num_steps", num_steps)
    starts = {0} | {
        start
        for value in (sampling_prob, noise_multiplier)
        if isinstance(value, Schedule)
        for start in value.starts()
        if start < end
    }
    spans = itertools.pairwise([*sorted(starts), end]) if end else ()
    return Ledger(
        tuple(Event(schedule_at(sampling_prob, a), schedule_at(noise_multiplier, a), b - a) for a, b in spans),
        adjacency,
    )
