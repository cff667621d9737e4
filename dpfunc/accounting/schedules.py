"""Ledgers of runs in which sampling and noise change."""

from __future__ import annotations

import itertools

from dpfunc.accounting.ledger import Ledger
from dpfunc.checks import whole
from dpfunc.types import Adjacency, Event, Schedule, schedule_at


def schedule_ledger(
    sampling_prob: float | Schedule,
    noise_multiplier: float | Schedule,
    num_steps: int,
    adjacency: Adjacency = "add_remove",
) -> Ledger:
    """The ledger of Poisson-sampled steps with schedules of q and of sigma.

    Args:
        sampling_prob, noise_multiplier: constants or schedules. num_steps: >= 1. adjacency: the neighbours.

    >>> schedule_ledger(0.1, Schedule(((10, 2.0), (20, 1.0))), 25)
    Ledger(25 steps, add_remove: (q=0.1, sigma=1) x 15, (q=0.1, sigma=2) x 10)
    """
    steps = whole("num_steps", num_steps, minimum=1)
    changes = [s.starts() for s in (sampling_prob, noise_multiplier) if isinstance(s, Schedule)]
    edges = sorted({0, steps, *(edge for starts in changes for edge in starts if edge < steps)})
    events = tuple(
        Event(schedule_at(sampling_prob, a), schedule_at(noise_multiplier, a), b - a)
        for a, b in itertools.pairwise(edges)
    )
    return Ledger(events, adjacency)
