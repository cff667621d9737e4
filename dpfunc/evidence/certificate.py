"""The certificate of a run or a private search: its claim, what it follows from and assumes; anyone can check it.

May import: its folder, checkpoint and below. Privacy depends on it: no.

It is made from the journal and the record of a run, or from the record of a search. To check it needs this file and
accounting: no data, no torch.
"""

import hashlib
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from dpfunc._utils.files import replace_file
from dpfunc._utils.validation import boolean, expect, hex_digits, unique_json, unsigned
from dpfunc.accounting import Ledger
from dpfunc.accounting.accountant import upper
from dpfunc.accounting.ledger import parsed, to_values
from dpfunc.accounting.record import (
    CLIPS,
    COMPARED,
    COVERED,
    EXACT_SIZE,
    LAWS,
    NEIGHBOURS,
    OTHER_STEPS,
    RECORD_FILE,
    ROWS,
    SECRET,
    SOURCES,
    SelectionRecord,
    check_field,
    claims_law,
    is_proven,
)
from dpfunc.checkpoint.costs import read_cost
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.evidence import _runs, _search
from dpfunc.evidence._basis import CLAIM, Values, events_in
from dpfunc.evidence._figures import ROUNDING, compare_with_opacus
from dpfunc.evidence._page import NO_BUDGET, page
from dpfunc.evidence._runs import RUNS, ledger_of
from dpfunc.evidence._search import SEARCH
from dpfunc.evidence._signature import canonical, digest_of, signature_of, signed, signed_by
from dpfunc.evidence.result import in_certificate

NOBODY = "none: nobody vouches for it"
NO_WEIGHTS = "names no weights: certify again with *.safetensors in the folder of the run"
_PLACE = "privacy_budget.json"  # which `Budget.settle` has left
_BASES = {basis.schema: basis for basis in (RUNS, SEARCH)}
"""Kinds of certificates. A new one is a file like `_search`, and a name here."""


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
    path = Path(out or folder / "certificate.json")
    expect(path.suffix != ".html", "a JSON file, beside which its page (.html) is written", "out", str(path))
    file, place = folder / RECORD_FILE, folder / _PLACE
    record = read_cost(file) if file.is_file() else None
    if isinstance(record, SelectionRecord):
        others = [*map(str, (*evidence, *beside))]
        expect(not others, "no runs beside a search, and no evidence", "files", others, "Certify the runs apart.")
        values = {"schema": SEARCH.schema, **_search.facts_of(folder, record)}
    else:
        expect(
            not beside or not place.is_file(), "no runs beside one with its place in a budget, which counts all runs",
            "beside", [*map(str, beside)], "Leave out beside.",
        )  # fmt: skip
        values = {"schema": RUNS.schema, **_runs.facts_of([_runs.read_run(Path(each)) for each in (run, *beside)])}
    values["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    values["evidence"] = [in_certificate(Path(each), values, folder / "job.json") for each in evidence]
    values["budget"] = unsigned("place in a budget", unique_json(place.read_bytes())) if place.is_file() else None
    values = _whole(values)
    if values["schema"] == RUNS.schema:
        compare_with_opacus(ledger_of(values), values["claim"]["delta"], values["result"])
    if private_key is not None:
        values["signature"] = signed(values, Path(private_key))
    values["digest"] = digest_of(values)
    replace_file(path, canonical(values))
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
    values = parsed(text, "a certificate", *_BASES, hint="Use the version of dpfunc that wrote it.")
    try:
        again = _whole(values)
        same = text == canonical(values).encode()
        same = values.pop("digest", None) == digest_of(values) and same
    except (DPFuncError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InvalidArgument(f"Expected a certificate, got one that does not fit together: {error}") from error
    changed = "other bytes, or another digest: it was changed"
    rows = [Finding("bytes", same, "as they were written" if same else changed)]
    basis, place = _BASES[values["schema"]], again["budget"]
    details = {  # of some parts, after they were computed again
        "claim": f"epsilon={upper(again['claim']['epsilon'])} at delta={again['claim']['delta']:g}",
        "assumptions": f"{sum(each['met'] is False for each in again['assumptions'])} not met",
        "budget": f"run {place['number']}, {place['run']!r}, within epsilon={place['epsilon']:g} with all others"
        if place
        else NO_BUDGET,
    }
    plain = {name: value for name, value in values.items() if name != "signature"}
    for part in sorted(plain.keys() | again.keys() - {"signature"}):
        same = _same(values.get(part), again.get(part))
        differs = f"not what follows from the {basis.part}"
        rows.append(Finding(part, same, details.get(part, "as it follows") if same else differs))
    holds, signer = public_key is None, NOBODY
    if "signature" in values:
        holds, signer = signed_by(values["signature"], canonical(plain).encode(), public_key)
    rows += [
        Finding("signature", holds and _same(values.get("signature"), again.get("signature")), signer),
        Finding("word of who wrote it", True, basis.word),
    ]
    if model is not None:
        given = hashlib.sha256(_content(model, "a file of weights", "model")).hexdigest()
        weights = values["digests"]["model"]
        rows.append(Finding("model", given in weights, given) if weights else Finding("model", None, NO_WEIGHTS))
    return rows


def _content(path: Path | str, what: str, name: str) -> bytes:
    if not Path(path).is_file():
        raise InvalidArgument(f"Expected {what}, got {name}={str(path)!r}, which is no file.")
    return Path(path).read_bytes()


def _whole(given: Values) -> dict[str, Any]:
    """The certificate of facts in the form of one: what follows is computed, and what does not is in its domain."""
    basis, claim, how = _BASES[given["schema"]], given["claim"], given["mechanism"]
    for name in (*CLAIM, *basis.settings):
        value = (claim | how)[name]
        check_field(name, tuple(value) if isinstance(value, list) else value)
    own = claim["not_covered"][: -len(basis.not_covered)]
    values: dict[str, Any] = {
        "schema": basis.schema,
        "date": check_field("date", given["date"]),
        "claim": {
            **{name: claim[name] for name in CLAIM},
            "neighbours": NEIGHBOURS[claim["adjacency"]],
            "delta_below_one_over_records": boolean("delta", claim["delta_below_one_over_records"]),
            "covered": list(COVERED),
            "not_covered": [*dict.fromkeys([*own, *basis.not_covered])],
        },
        "mechanism": {
            **{name: how[name] for name in basis.settings},
            "law": LAWS.get(how["sampler"], "as its events claim: a sampler of the user"),
        },
        "earlier": [*map(to_values, Ledger(events_in(given["earlier"]), claim["adjacency"]).events)],
        "digests": {
            "model": [hex_digits("model", each) for each in given["digests"]["model"]],
            "record": hex_digits("record", given["digests"]["record"]),
            "code": [hex_digits("code", each) for each in given["digests"]["code"]],
        },
        "versions": {name: given["versions"][name] for name in ("dpfunc", "torch", "python")},
    }
    check_field("versions", values["versions"])
    values |= basis.derive(given, values)
    if "signature" in given:
        values["signature"] = signature_of(given["signature"])
    values["assumptions"] = _assumptions(values)
    return values


def _assumptions(values: Values) -> list[dict[str, Any]]:
    """Assumptions of the claim: met by what was recorded, not met, or (null) nothing that a run can show."""
    claim, how, basis = values["claim"], values["mechanism"], _BASES[values["schema"]]
    budget = claim["target_epsilon"]
    held: dict[str, bool | None] = {}
    for each in values["evidence"]:  # of other code it shows nothing, but what it has found there
        shows = (True if each["same_code"] else None) if each["holds"] else False
        known = (held.get(each["kind"]), shows)
        held[each["kind"]] = False if False in known else True if True in known else None
    # an audit trains on the records of the job once more, and its figures are of that run
    audited = any((each["kind"], each["of"]) == ("audit", "job") for each in values["evidence"])
    of_run = {
        "The key of the noise is secret.": how["noise_key"] == SECRET,
        "Noise comes from a cryptographic stream.": how["noise_source"] in SOURCES.values(),
        "The mechanism of the noise is one that is proven.": is_proven(how["mechanism"]),
        "The rule that bounds gradients is one that is proven.": how["clip"] in CLIPS,
        "Batches are the draws of the sampler: each was compared.": how["batches"] == COMPARED,
        "The law of the sampler is one that is proven.": claims_law(how["sampler"], basis.events(values)),
        "No row changes the gradient of another.": how["rows"] in ROWS[:2],
    }
    if values["earlier"] or OTHER_STEPS in claim["not_covered"]:  # this run shows nothing of other steps
        of_run = {says: False if value is False else None for says, value in of_run.items()}
    met = of_run | {
        "Delta is below 1 / number of records.": claim["delta_below_one_over_records"],
        "Epsilon is within the budget of the plan.": budget is None or claim["epsilon"] <= budget * (1 + ROUNDING),
        "The number of records is not published by the record of the run.": EXACT_SIZE not in claim["not_covered"],
        **basis.assumptions(values),
        "On neighbouring records nothing moves but the clipped sum (replay).": held.get("replay"),
        "Guesses which canaries were in do not refute the claim (audit).": held.get("audit"),
        **({"Results of replays and audits are as their files say: nobody has signed these.": None} if held else {}),
        "The run has its place in a budget that runs on the same records share.": True if values["budget"] else None,
        "A row of a batch is one unit, and a unit is in one row.": None,
        "No other run on the same records was looked at, or it is counted here.": False if audited else None,
        "Rounding of floating-point numbers and the time of a step reveal nothing.": None,
    }
    return [{"says": says, "met": value} for says, value in met.items()]


def _same(said: Any, again: Any) -> bool:
    """True if two JSON values are the same, up to how versions of numpy and scipy round numbers."""
    if type(said) is not type(again):
        return False
    if isinstance(again, dict):
        return said.keys() == again.keys() and all(_same(said[name], value) for name, value in again.items())
    if isinstance(again, list):
        return len(said) == len(again) and all(map(_same, said, again))
    return said == again or (isinstance(again, float) and math.isclose(said, again, rel_tol=ROUNDING, abs_tol=1e-14))
