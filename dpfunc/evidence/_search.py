"""A private search in a certificate: all that its cost follows from, and what follows.

May import: its folder, checkpoint and below. Trusted: no.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfunc._utils.files import sha256
from dpfunc._utils.validation import expect, one_of
from dpfunc.accounting import Ledger, RunCount
from dpfunc.accounting._trade_off import points_of
from dpfunc.accounting.ledger import to_values
from dpfunc.accounting.record import (
    NOT_COVERED,
    RECORD_FILE,
    SCORES,
    SEARCH_NOT_COVERED,
    SETTINGS,
    SelectionRecord,
    law_of,
    search_cost,
)
from dpfunc.evidence._basis import Basis, Values, events_in, weights_in
from dpfunc.evidence._figures import RECORDED, shown
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


def _counted(values: Values) -> Counted:
    """The search in a certificate."""
    search, adjacency = values["search"], values["claim"]["adjacency"]
    shape = search["runs"]["shape"]
    return Counted(
        RunCount(search["runs"]["mean"], math.inf if shape is None else shape),
        tuple(Ledger(events_in(events), adjacency) for events in search["candidates"]),
        one_of("score", search["score"], SCORES),
        search["score_noise"],
        Ledger(events_in(values["earlier"]), adjacency),
    )


def facts_of(folder: Path, record: SelectionRecord) -> dict[str, Any]:
    """The facts in a certificate of a search: its record, and digests of its weights, which the record must name."""
    expect(record.settings is not None, "a search that released a model", "chosen", record.chosen, "Its record, which "
           "dpfunc ledger check computes again, says what it has cost.")  # fmt: skip
    weights = weights_in(folder)
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
            "model": weights, "record": sha256(folder / RECORD_FILE), "code": [sha256(job)] if job.is_file() else [],
        },
        "versions": plain["versions"],
    }  # fmt: skip


def _derived(given: Values, values: Values) -> dict[str, Any]:
    """The search in a certificate of one, and what follows from it."""
    claim, search = values["claim"], _counted(given)
    points = points_of(search.epsilon, claim["delta"])
    found = dict(points)[claim["delta"]]
    expect(
        math.isclose(found, claim["epsilon"], rel_tol=RECORDED), f"the cost of the search, {found:.6g}", "epsilon",
        claim["epsilon"], "What is claimed does not follow from the number of its runs, candidates and noise.",
    )  # fmt: skip
    expect(claim["accountant"] == "rdp", "rdp, which alone can count a search", "accountant", claim["accountant"])
    expect(values["digests"]["model"], "the weights that the search released", "model", [])
    expect(not given["evidence"], "no replay and no audit of a search", "evidence", len(given["evidence"]))
    expect(given["budget"] is None, "no place of a search in a budget", "budget", given["budget"])
    figures = shown(points, ("rdp of a search", found))
    return {"search": search.values(), "result": figures, "evidence": [], "budget": None}


SEARCH = Basis(
    schema="dpfunc.certificate_of_search/1",
    part="search",
    word="law of the number of runs, steps of each candidate, noise of the score, earlier runs, date, unit, budget, "
    "digests",
    settings=(*SETTINGS, "noise_key"),  # the candidates may differ in the bound of gradients
    not_covered=(*SEARCH_NOT_COVERED, *NOT_COVERED),
    derive=_derived,
    events=lambda values: _counted(values).events,
    assumptions=lambda _: {
        "A second accountant, which shares no code with the first, has found this epsilon.": False,
        "The grid and the law of the number of runs were chosen without a look at the records.": None,
        "Nobody has seen how many runs there were, or any run but the released one.": None,
        "No record was both trained on and scored.": None,
    },
)
