"""Record of a private search and of its cost: the content of `privacy_accounting.json` after `dpfunc tune`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpfunc._utils.validation import fail, integer, open_unit, positive, real
from dpfunc.accounting.guarantee import Guarantee
from dpfunc.accounting.ledger import Ledger, parsed
from dpfunc.accounting.record import (
    RUN_CHECKS,
    SELECTION,
    as_ledger,
    as_tuple,
    check_kind,
    check_text,
    reconstructed,
    written,
)
from dpfunc.accounting.selection import RunCount, selection_epsilon
from dpfunc.errors import InvalidArgument
from dpfunc.types import Adjacency, Event

_SCHEMA = f"{SELECTION}2"


@dataclass(frozen=True)
class SelectionRecord:
    """Record of a search that released the best of a random number of runs; it holds public facts only.

    Args:
        date: when it was written, UTC, as ISO 8601. unit: what one record is: what is protected.
        epsilon, delta: upper bound for the whole search, and for `spent`. target_epsilon: the budget.
        runs: distribution of the number of runs. How many there were is secret.
        candidates: the values of each. ledgers: what one run of each costs without its score.
        score: what is compared. score_noise: standard deviation of its noise; one record changes it by at most 1.
        chosen: number of the candidate that was released, from 0; None if nothing was. chosen_score: with its noise.
        spent: earlier runs on the same records.
        noise_key: `secret`, or `guessable`: then nothing is protected.
        dataset_size: number of records that was used for sampling. dataset_size_is: one of `SIZES`.
        versions: of dpfunc, torch and python. not_covered: sentences on what epsilon and delta do not cover.

    Raises:
        InvalidArgument: a value outside its domain, or values that contradict each other.

    Guarantees:
        tests/accounting/test_selection_record.py::test_a_record_reads_back_exactly, ::test_damaged_records_are_refused.
    """

    date: str
    unit: str
    epsilon: float
    delta: float
    target_epsilon: float
    runs: RunCount
    candidates: tuple[dict[str, float], ...]
    ledgers: tuple[Ledger, ...]
    score: str
    score_noise: float
    chosen: int | None
    chosen_score: float | None
    spent: Ledger
    noise_key: str
    dataset_size: int
    dataset_size_is: str
    versions: dict[str, str]
    not_covered: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        if not self.ledgers or len(self.ledgers) != len(self.candidates):
            raise fail("one ledger for each candidate", "len(ledgers)", len(self.ledgers))
        refuse_replaced("adjacency", self.adjacency)
        if self.chosen is not None and integer("chosen", self.chosen) >= len(self.candidates):
            raise fail(f"chosen < {len(self.candidates)}", "chosen", self.chosen)
        if (self.chosen is None) != (self.chosen_score is None):
            raise fail("chosen together with its score", "chosen_score", self.chosen_score)

    @property
    def adjacency(self) -> Adjacency:
        """Which data sets are neighbours: as in what was spent before."""
        return self.spent.adjacency

    def guarantee(self, delta: float) -> Guarantee:
        """The cost of `spent` and of the search, computed again from what was counted."""
        return search_cost(self.runs, self.ledgers, self.score_noise, delta, self.spent)

    def to_json(self) -> str:
        """The record as JSON, with its schema and a digest; a shape of null is that of the Poisson distribution."""
        shape = None if self.runs.shape == math.inf else self.runs.shape
        encoded = {
            "runs": {"mean": self.runs.mean, "shape": shape},
            "ledgers": [json.loads(each.to_json()) for each in self.ledgers],
            "spent": json.loads(self.spent.to_json()),
        }
        return written(self, _SCHEMA, encoded)

    @classmethod
    def from_json(cls, text: str | bytes) -> SelectionRecord:
        """Read a record that `to_json` wrote.

        Raises:
            InvalidArgument: not JSON, another schema, or a field that is missing, unknown, there twice or outside its
                domain.
        """
        values = parsed(text, "the record of a search")
        if not isinstance(values, dict) or values.get("schema") != _SCHEMA:
            raise InvalidArgument(
                f"Expected a record with schema {_SCHEMA!r}, got another: use the version that wrote it."
            )
        record: SelectionRecord = reconstructed(cls, _SCHEMA, values, _READ)
        return record


def search_cost(
    runs: RunCount, ledgers: Sequence[Ledger], score_noise: float, delta: float, spent: Ledger
) -> Guarantee:
    """Cost of a search whose runs are scored on records on which none is trained; see docs/accounting.md.

    Args:
        runs: distribution of the number of runs. ledgers: training of each candidate.
        score_noise: standard deviation of the noise of a score, which one record changes by at most 1.
        delta: 0 < delta < 1. spent: earlier runs, and the adjacency: add_remove or zero_out.
    """
    refuse_replaced("adjacency", spent.adjacency)
    score = Ledger((Event(1.0, score_noise, 1),), spent.adjacency)
    return selection_epsilon(runs, [*ledgers, score], delta, spent=spent)


def refuse_replaced(name: str, adjacency: Adjacency) -> None:
    """Refuse the adjacency of which a search has no bound: training and scores then share the record that differs."""
    if adjacency == "replace_one":
        raise fail(
            f"{name} add_remove or zero_out", name, adjacency,
            "A record that is replaced may go from those that are trained on to those that are scored.",
        )  # fmt: skip


def _read_ledgers(value: object) -> tuple[Ledger, ...]:
    if not isinstance(value, list):
        raise fail("a list of ledgers", "ledgers", value)
    return tuple(map(as_ledger, value))


def _read_runs(value: object) -> RunCount:
    if not isinstance(value, dict) or set(value) != {"mean", "shape"}:
        raise fail("mean and shape", "runs", value)
    return RunCount(value["mean"], math.inf if value["shape"] is None else value["shape"])


def _check_candidates(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(each, dict) for each in value):
        raise fail("a list of values by name", name, value)
    for each in value:
        for key, number in each.items():
            check_text(name, key)
            positive(name, number)


def _check_ledgers(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(each, Ledger) for each in value):
        raise fail("ledgers", name, value)


_READ: dict[str, Callable[[Any], Any]] = {
    "runs": _read_runs, "ledgers": _read_ledgers, "spent": as_ledger, "candidates": as_tuple, "not_covered": as_tuple,
}  # fmt: skip
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("date", "unit", "score"), check_text),
    **dict.fromkeys(("epsilon", "target_epsilon", "score_noise"), positive),
    "delta": open_unit,
    "runs": check_kind(RunCount),
    "candidates": _check_candidates,
    "ledgers": _check_ledgers,
    "spent": check_kind(Ledger),
    "chosen_score": lambda name, value: None if value is None else real(name, value, f"a finite {name}"),
    **RUN_CHECKS,
}
