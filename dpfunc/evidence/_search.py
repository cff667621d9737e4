"""A private search in a certificate, where a run has steps: all that its cost follows from.

May import: its folder, checkpoint and below. Trusted: no.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfunc._utils.files import sha256
from dpfunc._utils.validation import expect, one_of
from dpfunc.accounting import Ledger, RunCount
from dpfunc.accounting.ledger import from_values, to_values
from dpfunc.accounting.record import RECORD_FILE, SCORES, SETTINGS, SelectionRecord, law_of, search_cost
from dpfunc.types import Event


@dataclass(frozen=True)
class Counted:
    """All that the epsilon of a search follows from; the fields are those of `SelectionRecord`."""

    runs: RunCount
    ledgers: tuple[Ledger, ...]
    score: str
    score_noise: float
    spent: Ledger

    def __post_init__(self) -> None:
        events = [each.events for each in self.ledgers]
        expect(events and all(events), "candidates, and steps of each", "candidates", events)

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(event for ledger in self.ledgers for event in ledger.events)

    def epsilon(self, delta: float) -> float:
        """The epsilon of the search and of what was spent before it, at a delta."""
        return search_cost(self.runs, self.ledgers, self.score_noise, delta, self.spent).epsilon

    def values(self) -> dict[str, Any]:
        """The search as JSON values; its law in words follows from its numbers."""
        shape = None if self.runs.shape == math.inf else float(self.runs.shape)
        return {
            "runs": {"mean": float(self.runs.mean), "shape": shape, "law": law_of(self.runs)},
            "candidates": [[to_values(event) for event in ledger.events] for ledger in self.ledgers],
            "score": self.score,
            "score_noise": float(self.score_noise),
        }


def counted(values: Mapping[str, Any]) -> Counted:
    """The search in a certificate."""
    search, adjacency = values["search"], values["claim"]["adjacency"]
    shape = search["runs"]["shape"]
    return Counted(
        RunCount(search["runs"]["mean"], math.inf if shape is None else shape),
        tuple(Ledger(tuple(map(from_values, events)), adjacency) for events in search["candidates"]),
        one_of("score", search["score"], SCORES),
        search["score_noise"],
        Ledger(tuple(map(from_values, values["earlier"])), adjacency),
    )


def facts_of(folder: Path, record: SelectionRecord, weights: Sequence[str]) -> dict[str, Any]:
    """The facts in a certificate of a search: its record, and digests of its weights, which the record must name."""
    expect(record.settings is not None, "a search that released a model", "chosen", record.chosen, "Its record, which "
           "dpfunc ledger check computes again, says what it has cost.")  # fmt: skip
    expect(
        sorted(weights) == sorted(record.weights), "the weights that the search released, by the digests in its record",
        "model", weights, "They were changed, or are of another run: restore them.",
    )  # fmt: skip
    journals = [*folder.glob("*journal.jsonl")]
    expect(not journals, "no journal beside the record of a search, which leaves none", "journals", len(journals))
    plain, job = json.loads(record.to_json()), folder / "job.json"
    claimed = {name: plain[name] for name in ("unit", "delta", "epsilon", "target_epsilon", "not_covered")}
    small = record.delta * record.dataset_size < 1
    cost = Counted(record.runs, record.ledgers, record.score, record.score_noise, record.spent)
    return {
        "claim": {
            **claimed, "adjacency": record.spent.adjacency, "accountant": "rdp", "delta_below_one_over_records": small,
        },
        "mechanism": {**{name: plain["settings"][name] for name in SETTINGS}, "noise_key": record.noise_key},
        "search": cost.values(),
        "earlier": [to_values(event) for event in record.spent.events],
        "digests": {
            "model": [*weights], "record": sha256(folder / RECORD_FILE), "code": [sha256(job)] if job.is_file() else [],
        },
        "versions": plain["versions"],
    }  # fmt: skip
