"""Record of what a run has cost and of what that cost does not count: the content of `privacy_accounting.json`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dpfunc._utils.validation import (
    apart,
    fail,
    integer,
    non_negative,
    one_of,
    open_unit,
    positive,
    probability,
    signed,
    unsigned,
)
from dpfunc.accounting.ledger import OTHER_VERSION, Ledger, parsed
from dpfunc.errors import InvalidArgument
from dpfunc.types import ADJACENCIES, Adjacency

RECORD_FILE = "privacy_accounting.json"
_ROUNDING = 1e-4  # relative; as tight as the accountants are
_SCHEMA = "dpfunc.accounting/2"
SELECTION = "dpfunc.selection/"  # the schema of the record of a search, see selection_record.py

NEIGHBOURS: dict[Adjacency, str] = {
    "add_remove": "data sets that differ by one unit, which is in one of them and not in the other",
    "zero_out": "data sets of the same size that differ by one unit, whose contribution is zero in one of them",
    "replace_one": "data sets of the same size that differ by one unit, which is another one",
}
"""The two data sets that epsilon and delta compare, in words."""

COVERED = (
    "the trained parameters, and all that is computed from them without the training records: answers, texts, "
    "accuracy on public records",
    "this record: settings of the run, epsilon and delta",
)
"""What a run releases at the cost that is recorded."""

NOT_COVERED = (
    "losses, gradient norms and accuracy on training records",
    "metrics on other private records, e.g. for validation, and choices made with them",
    "runs on the same records that are not in the ledger, and settings that were chosen with them",
    "what a pretrained base model has learnt from these records before",
    "people with more than one unit: several units of one person are protected less",
    "side channels: time, memory, messages, and rounding of floating-point numbers",
)
"""What the epsilon of no run covers."""

ONE_RECORD = "one record of the training data set"
"""The unit of a run whose batches have one record a row."""

EXACT_SIZE = "the exact number of records, which dataset_size publishes"
SECRET, GUESSABLE = "secret", "guessable"
SIZES = ("number of records", "public bound on the number of records")


@dataclass(frozen=True)
class Record:
    """Record of the cost of a run, of the facts to check it by, and of what is not covered. It holds public facts only.

    Args:
        date: when it was written, UTC, as ISO 8601.
        unit: what one row of a batch is: what is protected.
        adjacency: which data sets are neighbours; `NEIGHBOURS` says it in words.
        epsilon: upper bound for all steps in `ledger`; infinite without protection. delta: that it holds at.
        target_epsilon: the budget, or None.
        accountant: the method that found epsilon. note: its error. epsilon_rdp: an independent upper bound.
        ledger: all that was counted, earlier runs included.
        mechanism: kind of noise. noise_multiplier: noise / sensitivity, of the last step.
        noise_source: generator of the noise. noise_key: `secret`, or `guessable`: then nothing is protected.
        max_grad_norm: bound on the gradient of one unit. clip: the rule.
        sampler: how batches are drawn. sampling_prob: chance of a unit to be in a batch. expected_batch_size: of it.
        dataset_size: number that was used for sampling. dataset_size_is: one of `SIZES`.
        global_step: steps that were taken. num_steps: steps of the plan or of the budget. epoch: passes over the data.
        versions: of dpfunc, torch and python.
        not_covered: sentences on what epsilon and delta do not cover.

    Raises:
        InvalidArgument: a value outside its domain, or values that contradict each other.

    Guarantees:
        tests/accounting/test_record.py::test_a_record_reads_back_exactly, ::test_damaged_records_are_refused.
    """

    date: str
    unit: str
    adjacency: Adjacency
    epsilon: float
    delta: float
    target_epsilon: float | None
    accountant: str
    note: str
    epsilon_rdp: float
    ledger: Ledger
    mechanism: str
    noise_multiplier: float
    noise_source: str
    noise_key: str
    max_grad_norm: float
    clip: str
    sampler: str
    sampling_prob: float
    expected_batch_size: float
    dataset_size: int
    dataset_size_is: str
    global_step: int
    num_steps: int
    epoch: float
    versions: dict[str, str]
    not_covered: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        if self.ledger.adjacency != self.adjacency:
            raise fail(f"adjacency {self.ledger.adjacency!r}, as the ledger has", "adjacency", self.adjacency)

    def to_json(self) -> str:
        """The record as JSON, with its schema and a digest; an infinite epsilon is null, as JSON has no infinity."""
        epsilons = {name: _finite(getattr(self, name)) for name in ("epsilon", "epsilon_rdp")}
        return written(self, _SCHEMA, {**epsilons, "ledger": json.loads(self.ledger.to_json())})

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Read a record that `to_json` wrote.

        Raises:
            InvalidArgument: not JSON, no schema or another one, another digest, or a field that is missing, unknown,
                there twice or outside its domain.
        """
        values = parsed(text, "the record of a run")
        if not is_record(values):
            raise InvalidArgument(f"Expected the record of a run, as {RECORD_FILE} holds it, got other JSON.")
        if values.get("schema") != _SCHEMA:
            raise fail(f"a record with schema {_SCHEMA!r}", "schema", values.get("schema"), OTHER_VERSION)
        record: Record = reconstructed(cls, _SCHEMA, values, _READ)
        return record


def written(record: Any, schema: str, encoded: Mapping[str, object]) -> str:
    """The record of a run or of a search as JSON; `encoded` has the values that JSON cannot hold as they are."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)} | dict(encoded)
    neighbours = NEIGHBOURS[record.adjacency]
    return json.dumps(signed({"schema": schema, **values, "neighbours": neighbours}), indent=1, allow_nan=False)


def reconstructed(
    kind: type[Any], schema: str, values: dict[str, Any], read: Mapping[str, Callable[[Any], Any]]
) -> Any:
    """A record of a class from the values of a file; checks its digest, its fields and its words for neighbours."""
    given = {name: value for name, value in unsigned("record", values).items() if name != "schema"}
    expected = {field.name for field in dataclasses.fields(kind)} | {"neighbours"}
    if set(given) != expected:
        raise InvalidArgument(
            f"Expected the fields of the schema {schema!r}, got a record "
            f"{apart(expected - set(given), set(given) - expected)}. The file was changed: restore it."
        )
    neighbours = given.pop("neighbours")
    record = kind(**{name: read[name](value) if name in read else value for name, value in given.items()})
    if neighbours != NEIGHBOURS[record.adjacency]:
        raise fail(f"the neighbours of {record.adjacency!r}", "neighbours", neighbours, "The file was changed.")
    return record


def is_record(values: object) -> bool:
    """True for the JSON values of a record of any version.

    >>> is_record({"schema": "dpfunc.accounting/2"}), is_record({"schema": "dpfunc.ledger/2"})
    (True, False)
    """
    return isinstance(values, dict) and str(values.get("schema")).startswith("dpfunc.accounting/")


def read_ledger(text: str | bytes) -> Ledger:
    """The ledger in the text of a file: a ledger, or the record of a run.

    Raises:
        InvalidArgument: something else, a ledger or record that cannot be read, or a record whose epsilon is not that
            of its ledger, up to a relative 1e-4 (tests/checkpoint/test_prior_ledgers.py).

    >>> ledger = Ledger()
    >>> read_ledger(ledger.to_json()) == ledger
    True
    """
    values = parsed(text, "a ledger or the record of a run")
    if not isinstance(values, dict):
        raise InvalidArgument("Expected a ledger or the record of a run, got other JSON.")
    if str(values.get("schema")).startswith(SELECTION):
        raise InvalidArgument(
            "Expected a ledger or the record of a run, got the record of a search: its cost is no sum over steps. Its "
            "epsilon and delta add to those of other runs on the same records: leave them out of the budget of this "
            "one, and publish the sums."
        )
    if not is_record(values):
        return Ledger.from_json(text)
    record = Record.from_json(text)
    found = record.ledger.epsilon(record.delta, record.accountant).epsilon
    if not math.isclose(record.epsilon, found, rel_tol=_ROUNDING):
        raise fail(
            f"a record whose epsilon is that of its ledger, {found:.6g} by {record.accountant}", "epsilon",
            record.epsilon, "One of them was changed. Restore the file, or name its journal.",
        )  # fmt: skip
    return record.ledger


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def check_text(name: str, value: object) -> None:
    """A line of text that a terminal can show: a file from elsewhere must not send it control characters."""
    if not isinstance(value, str) or not value.isprintable():
        raise fail("a line of printable text", name, value)


def _bound(name: str, value: object) -> None:
    if value != math.inf:
        non_negative(name, value)


def _check_texts(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise fail("a list of lines of text", name, value)
    for line in value:
        check_text(name, line)


def _check_versions(name: str, value: object) -> None:
    if not isinstance(value, dict) or not value:
        raise fail("versions by name", name, value)
    _check_texts(name, (*value, *value.values()))


def as_tuple(value: Any) -> Any:
    """The tuple that JSON holds as a list."""
    return tuple(value) if isinstance(value, list) else value


def as_ledger(value: object) -> Ledger:
    """The ledger among the values of a record."""
    return Ledger.from_json(json.dumps(value))


def _infinite(value: Any) -> Any:
    return math.inf if value is None else value


_READ = {"epsilon": _infinite, "epsilon_rdp": _infinite, "not_covered": as_tuple, "ledger": as_ledger}


def check_kind(kind: type) -> Callable[[str, object], None]:
    """The check that a value is of a class."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, kind):
            raise fail(f"a {kind.__name__}", name, value)

    return check


RUN_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "noise_key": lambda name, value: one_of(name, value, (SECRET, GUESSABLE)),
    "dataset_size": lambda name, value: integer(name, value, minimum=1),
    "dataset_size_is": lambda name, value: one_of(name, value, SIZES),
    "versions": _check_versions,
    "not_covered": _check_texts,
}
"""Checks of the last fields of a record, of a run or of a search."""
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("date", "unit", "accountant", "note", "mechanism", "noise_source", "clip", "sampler"), check_text),
    "adjacency": lambda name, value: one_of(name, value, ADJACENCIES),
    "epsilon": _bound,
    "epsilon_rdp": _bound,
    "delta": open_unit,
    "target_epsilon": lambda name, value: None if value is None else positive(name, value),
    "ledger": check_kind(Ledger),
    "noise_multiplier": non_negative,
    "max_grad_norm": positive,
    "sampling_prob": probability,
    "expected_batch_size": positive,
    "global_step": integer,
    "num_steps": integer,
    "epoch": non_negative,
    **RUN_CHECKS,
}
