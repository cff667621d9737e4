"""The certificate of a run or a private search: its claim, what it follows from and assumes; anyone can check it.

May import: its folder, checkpoint and below. Trusted: no.

It is made from the journal and the record of a run, or from the record of a search. To check it needs this file and
accounting: no data, no torch.
"""

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from dpfunc._utils.files import replace_file, sha256
from dpfunc._utils.validation import boolean, digest, expect, fail, integer, positive, unique_json, unsigned
from dpfunc.accounting import Ledger
from dpfunc.accounting._rdp import composed_curve, converted
from dpfunc.accounting._trade_off import RATES, Point, curve, points_of, tight_method, true_positives
from dpfunc.accounting.accountant import fewer_kinds
from dpfunc.accounting.events import divided
from dpfunc.accounting.ledger import from_values, parsed, to_values
from dpfunc.accounting.record import (
    CLIPS,
    COMPARED,
    COVERED,
    EXACT_SIZE,
    LAWS,
    NEIGHBOURS,
    NOT_COVERED,
    RECORD_FILE,
    ROWS,
    SEARCH_NOT_COVERED,
    SECRET,
    SETTINGS,
    SOURCES,
    Record,
    SelectionRecord,
    check_field,
    claims_law,
    is_proven,
    recorded,
)  # fmt: skip
from dpfunc.checkpoint import _chain as chain
from dpfunc.checkpoint.costs import read_cost
from dpfunc.checkpoint.journal import Taken, read_steps, steps_ledger, whole_ledger
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.evidence._page import NO_BUDGET, page
from dpfunc.evidence._result import entry, in_certificate
from dpfunc.evidence._search import counted, facts_of
from dpfunc.types import Adjacency, Event

SCHEMA, SEARCH = "dpfunc.certificate/2", "dpfunc.certificate_of_search/1"
_ROUNDING = 1e-6  # relative; other versions of numpy and scipy round in other ways
_RECORDED = 1e-4  # relative: up to which the epsilon of a record may be below the one that is computed now
_ORDERS = tuple(round(64 * 1.15**k) for k in range(20))  # beside those that Opacus has by itself
_OPACUS = (*(1 + k / 10 for k in range(1, 100)), *map(float, range(12, 64)))

_WORD = {
    SCHEMA: "steps, earlier runs, date, unit, bound of gradients, budgets, evidence, digests",
    SEARCH: "law of the number of runs, steps of each candidate, noise of the score, earlier runs, date, unit, budget, "
    "digests",
}
NOBODY = "none: nobody vouches for it"
NO_WEIGHTS = "names no weights: certify again with *.safetensors in the folder of the run"
_NEEDED = 'Signatures need the package cryptography: pip install "dpfunc[sign]".'

_CLAIM = ("unit", "adjacency", "delta", "epsilon", "accountant", "target_epsilon", "not_covered")
_SETTINGS = (*SETTINGS, "max_grad_norm", "noise_key")
_SIGNED = {"public_key": 64, "value": 128}
_PLACE = "privacy_budget.json"  # which `Budget.settle` has left
_PLACED = ("unit", "adjacency", "delta")  # which it has alike with the run
_ERRORS = {
    "tilted": "an upper bound, at most 0.1 % above the truth, nearly always 0.01 %",
    "gaussian": "exact, rounded up by 1e-9 of itself",
    "rdp of a search": "an upper bound for the best of several runs: Papernot and Steinke 2022, Theorems 2 and 6",
    "opacus": "an upper bound, typically 5 to 30 % above the truth",
    "rdp": "an upper bound, typically 5 to 30 % above the truth; it shares the privacy loss of a step with the first",
}


# Assumptions of a search alone, about its accountant and its runs.
_OF_A_SEARCH: dict[str, bool | None] = {
    "A second accountant, which shares no code with the first, has found this epsilon.": False,
    "The grid and the law of the number of runs were chosen without a look at the records.": None,
    "Nobody has seen how many runs there were, or any run but the released one.": None,
    "No record was both trained on and scored.": None,
}


class Finding(NamedTuple):
    """Result of one check: its name, True if it agrees, None if nothing can be compared, and what was found."""

    name: str
    agrees: bool | None
    found: str


def certify(
    run: Path | str, *, out: Path | str | None = None, private_key: Path | str | None = None,
    evidence: Sequence[Path | str] = (), beside: Sequence[Path | str] = (),
) -> Path:  # fmt: skip
    """Write the certificate of a run or a private search, a JSON file, and beside it a page to print (`.html`).

    Steps, epsilon by two accountants, trade-off curve and what an attacker can reach are computed again from the
    journal. The record adds what the journal does not have, and must agree with it. A search has no journal: epsilon
    and curve follow from the law of the number of its runs and from what one run of each candidate costs.

    Args:
        run: folder with a journal (`*journal.jsonl`) and a record (`privacy_accounting.json`). Weights in
            `*.safetensors`, in it or in its folder `model`, are the model. Or the folder of `dpfunc tune --private`,
            whose weights must be those that the search released.
        out: the JSON file; `certificate.json` in the folder by default. A file that is there is replaced.
        private_key: an Ed25519 key (PEM) to sign with. It needs the extra `sign`.
        evidence: files of `dpfunc verify --out` and `dpfunc audit --out`: their verdicts, without what they measured on
            single records. One of another plan, job or run is refused.
        beside: folders of other runs on the same records, e.g. of a sweep. Their steps are added to those of `run`:
            name none that `run`, or another one of them, has counted. Unit, neighbours and mechanism must be the same;
            the claim holds at the delta of `run`, and the bound of gradients is the largest.

    Returns:
        Path of the JSON file. It may be published, as the record may: it has no number of records, no batch, no order
        and no name of a file.

    Raises:
        InvalidArgument: a file that is missing or cannot be read, or a claim that does not follow from the journal;
            a search that released nothing, or other weights.
        CheckpointError: a journal that lost lines.

    Guarantees:
        tests/evidence/test_certificate.py: one changed byte is found (test_one_changed_byte_is_found), what does not
        follow is refused (test_what_cannot_be_derived_is_refused), steps of several runs add up
        (test_one_certificate_of_several_runs), the exact curve of the Gaussian mechanism
        (test_figures_of_the_gaussian_mechanism). tests/evidence/test_search.py: the same of a search
        (test_a_forged_search_is_refused, test_weights_of_something_else_are_refused).

    >>> certify("nowhere")
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected the folder of a run with privacy_accounting.json in it, got run='nowhere'.
    """
    folder = Path(run)
    file, place = folder / RECORD_FILE, folder / _PLACE
    found = read_cost(file) if file.is_file() else None
    if isinstance(found, SelectionRecord):
        others = [*map(str, (*evidence, *beside))]
        expect(not others, "no runs beside a search, and no evidence", "files", others, "Certify the runs apart.")
        values = {"schema": SEARCH, **facts_of(folder, found, _weights(folder))}
    else:
        expect(
            not beside or not place.is_file(), "no runs beside one with its place in a budget, which counts all runs",
            "beside", [*map(str, beside)], "Leave out beside.",
        )  # fmt: skip
        values = {"schema": SCHEMA, **_facts_of_runs([_read_run(Path(each)) for each in (run, *beside)])}
    values["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    values["evidence"] = [in_certificate(Path(each), values, folder / "job.json") for each in evidence]
    values["budget"] = unsigned("place in a budget", unique_json(place.read_bytes())) if place.is_file() else None
    values = _whole(values)
    if values["schema"] == SCHEMA:
        _compare_with_opacus(ledger_of(values), values["claim"]["delta"], values["result"])
    if private_key is not None:
        key = _read_key("private", Path(private_key))
        public, signature = key.public_key().public_bytes_raw().hex(), key.sign(_canonical(values).encode()).hex()
        values["signature"] = {"algorithm": "Ed25519", "public_key": public, "value": signature}
    values["digest"] = _digest(values)
    path = Path(out or folder / "certificate.json")
    replace_file(path, _canonical(values))
    replace_file(path.with_suffix(".html"), page(values))
    return path


def check(path: Path | str, public_key: Path | str | None = None, model: Path | str | None = None) -> list[Finding]:
    """Check a certificate: that it is unchanged, and that all that can be computed follows from its steps.

    Args:
        path: of the JSON file. public_key: the Ed25519 key (PEM) of who should have signed it.
        model: a file of weights that it should be about, by its digest.

    Returns:
        What was compared. All that a certificate shows is computed again from its steps and compared, or is one of the
        few facts that its author states, which are checked to be in their domains. It holds if all agree;
        assumptions that are not met are no error of it.

    Raises:
        InvalidArgument: a file that is no certificate.

    >>> check("nowhere.json")
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a certificate, got path='nowhere.json', which is no file.
    """
    text = _content(path, "a certificate", "path")
    values = parsed(text, "a certificate", SCHEMA, SEARCH, hint="Use the version of dpfunc that wrote it.")
    try:
        again = _whole(values)
        same = text == _canonical(values).encode()
        same = values.pop("digest", None) == _digest(values) and same
    except (DPFuncError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InvalidArgument(f"Expected a certificate, got one that does not fit together: {error}") from error
    changed = "other bytes, or another digest: it was changed"
    rows = [Finding("bytes", same, "as they were written" if same else changed)]
    plain = {name: value for name, value in values.items() if name != "signature"}
    basis = "steps" if values["schema"] == SCHEMA else "search"
    place = again["budget"]
    details = {  # of some parts, after they were computed again
        "claim": f"epsilon={again['claim']['epsilon']:.6g} at delta={again['claim']['delta']:g}",
        "assumptions": f"{sum(each['met'] is False for each in again['assumptions'])} not met",
        "budget": f"run {place['number']}, {place['run']!r}, within epsilon={place['epsilon']:g} with all others"
        if place
        else NO_BUDGET,
    }
    for part in sorted(plain.keys() | again.keys() - {"signature"}):
        same = _same(values.get(part), again.get(part))
        rows.append(
            Finding(part, same, details.get(part, "as it follows") if same else f"not what follows from the {basis}")
        )
    named, none = "signature" in values, (public_key is None, NOBODY)
    signed = _signed_by(values["signature"], _canonical(plain).encode(), public_key) if named else none
    named_as = _same(values.get("signature"), again.get("signature"))
    rows += [
        Finding("signature", signed[0] and named_as, signed[1]),
        Finding("word of who wrote it", True, _WORD[values["schema"]]),
    ]
    if model is not None:
        found = hashlib.sha256(_content(model, "a file of weights", "model")).hexdigest()
        weights = values["digests"]["model"]
        rows.append(Finding("model", found in weights, found) if weights else Finding("model", None, NO_WEIGHTS))
    return rows


def _content(path: Path | str, what: str, name: str) -> bytes:
    if not Path(path).is_file():
        raise InvalidArgument(f"Expected {what}, got {name}={str(path)!r}, which is no file.")
    return Path(path).read_bytes()


def ledger_of(values: Mapping[str, Any]) -> Ledger:
    """The ledger of the steps in a certificate, earlier ones included."""
    events = [from_values(event) for event in values["earlier"]]
    for row in values["steps"]:
        count = row["last"] - row["first"] + 1
        one = [from_values(event) for event in row["events"]]
        events += [dataclasses.replace(event, num_steps=event.num_steps * count) for event in one]
    return Ledger(tuple(events), cast(Adjacency, values["claim"]["adjacency"]))


class _Part(NamedTuple):
    """Record and steps of a run, and digests of its files, from its folder."""

    record: Record
    runs: dict[str, dict[int, Taken]]
    journal: str  # of its end
    file: str  # of the record
    weights: list[str]
    code: set[str]


def _digest_of(digests: Sequence[str]) -> str:
    """The digest of one file; of several that of all their digests, as long as one of them."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[: len(digests[0])]


def _together(parts: Sequence[_Part]) -> tuple[Record, dict[str, dict[int, Taken]]]:
    """The record of the first run with the steps of all runs, and these steps; refused unless it can be said of all."""
    first, *others = (part.record for part in parts)
    runs = {name: taken for part in parts for name, taken in part.runs.items()}
    if not others:
        return first, runs
    expect(len(runs) == sum(len(part.runs) for part in parts), "each run in one folder", "runs", [*runs])
    for name in ("unit", "adjacency", *(name for name in _SETTINGS if name != "max_grad_norm")):
        for other in others:
            expect(
                getattr(other, name) == getattr(first, name), f"{name} {getattr(first, name)!r} in each run", name,
                getattr(other, name), "Certify them apart.",
            )  # fmt: skip
    ledger = first.ledger.compose(*(other.ledger for other in others))
    answer = ledger.epsilon(first.delta)
    own = dict.fromkeys(says for record in (first, *others) for says in record.not_covered[: -len(NOT_COVERED)])
    return dataclasses.replace(
        first, ledger=ledger, epsilon=answer.epsilon, accountant=answer.method, not_covered=(*own, *NOT_COVERED),
        max_grad_norm=max(record.max_grad_norm for record in (first, *others)),
    ), runs  # fmt: skip


def _read_run(folder: Path) -> _Part:
    """The record of a run and the steps in its journal, which must agree, and the digests of its files."""
    expect((folder / RECORD_FILE).is_file(), f"the folder of a run with {RECORD_FILE} in it", "run", str(folder))
    journals = sorted(folder.glob("*journal.jsonl"))
    expect(
        len(journals) == 1, "one journal (*journal.jsonl) in the folder of the run", "journals", len(journals),
        "" if journals else "A private search leaves none: certify it apart.",
    )  # fmt: skip
    record, runs = Record.from_json((folder / RECORD_FILE).read_bytes()), read_steps(journals[0])
    charged = whole_ledger(runs.values())
    if record.run not in runs or charged != record.ledger:
        raise InvalidArgument(
            f"Expected a record of all that the journal has, {charged} of {[*runs]}, got one of {record.ledger} of run "
            f"{record.run!r}. What the record claims cannot be derived. Make the record at the end of the run, or "
            "restore it, with the journal of its own run."
        )
    lines, job = chain.read_chain(journals[0]), folder / "job.json"
    code = {str(line.get("code") or "") for _, line in lines} | {sha256(job) if job.is_file() else ""}
    file = sha256(folder / RECORD_FILE)
    return _Part(record, runs, lines[-1][0].digest, file, _weights(folder), code - {""})


def _weights(folder: Path) -> list[str]:
    """Digests of the files of the released model; checkpoints, which hold the key, are in folders of their own."""
    return [*map(sha256, sorted([*folder.glob("*.safetensors"), *(folder / "model").rglob("*.safetensors")]))]


def _facts_of_runs(parts: Sequence[_Part]) -> dict[str, Any]:
    """The facts in a certificate of runs: record and steps of all of them, and digests of their files."""
    record, runs = _together(parts)
    plain, earlier = json.loads(record.to_json()), record.ledger.beyond(steps_ledger(runs.values()))
    small = all(record.delta * part.record.dataset_size < 1 for part in parts)
    return {
        "claim": {**{name: plain[name] for name in _CLAIM}, "delta_below_one_over_records": small},
        "mechanism": {name: plain[name] for name in _SETTINGS},
        "steps": _rows(runs),
        "earlier": [to_values(event) for event in earlier.events],
        "digests": {
            "model": [digest for part in parts for digest in part.weights],
            "data_order": list(runs),  # a fingerprint of the key, of which all draws are functions
            "journal": _digest_of([part.journal for part in parts]),
            "record": _digest_of([part.file for part in parts]),
            "code": sorted({digest for part in parts for digest in part.code}),
        },
        "versions": plain["versions"],
    }


def _rows(runs: Mapping[str, Mapping[int, Taken]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, taken in runs.items():
        for step in sorted(taken):
            events = [to_values(event) for event in taken[step].events]
            if rows and rows[-1] == {"run": name, "first": rows[-1]["first"], "last": step - 1, "events": events}:
                rows[-1]["last"] = step
            else:
                rows.append({"run": name, "first": step, "last": step, "events": events})
    return rows


def _whole(given: Mapping[str, Any]) -> dict[str, Any]:
    """The certificate of facts in the form of one: what follows is computed, and what does not is in its domain."""
    claim, how, digests = given["claim"], given["mechanism"], given["digests"]
    # of runs, or of a search, whose candidates may differ in the bound of gradients
    of_runs = given["schema"] == SCHEMA
    settings = _SETTINGS if of_runs else (*SETTINGS, "noise_key")
    never_covered = NOT_COVERED if of_runs else (*SEARCH_NOT_COVERED, *NOT_COVERED)
    for name in (*_CLAIM, *settings):
        value = (claim | how)[name]
        check_field(name, tuple(value) if isinstance(value, list) else value)
    own = _of_runs(given) if of_runs else _of_search(given)
    earlier = Ledger(_events(given["earlier"]), claim["adjacency"])
    values: dict[str, Any] = {
        "schema": given["schema"],
        "date": check_field("date", given["date"]),
        "claim": {
            **{name: claim[name] for name in _CLAIM},
            "neighbours": NEIGHBOURS[claim["adjacency"]],
            "delta_below_one_over_records": boolean("delta", claim["delta_below_one_over_records"]),
            "covered": list(COVERED),
            "not_covered": [*dict.fromkeys([*claim["not_covered"][: -len(never_covered)], *never_covered])],
        },
        "mechanism": {
            **{name: how[name] for name in settings},
            "law": LAWS.get(how["sampler"], "as its events claim: a sampler of the user"),
        },
        **own,
        "earlier": [to_values(event) for event in earlier.events],
        "digests": {
            **own["digests"],
            "model": [digest("model", each) for each in digests["model"]],
            "record": digest("record", digests["record"]),
            "code": [digest("code", each) for each in digests["code"]],
        },
        "versions": {name: given["versions"][name] for name in ("dpfunc", "torch", "python")},
    }
    check_field("versions", values["versions"])
    results = {each["file"]: entry(each, values["digests"]) for each in given["evidence"]}  # each once
    values["evidence"] = sorted(results.values(), key=lambda each: (each["kind"], each["file"]), reverse=True)
    values["budget"] = None if given["budget"] is None else _placed(given["budget"], values)
    if "signature" in given:
        kept = {name: digest(name, given["signature"][name], length) for name, length in _SIGNED.items()}
        values["signature"] = {"algorithm": "Ed25519", **kept}
    values["assumptions"] = _assumptions(values)
    return values


def _of_runs(given: Mapping[str, Any]) -> dict[str, Any]:
    """The steps in a certificate of runs, and what follows from them."""
    claim, ledger, steps = given["claim"], ledger_of(given), _joined(given["steps"], bool(given["earlier"]))
    if recorded(ledger, claim["delta"], claim["epsilon"], claim["accountant"], _RECORDED) is None:
        raise fail(
            f"an upper bound of the steps, {ledger.epsilon(claim['delta']).epsilon:.6g}", "epsilon", claim["epsilon"],
            "What is claimed does not follow from the steps.",
        )  # fmt: skip
    order = [digest("run", run, 16) for run in dict.fromkeys(row["run"] for row in steps)]
    journal = digest("journal", given["digests"]["journal"], 32)
    return {
        "steps": steps,
        "result": _result(ledger, claim["delta"]),
        "digests": {"data_order": order, "journal": journal},
    }


def _of_search(given: Mapping[str, Any]) -> dict[str, Any]:
    """The search in a certificate of one, and what follows from it."""
    claim, search = given["claim"], counted(given)
    points = points_of(search.epsilon, claim["delta"])
    found = dict(points)[claim["delta"]]
    expect(
        math.isclose(found, claim["epsilon"], rel_tol=_RECORDED), f"the cost of the search, {found:.6g}", "epsilon",
        claim["epsilon"], "What is claimed does not follow from the number of its runs, candidates and noise.",
    )  # fmt: skip
    expect(claim["accountant"] == "rdp", "rdp, which alone can count a search", "accountant", claim["accountant"])
    expect(given["digests"]["model"], "the weights that the search released", "model", [])
    expect(not given["evidence"], "no replay and no audit of a search", "evidence", len(given["evidence"]))
    expect(given["budget"] is None, "no place of a search in a budget", "budget", given["budget"])
    return {"search": search.values(), "result": _shown(points, ("rdp of a search", found)), "digests": {}}


def _events(values: Any) -> tuple[Event, ...]:
    return tuple(map(from_values, values))


def _joined(rows: Sequence[Mapping[str, Any]], earlier: bool) -> list[dict[str, Any]]:
    """Rows of the steps of runs as `_rows` makes them: each run after the other, each step once, and none left out."""
    ends: dict[str, int] = {}
    made: list[dict[str, Any]] = []
    for row in rows:
        run, first = row["run"], integer("first", row["first"])
        row = {"run": run, "first": first, "last": integer("last", row["last"], minimum=first)}
        row["events"] = [to_values(event) for event in _events(rows[len(made)]["events"])]
        goes_on = bool(made) and made[-1]["run"] == run
        # a run that begins later continues another one, or one that had no journal
        new = run not in ends and (first == 0 or earlier or any(first <= end for end in ends.values()))
        expect(
            first == ends[run] and row["events"] != made[-1]["events"] if goes_on else new,
            "each step of each run once, in order", "steps", f"{first} of run {run}",
        )  # fmt: skip
        ends[run] = row["last"] + 1
        made.append(row)
    return made


def _placed(place: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A place in a budget, with which all that others were charged and the own steps fit."""
    claim, own = values["claim"], ledger_of({**values, "earlier": []})
    others, most = Ledger(_events(place["others"]), own.adjacency), positive("epsilon", place["epsilon"])
    for name in (name for name in _PLACED if place[name] != claim[name]):
        raise fail(f"a run with the {name} of its budget, {place[name]!r}", name, claim[name])
    total = others.compose(own).epsilon(values["claim"]["delta"]).epsilon
    expect(total <= most * (1 + _ROUNDING), f"all runs within the budget of the data set, {most:g}", "epsilon", total)
    return {
        "run": check_field("unit", place["run"]),
        "number": integer("number", place["number"], minimum=1),
        "epsilon": place["epsilon"],
        **{name: values["claim"][name] for name in _PLACED},
        "others": [to_values(event) for event in others.events],
    }


def _result(ledger: Ledger, delta: float) -> dict[str, Any]:
    points, method = curve(ledger, delta), tight_method(ledger)
    tight, second = dict(points)[delta], "opacus" if _is_plain(ledger) else "rdp"
    expect(
        math.isfinite(tight), "steps with noise", "epsilon", tight, "Nothing is protected, so nothing can be certified."
    )
    other = _by_renyi(ledger, delta) if second == "opacus" else ledger.epsilon(delta, "rdp").epsilon
    return _shown(points, (method, tight), (second, other))


def _shown(points: Sequence[Point], *found: tuple[str, float]) -> dict[str, Any]:
    """A trade-off curve, what an attacker can reach, and the epsilons that accountants have found."""
    return {
        "epsilon": min(value for _, value in found),
        "accountants": [{"name": name, "epsilon": value, "error": _ERRORS[name]} for name, value in found],
        "curve": [list(point) for point in points],
        "attacker": [{"false_positives": rate, "true_positives": true_positives(points, rate)} for rate in RATES],
    }


def _by_renyi(ledger: Ledger, delta: float) -> float:
    """Epsilon of the Renyi accountant at the orders of Opacus. A check of a certificate needs no Opacus for it."""
    orders = (*_OPACUS, *map(float, _ORDERS))
    return converted(composed_curve(fewer_kinds(ledger.law)[0], ledger.adjacency, orders), orders, delta)


def _is_plain(ledger: Ledger) -> bool:
    """True if the accountant of Opacus has the events and the neighbours."""
    return ledger.adjacency != "replace_one" and not divided(ledger.law)[1]


def _compare_with_opacus(ledger: Ledger, delta: float, result: Mapping[str, Any]) -> None:
    """Compare the second accountant, which a check computes without Opacus, with Opacus itself."""
    if not _is_plain(ledger):
        return
    from opacus.accountants import RDPAccountant

    accountant, known = RDPAccountant(), result["accountants"][1]["epsilon"]
    accountant.history.extend((e.noise_multiplier, e.sampling_prob, e.num_steps) for e in fewer_kinds(ledger.law)[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is the", UserWarning)  # of Opacus: looser, and still a bound
        epsilon = float(accountant.get_epsilon(delta, alphas=[*RDPAccountant.DEFAULT_ALPHAS, *_ORDERS]))
    expect(
        math.isclose(max(epsilon, 0.0), known, rel_tol=_ROUNDING, abs_tol=1e-9),
        f"epsilon={known:.9g} by the accountant of Opacus", "epsilon", epsilon, "Report these steps.",
    )  # fmt: skip


def _assumptions(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Assumptions of the claim: met by what was recorded, not met, or (null) nothing that a run can show."""
    claim, how = values["claim"], values["mechanism"]
    budget = claim["target_epsilon"]
    if values["schema"] == SEARCH:
        events = counted(values).events
        of_accountants = _OF_A_SEARCH
    else:
        events = ledger_of({**values, "earlier": []}).events
        second = values["result"]["accountants"][1]["name"]
        of_accountants = {"The two accountants share no code.": second == "opacus"}
    held: dict[str, bool | None] = {}
    for each in values["evidence"]:  # of other code it shows nothing, but what it has found there
        shows = (True if each["same_code"] else None) if each["holds"] else False
        known = (held.get(each["kind"]), shows)
        held[each["kind"]] = False if False in known else True if True in known else None
    met = {
        "The key of the noise is secret.": how["noise_key"] == SECRET,
        "Noise comes from a cryptographic stream.": how["noise_source"] in SOURCES.values(),
        "The mechanism of the noise is one that is proven.": is_proven(how["mechanism"]),
        "The rule that bounds gradients is one that is proven.": how["clip"] in CLIPS,
        "Batches are the draws of the sampler: each was compared.": how["batches"] == COMPARED,
        "The law of the sampler is one that is proven.": claims_law(how["sampler"], events),
        "No row changes the gradient of another.": how["rows"] in ROWS[:2],
        "Delta is below 1 / number of records.": claim["delta_below_one_over_records"],
        "Epsilon is within the budget of the plan.": budget is None or claim["epsilon"] <= budget * (1 + _ROUNDING),
        "The number of records is not published by the record of the run.": EXACT_SIZE not in claim["not_covered"],
        **of_accountants,
        "On neighbouring records nothing moves but the clipped sum (replay).": held.get("replay"),
        "Guesses which canaries were in do not refute the claim (audit).": held.get("audit"),
        **({"Results of replays and audits are as their files say: nobody has signed these.": None} if held else {}),
        "The run has its place in a budget that runs on the same records share.": True if values["budget"] else None,
        "A row of a batch is one unit, and a unit is in one row.": None,
        "No other run on the same records was looked at, or it is counted here.": None,
        "Rounding of floating-point numbers and the time of a step reveal nothing.": None,
    }
    return [{"says": says, "met": value} for says, value in met.items()]


def _same(said: Any, found: Any) -> bool:
    """True if two JSON values are the same, up to how versions of numpy and scipy round numbers."""
    if type(said) is not type(found):
        return False
    if isinstance(found, dict):
        return said.keys() == found.keys() and all(_same(said[name], value) for name, value in found.items())
    if isinstance(found, list):
        return len(said) == len(found) and all(map(_same, said, found))
    return said == found or (isinstance(found, float) and math.isclose(said, found, rel_tol=_ROUNDING, abs_tol=1e-9))


def _signed_by(signature: Any, content: bytes, public_key: Path | str | None) -> tuple[bool, str]:
    """True if a content has this signature, by the given key or else by the one beside it; and what was found."""
    given = None if public_key is None else _read_key("public", Path(public_key)).public_bytes_raw()
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return False, f"not checked. {_NEEDED}"
    try:
        beside = bytes.fromhex(signature["public_key"])
        Ed25519PublicKey.from_public_bytes(given or beside).verify(bytes.fromhex(signature["value"]), content)
    except (InvalidSignature, ValueError):
        return False, "not of this content and key"
    if given is None:
        return True, f"by {beside.hex()}; whose key that is was not checked: --public-key"
    return beside == given, f"by {given.hex()}"


def _read_key(kind: str, path: Path) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    except ImportError as error:
        raise InvalidArgument(_NEEDED) from error
    private, domain = kind == "private", f"an Ed25519 {kind} key"
    hint = ", without a password: openssl genpkey -algorithm ed25519 -out key.pem" if private else ""
    try:
        text = path.read_bytes()
        key: object = (
            serialization.load_pem_private_key(text, password=None)
            if private else serialization.load_pem_public_key(text)
        )  # fmt: skip
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgument(f"Expected {domain} (PEM{hint}) in {str(path)!r}: {error}.") from error
    if not isinstance(key, Ed25519PrivateKey if private else Ed25519PublicKey):
        raise fail(domain, f"{kind}_key", type(key).__name__)
    return key


def _canonical(values: Mapping[str, Any]) -> str:
    """The one text of these values: names sorted, and each number as Python writes it."""
    return json.dumps(values, sort_keys=True, indent=1, allow_nan=False) + "\n"


def _digest(values: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in values.items() if name != "digest"}
    return hashlib.sha256(_canonical(plain).encode()).hexdigest()
