"""Record of what a run, or a search, has cost and of what that cost does not count: `privacy_accounting.json`.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from dpfunc._utils import validation as checks
from dpfunc.accounting.accountant import BOUNDS, Guarantee
from dpfunc.accounting.ledger import Ledger, check_fields, parsed
from dpfunc.accounting.selection import RunCount, selection_epsilon
from dpfunc.errors import InvalidArgument
from dpfunc.types import ADJACENCIES, Adjacency, Allocated, Capped, Event

RECORD_FILE = "privacy_accounting.json"
RUN, SELECTION = "dpfunc.accounting/", "dpfunc.selection/"  # schemas, before their version

NEIGHBOURS: dict[Adjacency, str] = {
    "add_remove": "data sets that differ by one unit, which is in one of them and not in the other",
    "zero_out": "data sets of the same size that differ by one unit, whose contribution is zero in one of them",
    "replace_one": "data sets of the same size that differ by one unit, which is another one",
}
"""The two data sets that epsilon and delta compare, in words."""

COVERED = (
    "the trained parameters, and all that is computed from them without the training records: answers, texts, "
    "accuracy on public records",
    "telemetry of the plan and bounds that adapt, which each step releases in the noise of its gradient",
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

SEARCH_NOT_COVERED = (
    "the time that the search took, from which the number of its runs can be guessed",
    "people who could read the folder during the search: it held the other runs, and the key",
)
"""What the epsilon of no search covers, besides."""

ONE_RECORD = "one record of the training data set"
"""The unit of a run whose batches have one record a row."""

EXACT_SIZE = "the exact number of records, which dataset_size publishes"
OTHER_STEPS = "how steps in the ledger that are not of this run were taken: its settings and its key are not theirs"
SECRET = "secret"
GUESSABLE = "guessable"
SIZES = ("number of records", "public bound on the number of records")
SOURCES = {
    "secure": "AES-128-CTR stream of a 256-bit key",
    "device": "ChaCha20 stream of a 256-bit key",
    "both": "AES-128-CTR and ChaCha20 streams of a 256-bit key",
}
ROWS = (
    "vmap(grad(loss)): no row sees another; rows drawn by the key are computed alone and compared",
    "each row computed alone",
    "by an engine of the user, by claim",
)
MECHANISMS = ("Gaussian", "Gaussian, scaled by group")
"""What is known of noise and rows; other noise is the claim of who wrote it."""

STRATEGIES = ("LambdaCGD", "BSR", "BISR", "BandMF", "BLT")
"""Matrices of correlated noise whose sensitivity is proven."""

CHANGING = ("Adaptive", "Scheduled")
"""Rules whose bound differs between steps."""

CLIPS = ("Flat", "Automatic", "PSAC", "Threshold", *CHANGING)
"""Rules whose bound is proven."""

LAWS = {
    "Poisson": "each unit is in a batch with probability sampling_prob, independently of all others and of other steps",
    "FixedSize": "a fixed number of different units, drawn anew each step, without replacement",
    "CappedPoisson": "as Poisson; if there are more units than the cap, a random subset of that size",
    "RandomAllocation": "each unit in one batch of an epoch, drawn independently of all others",
    "Shuffled": "a new permutation each epoch, in batches; no amplification is claimed",
    "ShuffledOnce": "a permutation, in batches that come again each epoch; no amplification is claimed",
    "CyclicPoisson": "each unit in one of some groups that take turns, drawn independently of all others; of the group "
    "of a step each unit is in the batch with the probability of the event, independently",
    "InOrder": "each unit in one batch of an epoch, in the order of the data set; no amplification is claimed",
}
"""Class of a sampler -> its law. That of another class is the claim of who wrote it."""

_SAMPLED: Mapping[str, type[Event]] = {"FixedSize": Capped, "CappedPoisson": Capped, "RandomAllocation": Allocated}
SCORES = (
    "number of held-out records whose most likely class is their label",
    "sum over held-out records of 1 - loss / log(vocabulary), at least 0 and at most 1",
    "number of held-out pairs whose chosen answer gained more probability than the rejected one",
)
"""Scores of the runs of a search that one record changes by at most 1."""

SETTINGS = ("sampler", "clip", "mechanism", "noise_source", "rows", "batches")
"""Fields of a `Record` that all runs of a search have in common."""

COMPARED, ELSEWHERE = "compared with the plan's draw of each step", "drawn elsewhere, by claim (verify_batch=False)"
UNKNOWN = (SOURCES["both"], ROWS[2], ELSEWHERE)
"""Noise source, rows and batches of a run of which nothing is known."""


@dataclass(frozen=True)
class _Published:
    """Base of both records: checks of the fields, and the way into a file and back."""

    schema: ClassVar[str]
    older: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # schema that is read, too -> fields that it lacks
    what: ClassVar[str]
    counted: ClassVar[str]

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            _check(field.name, hints[field.name], getattr(self, field.name))

    def _neighbours(self) -> Adjacency:
        return getattr(self, self.counted).adjacency  # type: ignore[no-any-return]  # of a ledger

    def to_json(self) -> str:
        """The record as JSON, with its schema and a digest; infinity is null, which JSON has."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        whole = {"schema": self.schema, **values, "neighbours": NEIGHBOURS[self._neighbours()]}
        return json.dumps(checks.signed(whole), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a record that `to_json` wrote.

        Raises:
            InvalidArgument: not JSON, no schema or another one, another digest, or a field that is missing, unknown,
                there twice or outside its domain.
        """
        values = parsed(text, f"the record of a {cls.what} ({RECORD_FILE})", cls.schema, *cls.older)
        given, hints = checks.unsigned("record", values), get_type_hints(cls)
        lacks = cls.older.get(given["schema"], {})
        both = lacks.keys() & given.keys()
        checks.expect(not both, f"a record without {', '.join(both)}", "schema", given["schema"])
        given |= lacks
        expected = ("schema", "neighbours", *(field.name for field in fields(cls)))
        check_fields(f"a record of schema {cls.schema!r}", given, expected)
        neighbours = given.pop("neighbours")
        del given["schema"]
        record = cls(**{name: _read(name, hints[name], value) for name, value in given.items()})
        adjacency = record._neighbours()
        checks.expect(
            neighbours == NEIGHBOURS[adjacency], f"the neighbours of {adjacency!r}", "neighbours", neighbours,
            "The file was changed.",
        )  # fmt: skip
        return record


@dataclass(frozen=True)
class Record(_Published):
    """Record of the cost of a run, of the facts to check it by, and of what is not covered. It holds public facts only.

    Args:
        date: when it was written, UTC, as ISO 8601.
        run: fingerprint of the key of its last steps, by which its journal names them.
        unit: what one row of a batch is: what is protected.
        adjacency: which data sets are neighbours; `NEIGHBOURS` says it in words.
        epsilon: upper bound for all steps in `ledger`; infinite without protection. delta: that it holds at.
        target_epsilon: the budget, or None.
        accountant: the method that found epsilon. note: its error. epsilon_rdp: an independent upper bound.
        ledger: all that was counted, earlier runs included.
        mechanism: kind of noise. noise_multiplier: noise / sensitivity, of the last step.
        noise_source: generator of the noise. noise_key: `secret`, or `guessable`: then nothing is protected.
        max_grad_norm: bound on the gradient of one unit; of a rule in `CHANGING` that at the end. clip: the rule.
        rows: how they were kept apart. batches: `COMPARED` or `ELSEWHERE`.
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

    schema, what, counted = RUN + "4", "run", "ledger"

    date: str
    run: str
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
    rows: str
    batches: str
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
        super().__post_init__()
        checks.expect(
            self.ledger.adjacency == self.adjacency, f"adjacency {self.ledger.adjacency!r}, as the ledger has",
            "adjacency", self.adjacency,
        )  # fmt: skip


@dataclass(frozen=True)
class SelectionRecord(_Published):
    """Record of a search that released the best of a random number of runs; it holds public facts only.

    Args:
        date, unit, noise_key, dataset_size, dataset_size_is, versions, not_covered: see `Record`.
        epsilon, delta: upper bound for the whole search, and for `spent`. target_epsilon: the budget.
        runs: distribution of the number of runs. How many there were is secret.
        candidates: the values of each. ledgers: what one run of each costs without its score.
        score: what is compared. score_noise: standard deviation of its noise; one record changes it by at most 1.
        run: fingerprint of the key of the search, by which the budget of its data set names it; empty in older records.
        chosen: number of the candidate that was released, from 0; None if nothing was. chosen_score: with its noise.
        spent: earlier runs on the same records.
        settings: the `SETTINGS` of its runs, from the one that was released; None if nothing was.
        weights: SHA-256 of each file of weights that was released.

    Raises:
        InvalidArgument: a value outside its domain, or values that contradict each other.

    Guarantees:
        tests/accounting/test_record.py::test_a_record_reads_back_exactly, ::test_damaged_records_are_refused.
    """

    schema, what, counted = SELECTION + "4", "search", "spent"
    older: ClassVar[Mapping[str, Mapping[str, Any]]] = {SELECTION + "3": {"run": ""}}

    date: str
    run: str
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
    settings: dict[str, str] | None
    weights: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("epsilon", self.epsilon)
        checks.positive("target_epsilon", self.target_epsilon)
        refuse_replaced("adjacency", self.spent.adjacency)
        n, chosen = len(self.candidates), self.chosen
        checks.refuse(
            (not self.ledgers or len(self.ledgers) != n,
             checks.fail("one ledger for each candidate", "len(ledgers)", len(self.ledgers))),
            (chosen is not None and checks.integer("chosen", chosen) >= n,
             checks.fail(f"chosen < {n}", "chosen", chosen)),
            ((chosen is None) != (self.chosen_score is None),
             checks.fail("chosen together with its score", "chosen_score", self.chosen_score)),
            ((chosen is None) != (self.settings is None),
             checks.fail("chosen together with its settings", "settings", self.settings)),
            ((chosen is None) != (not self.weights),
             checks.fail("chosen together with its weights", "weights", self.weights)),
            (self.settings is not None and {*self.settings} != {*SETTINGS},
             checks.fail(f"the settings {', '.join(SETTINGS)}", "settings", self.settings)),
        )  # fmt: skip

    def guarantee(self, delta: float) -> Guarantee:
        """The cost of `spent` and of the search, computed again from what was counted."""
        return search_cost(self.runs, self.ledgers, self.score_noise, delta, self.spent)


def search_cost(
    runs: RunCount, ledgers: Sequence[Ledger], score_noise: float, delta: float, spent: Ledger
) -> Guarantee:
    """Cost of a search whose runs are scored on records on which none is trained: of the facts of `SelectionRecord`."""
    refuse_replaced("adjacency", spent.adjacency)
    score = Ledger((Event(1.0, score_noise, 1),), spent.adjacency)
    return selection_epsilon(runs, [*ledgers, score], delta, spent=spent)


def law_in_words(runs: RunCount) -> str:
    """The distribution of the number of runs in words."""
    if runs.shape == math.inf:
        return "Poisson: there may be no run, and then nothing is released"
    return f"negative binomial of shape {runs.shape:g}, truncated: at least one run"


def listed(values: Mapping[str, float]) -> str:
    """Settings with their values, as text in one line."""
    return ", ".join(f"{name}={value:.4g}" for name, value in values.items())


def refuse_replaced(name: str, adjacency: Adjacency) -> None:
    """Refuse the adjacency for which a search has no bound: training and scores would share the differing record."""
    checks.expect(
        adjacency != "replace_one", f"{name} add_remove or zero_out", name, adjacency,
        "A record that is replaced may go from those that are trained on to those that are scored.",
    )  # fmt: skip


def is_proven(mechanism: str) -> bool:
    """True for dpfunc's own noise: a name of `MECHANISMS`, or correlated noise by one of its strategies."""
    return mechanism in MECHANISMS or mechanism.startswith(tuple(f"Correlated(strategy={each}(" for each in STRATEGIES))


def claims_law(sampler: str, events: Iterable[Event]) -> bool:
    """True if some events are those of a sampler of dpfunc, or of batches of all records, which each may claim."""
    own = (_SAMPLED.get(sampler, Event), 0 if sampler in ("Poisson", "CappedPoisson", "CyclicPoisson") else 1)
    kinds = {(type(event), least) for event in events for least in {0, int(event.sampling_prob)}}
    return sampler in LAWS and bool(kinds & {own, (Event, 1)})


def recorded(ledger: Ledger, delta: float, epsilon: float, accountant: str, tolerance: float) -> Guarantee | None:
    """Compute a recorded epsilon again by an accountant of upper bounds; None if it gives another value."""
    for method in ("auto", *(known for known in BOUNDS if known == accountant)):
        try:
            guarantee = ledger.epsilon(delta, method)
        except InvalidArgument:  # that one has no answer for this ledger
            continue
        if guarantee.method == accountant and math.isclose(guarantee.epsilon, epsilon, rel_tol=tolerance):
            return guarantee
    return None


def _plain(value: Any) -> Any:
    match value:
        case Ledger():
            return json.loads(value.to_json())
        case RunCount():
            return {"mean": value.mean, "shape": _plain(value.shape)}
        case tuple():
            return [_plain(each) for each in value]
    return None if value == math.inf else value


def _read(name: str, hint: Any, value: Any) -> Any:
    """Inverse of `_plain` for a field of a type."""
    if hint is Ledger:
        return Ledger.from_json(json.dumps(value))
    if hint is RunCount:
        checks.expect(isinstance(value, dict) and set(value) == {"mean", "shape"}, "mean and shape", name, value)
        return RunCount(value["mean"], _read("shape", float, value["shape"]))
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_read(name, get_args(hint)[0], each) for each in value)
    return math.inf if hint is float and value is None else value


def check_field(name: str, value: Any) -> Any:
    """The value of a field of a `Record`, if it is in its domain."""
    _check(name, get_type_hints(Record)[name], value)
    return value


def _check(name: str, hint: Any, value: Any) -> None:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:  # of another and None
        if value is not None:
            _check(name, inner[0], value)
    elif check := _DOMAINS.get(name) or _USUAL.get(kind):
        check(name, value)
    elif not isinstance(value, kind) or value == {}:
        raise checks.fail(f"a {kind.__name__}", name, value)
    elif kind is dict:
        _check_all(name, str, value)
        _check_all(name, inner[1], value.values())
    elif kind is tuple:
        _check_all(name, inner[0], value)


def _check_all(name: str, hint: Any, values: Iterable[Any]) -> None:
    for value in values:
        _check(name, hint, value)


_DOMAINS: Mapping[str, Callable[[str, Any], object]] = {
    "adjacency": partial(checks.one_of, allowed=ADJACENCIES),
    "noise_key": partial(checks.one_of, allowed=(SECRET, GUESSABLE)),
    "dataset_size_is": partial(checks.one_of, allowed=SIZES),
    "batches": partial(checks.one_of, allowed=(COMPARED, ELSEWHERE)),
    **dict.fromkeys(
        ("epsilon", "epsilon_rdp"), lambda name, value: value == math.inf or checks.non_negative(name, value)
    ),
    "delta": checks.open_unit,
    "noise_multiplier": checks.non_negative,
    "sampling_prob": checks.probability,
    "dataset_size": partial(checks.integer, minimum=1),
    "epoch": checks.non_negative,
    "chosen_score": partial(checks.real, domain="a finite chosen_score"),
}
# Domains of other fields, by their type.
_USUAL: Mapping[type, Callable[[str, Any], object]] = {
    str: partial(checks.line, blank=True), int: checks.integer, float: checks.positive,
}  # fmt: skip
