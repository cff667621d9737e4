"""A private search in a certificate: all that its cost follows from, and what follows.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpfunc._utils.files import sha256, weights_in
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
    law_in_words,
    search_cost,
)
from dpfunc.evidence._basis import Basis, Values, events_in
from dpfunc.evidence._figures import RECORDED, result_values
from dpfunc.types import Event


def _written(runs: RunCount, ledgers: Sequence[Ledger], score: str, score_noise: float) -> dict[str, Any]:
    """A search as JSON values; its law in words follows from its numbers."""
    shape = None if runs.shape == math.inf else float(runs.shape)
    return {
        "runs": {"mean": float(runs.mean), "shape": shape, "law": law_in_words(runs)},
        "candidates": [[to_values(event) for event in ledger.events] for ledger in ledgers],
        "score": score,
        "score_noise": float(score_noise),
    }


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
    return {
        "claim": {
            **claimed, "adjacency": record.spent.adjacency, "accountant": "rdp", "delta_below_one_over_records": small,
        },
        "mechanism": {**{name: plain["settings"][name] for name in SETTINGS}, "noise_key": record.noise_key},
        "search": _written(record.runs, record.ledgers, record.score, record.score_noise),
        "earlier": [to_values(event) for event in record.spent.events],
        "digests": {
            "model": weights, "record": sha256(folder / RECORD_FILE), "code": [sha256(job)] if job.is_file() else [],
        },
        "versions": plain["versions"],
    }  # fmt: skip


def _derived(given: Values, values: Values) -> dict[str, Any]:
    """The search in a certificate of one, and what follows from it."""
    claim, search = values["claim"], given["search"]
    shape = search["runs"]["shape"]
    runs = RunCount(search["runs"]["mean"], math.inf if shape is None else shape)
    ledgers = [Ledger(events_in(events), claim["adjacency"]) for events in search["candidates"]]
    expect(ledgers and all(each.events for each in ledgers), "candidates, and steps of each", "candidates", ledgers)
    noise = search["score_noise"]
    spent = Ledger(events_in(values["earlier"]), claim["adjacency"])
    points = points_of(lambda delta: search_cost(runs, ledgers, noise, delta, spent).epsilon, claim["delta"])
    epsilon = dict(points)[claim["delta"]]
    expect(
        math.isclose(epsilon, claim["epsilon"], rel_tol=RECORDED), f"the cost of the search, {epsilon:.6g}", "epsilon",
        claim["epsilon"], "What is claimed does not follow from the number of its runs, candidates and noise.",
    )  # fmt: skip
    expect(claim["accountant"] == "rdp", "rdp, which alone can count a search", "accountant", claim["accountant"])
    expect(values["digests"]["model"], "the weights that the search released", "model", [])
    expect(not given["evidence"], "no replay and no audit of a search", "evidence", len(given["evidence"]))
    expect(given["budget"] is None, "no place of a search in a budget", "budget", given["budget"])
    return {
        "search": _written(runs, ledgers, one_of("score", search["score"], SCORES), noise),
        "result": result_values(points, ("rdp of a search", epsilon)),
        "evidence": [],
        "budget": None,
    }


def _events(values: Values) -> tuple[Event, ...]:
    return tuple(event for events in values["search"]["candidates"] for event in events_in(events))


SEARCH = Basis(
    schema="dpfunc.certificate_of_search/1",
    part="search",
    word="law of the number of runs, steps of each candidate, noise of the score, earlier runs, date, unit, budget, "
    "digests",
    settings=(*SETTINGS, "noise_key"),  # the candidates may differ in the bound of gradients
    not_covered=(*SEARCH_NOT_COVERED, *NOT_COVERED),
    derive=_derived,
    events=_events,
    assumptions=lambda _: {
        "A second accountant, which shares no code with the first, has found this epsilon.": False,
        "The grid and the law of the number of runs were chosen without a look at the records.": None,
        "Nobody has seen how many runs there were, or any run but the released one.": None,
        "No record was both trained on and scored.": None,
    },
)
