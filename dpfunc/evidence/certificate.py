"""The certificate of a run: its claim, all that the claim follows from, and what it assumes; anyone can check it.

It is made from the journal and the record of a run. To check it needs this file and accounting: no data, no torch.
"""

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from dpfunc._utils.validation import fail, unique_json, unsigned
from dpfunc.accounting import Ledger
from dpfunc.accounting._trade_off import RATES, curve, tight_method, true_positives
from dpfunc.accounting.accountant import fewer_kinds
from dpfunc.accounting.events import check_fields, divided, from_values, to_values
from dpfunc.accounting.ledger import parsed
from dpfunc.accounting.record import COMPARED, COVERED, EXACT_SIZE, NEIGHBOURS, RECORD_FILE, SECRET, Record
from dpfunc.checkpoint import _chain as chain
from dpfunc.checkpoint.journal import Taken, read_steps, steps_ledger, whole_ledger
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.evidence._page import page
from dpfunc.evidence._result import in_certificate
from dpfunc.types import Adjacency

SCHEMA = "dpfunc.certificate/1"
_FILE = "certificate.json"
_ROUNDING = 1e-6  # relative; other versions of numpy and scipy round in other ways
_RECORDED = 1e-4  # relative: up to which the epsilon of a record may be below the one that is computed now
_ORDERS = tuple(round(64 * 1.15**k) for k in range(20))  # beside those that Opacus has by itself

_NEEDED = 'Signatures need the package cryptography: pip install "dpfunc[sign]".'
_MADE = ", without a password: openssl genpkey -algorithm ed25519 -out key.pem"

_LAWS = {
    "Poisson": "each unit is in a batch with probability sampling_prob, independently of all others and of other steps",
    "FixedSize": "a fixed number of different units, drawn anew each step, without replacement",
    "CappedPoisson": "as Poisson; if there are more units than the cap, a random subset of that size",
    "RandomAllocation": "each unit in one batch of an epoch, drawn independently of all others",
    "Shuffled": "a new permutation each epoch, in batches; no amplification is claimed",
    "InOrder": "each unit in one batch of an epoch, in the order of the data set; no amplification is claimed",
}
"""Class of a sampler -> its law. That of another class is the claim of who wrote it."""

_FIELDS = (
    "schema", "date", "claim", "mechanism", "steps", "earlier", "result", "evidence", "assumptions", "digests",
    "versions", "digest",
)  # fmt: skip
_OPTIONAL = {"signature", "budget"}
_SETTINGS = ("sampler", "clip", "max_grad_norm", "mechanism", "noise_source", "noise_key", "rows", "batches")
_PLACE = "privacy_budget.json"  # which `Budget.settle` has left
_ERRORS = {
    "tilted": "an upper bound, at most 0.1 % above the truth, nearly always 0.01 %",
    "gaussian": "exact, rounded up by 1e-9 of itself",
    "opacus": "an upper bound, typically 5 to 30 % above the truth",
    "rdp": "an upper bound, typically 5 to 30 % above the truth; it shares the privacy loss of a step with the first",
}


class Finding(NamedTuple):
    """Result of one check: its name, True if it agrees, and what was found."""

    name: str
    agrees: bool
    found: str


def certify(
    run: Path | str, *, out: Path | str | None = None, private_key: Path | str | None = None,
    evidence: Sequence[Path | str] = (),
) -> Path:  # fmt: skip
    """Write the certificate of a run, a JSON file, and beside it the same as a page to print (`.html`).

    Steps, epsilon by two accountants, trade-off curve and what an attacker can reach are computed again from the
    journal. The record adds what the journal does not have, and must agree with it.

    Args:
        run: folder with a journal (`*journal.jsonl`) and a record (`privacy_accounting.json`). Weights in
            `*.safetensors`, in it or in its folder `model`, are the model.
        out: the JSON file; `certificate.json` in the folder by default. A file that is there is replaced.
        private_key: an Ed25519 key (PEM) to sign with. It needs the extra `sign`.
        evidence: files of `dpfunc verify --out` and `dpfunc audit --out`: their verdicts, without what they measured on
            single records. One of another plan, job or run is refused.

    Returns:
        Path of the JSON file. It may be published, as the record may: it has no number of records, no batch, no order
        and no name of a file.

    Raises:
        InvalidArgument: a file that is missing or cannot be read, or a claim that does not follow from the journal.
        CheckpointError: a journal that lost lines.

    Guarantees:
        tests/evidence/test_certificate.py: one changed byte is found (test_one_changed_byte_is_found), what does not
        follow is refused (test_what_cannot_be_derived_is_refused), the exact curve of the Gaussian mechanism
        (test_figures_of_the_gaussian_mechanism).

    >>> certify("nowhere")
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected the folder of a run with privacy_accounting.json in it, got run='nowhere'.
    """
    folder = Path(run)
    record, runs, journal = _read_run(folder)
    ledger = whole_ledger(runs.values())
    earlier = ledger.beyond(steps_ledger(runs.values()))
    # files of the released model: checkpoints, which hold the key, are in folders of their own
    weights = sorted([*folder.glob("*.safetensors"), *(folder / "model").rglob("*.safetensors")])
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "claim": {
            **{name: getattr(record, name) for name in ("unit", "adjacency", "delta", "epsilon", "target_epsilon")},
            "neighbours": NEIGHBOURS[record.adjacency],
            "delta_below_one_over_records": record.delta * record.dataset_size < 1,
            "covered": list(COVERED),
            "not_covered": list(record.not_covered),
        },
        "mechanism": {
            **{name: getattr(record, name) for name in _SETTINGS},
            "law": _LAWS.get(record.sampler, "as its events claim: a sampler of the user"),
        },
        "steps": _rows(runs),
        "earlier": [to_values(event) for event in earlier.events],
        "result": _result(record, ledger),
        "digests": {
            "model": [chain.sha256(path) for path in weights],
            "data_order": list(runs),  # a fingerprint of the key, of which all draws are functions
            "journal": chain.read_chain(journal)[-1][0].digest,
            "record": chain.sha256(folder / RECORD_FILE),
        },
        "versions": dict(record.versions),
    }
    values["evidence"] = [in_certificate(Path(file), values, folder / "job.json") for file in evidence]
    if (folder / _PLACE).is_file():
        values["budget"] = _place(folder / _PLACE, values["claim"])
    values["assumptions"] = _assumptions(values)
    if private_key is not None:
        key = _read_key("private", Path(private_key))
        public, signature = key.public_key().public_bytes_raw().hex(), key.sign(_canonical(values).encode()).hex()
        values["signature"] = {"algorithm": "Ed25519", "public_key": public, "value": signature}
    values["digest"] = _digest(values)
    path = Path(out or folder / _FILE)
    chain.replace_file(path, _canonical(values))
    chain.replace_file(path.with_suffix(".html"), page(values))
    return path


def check(path: Path | str, public_key: Path | str | None = None, model: Path | str | None = None) -> list[Finding]:
    """Check a certificate: that it is unchanged, and that all that can be computed follows from its steps.

    Args:
        path: of the JSON file. public_key: the Ed25519 key (PEM) of who should have signed it.
        model: a file of weights that it should be about, by its digest.

    Returns:
        What was compared. The certificate holds if all agree; assumptions that are not met are no error of it.

    Raises:
        InvalidArgument: a file that is no certificate.

    >>> check("nowhere.json")
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a certificate, got path='nowhere.json', which is no file.
    """
    text = _content(path, "a certificate", "path")
    values = _read(text)
    try:
        same = text == _canonical(values).encode() and values["digest"] == _digest(values)
        bytes_ = "as they were written" if same else "other bytes, or another digest: it was changed"
        rows = [Finding("bytes", same, bytes_), *_recomputed(values)]
    except (DPFuncError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgument(f"Expected a certificate, got one that does not fit together: {error!r}.") from error
    if "signature" in values:
        plain = {name: value for name, value in values.items() if name not in ("digest", "signature")}
        rows.append(Finding("signature", *_signed_by(values["signature"], _canonical(plain).encode(), public_key)))
    elif public_key is not None:
        rows.append(Finding("signature", False, "there is none"))
    if model is not None:
        found = hashlib.sha256(_content(model, "a file of weights", "model")).hexdigest()
        rows.append(Finding("model", found in values["digests"]["model"], found))
    return rows


def _content(path: Path | str, what: str, name: str) -> bytes:
    if not Path(path).is_file():
        raise InvalidArgument(f"Expected {what}, got {name}={str(path)!r}, which is no file.")
    return Path(path).read_bytes()


def _read(text: bytes) -> dict[str, Any]:
    values: dict[str, Any] = parsed(text, "a certificate", SCHEMA, hint="Use the version of dpfunc that wrote it.")
    check_fields(f"a certificate of schema {SCHEMA!r}", values.keys() - _OPTIONAL, _FIELDS)
    return values


def ledger_of(values: Mapping[str, Any]) -> Ledger:
    """The ledger of the steps in a certificate, earlier ones included."""
    events = [from_values(event) for event in values["earlier"]]
    for row in values["steps"]:
        count = row["last"] - row["first"] + 1
        one = [from_values(event) for event in row["events"]]
        events += [dataclasses.replace(event, num_steps=event.num_steps * count) for event in one]
    return Ledger(tuple(events), cast(Adjacency, values["claim"]["adjacency"]))


def _read_run(folder: Path) -> tuple[Record, dict[str, dict[int, Taken]], Path]:
    """The record of a run, the steps in its journal, and the path of that; refused unless they agree."""
    if not (folder / RECORD_FILE).is_file():
        raise fail(f"the folder of a run with {RECORD_FILE} in it", "run", str(folder))
    journals = sorted(folder.glob("*journal.jsonl"))
    if len(journals) != 1:
        raise fail("one journal (*journal.jsonl) in the folder of the run", "journals", len(journals))
    record, runs = Record.from_json((folder / RECORD_FILE).read_bytes()), read_steps(journals[0])
    counted = whole_ledger(runs.values())
    if counted != record.ledger:
        raise InvalidArgument(
            f"Expected a record of all that the journal has, {counted}, got one of {record.ledger}. What the record "
            "claims cannot be derived. Make the record at the end of the run, or restore it."
        )
    return record, runs, journals[0]


def _place(path: Path, claim: Mapping[str, Any]) -> dict[str, Any]:
    """Place of the run in the budget of its data set, which means the same by epsilon and delta as the run."""
    place = unsigned("place in a budget", unique_json(path.read_bytes()))
    for name in ("unit", "adjacency", "delta"):
        if place.get(name) != claim[name]:
            raise fail(f"a run with the {name} of its budget, {place.get(name)!r}", name, claim[name])
    return place


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


def _result(record: Record, ledger: Ledger) -> dict[str, Any]:
    points, method = curve(ledger, record.delta), tight_method(ledger)
    tight = dict(points)[record.delta]
    if not math.isfinite(tight):
        raise fail("steps with noise", "epsilon", tight, "Nothing is protected, so nothing can be certified.")
    other, by = _second(ledger, record.delta)
    if record.epsilon < min(tight, other) * (1 - _RECORDED):
        hint = "What is claimed does not follow from the steps."
        raise fail(f"a claim of at least epsilon={min(tight, other):.6g}", "epsilon", record.epsilon, hint)
    bounds = {method: tight, by: other}
    return {
        "epsilon": min(tight, other),
        "accountants": [{"name": name, "epsilon": value, "error": _ERRORS[name]} for name, value in bounds.items()],
        "curve": [list(point) for point in points],
        "attacker": [{"false_positives": rate, "true_positives": true_positives(points, rate)} for rate in RATES],
    }


def _second(ledger: Ledger, delta: float) -> tuple[float, str]:
    """Epsilon by an accountant of Opacus alone, where it has the events and the neighbours; else by Renyi's here."""
    if ledger.adjacency == "replace_one" or divided(ledger.law)[1]:
        return ledger.epsilon(delta, "rdp").epsilon, "rdp"
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history.extend((e.noise_multiplier, e.sampling_prob, e.num_steps) for e in fewer_kinds(ledger.law)[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is the", UserWarning)  # of Opacus: looser, and still a bound
        epsilon = accountant.get_epsilon(delta, alphas=[*RDPAccountant.DEFAULT_ALPHAS, *_ORDERS])
    return float(epsilon), "opacus"


def _assumptions(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Assumptions of the claim: met by what was recorded, not met, or (null) nothing that a run can show."""
    claim, how = values["claim"], values["mechanism"]
    budget = claim["target_epsilon"]
    held: dict[str, bool] = {}
    for each in values["evidence"]:
        held[each["kind"]] = held.get(each["kind"], True) and each["holds"] is True
    known = {
        "The key of the noise is secret.": how["noise_key"] == SECRET,
        "Noise comes from a cryptographic stream.": how["noise_source"].startswith("AES"),
        "Batches are the draws of the sampler: each was compared.": how["batches"] == COMPARED,
        "The law of the sampler is one that is proven.": how["sampler"] in _LAWS,
        "No row changes the gradient of another.": how["rows"].startswith(("vmap(grad(loss))", "each row")),
        "Delta is below 1 / number of records.": claim["delta_below_one_over_records"],
        "Epsilon is within the budget of the plan.": budget is None or claim["epsilon"] <= budget * (1 + _ROUNDING),
        "The number of records is not published by the record of the run.": EXACT_SIZE not in claim["not_covered"],
        "The two accountants share no code.": values["result"]["accountants"][1]["name"] == "opacus",
        "On neighbouring records nothing moves but the clipped sum (replay).": held.get("replay"),
        "Guesses which canaries were in do not refute the claim (audit).": held.get("audit"),
        **({"Results of replays and audits are as their files say: nobody has signed these.": None} if held else {}),
        "A row of a batch is one unit, and a unit is in one row.": None,
        "No other run on the same records was looked at, or it is counted here.": None,
        "Rounding of floating-point numbers and the time of a step reveal nothing.": None,
    }
    return [{"says": says, "met": met} for says, met in known.items()]


def _recomputed(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare all that follows from the steps with what the certificate says."""
    claim, result, ledger = values["claim"], values["result"], ledger_of(values)
    method, bounds = tight_method(ledger), {each["name"]: each["epsilon"] for each in result["accountants"]}
    tight = ledger.epsilon(claim["delta"], method).epsilon
    yield _close(f"epsilon by {method}", bounds[method], tight)
    other = next(epsilon for name, epsilon in bounds.items() if name != method)
    text = f"{other:.6g}, an upper bound too; not computed again, since it needs Opacus"
    yield Finding("epsilon by another", other >= tight * (1 - _RECORDED), text)
    yield _close("epsilon", result["epsilon"], min(tight, other))
    enough = claim["epsilon"] >= result["epsilon"] * (1 - _RECORDED)
    yield Finding("claim", enough, f"epsilon={claim['epsilon']:.6g} at delta={claim['delta']:g}")
    points = [(float(delta), float(epsilon)) for delta, epsilon in result["curve"]]
    same = [_close("", epsilon, ledger.epsilon(delta, method).epsilon).agrees for delta, epsilon in points]
    wrong = same.count(False)
    yield Finding("trade-off curve", wrong == 0 < len(points), f"{len(points)} points, {wrong} of them differ")
    for each in result["attacker"]:
        rate = each["false_positives"]
        yield _close(f"true positives at {rate:g}", each["true_positives"], true_positives(points, rate))
    if "budget" in values:
        yield _in_budget(values["budget"], ledger_of({**values, "earlier": []}))
    agree = values["assumptions"] == _assumptions(values)
    not_met = sum(each["met"] is False for each in values["assumptions"])
    yield Finding("assumptions", agree, f"{not_met} not met" if agree else "not those of these facts")


def _in_budget(place: Mapping[str, Any], own: Ledger) -> Finding:
    """Compare what all others were charged when this run settled, and its own steps, with the budget."""
    others = Ledger(tuple(from_values(event) for event in place["others"]), own.adjacency)
    total = others.compose(own).epsilon(place["delta"]).epsilon
    found = f"run {place['number']}, {place['run']!r}: epsilon={total:.6g} of {place['epsilon']:g} with all others"
    return Finding("budget of the data set", total <= place["epsilon"] * (1 + _ROUNDING), found)


def _close(name: str, said: float, found: float) -> Finding:
    same = math.isclose(said, found, rel_tol=_ROUNDING, abs_tol=1e-9)
    return Finding(name, same, f"{said:.6g}, computed again {found:.6g}")


def _signed_by(signature: Any, content: bytes, public_key: Path | str | None) -> tuple[bool, str]:
    """True if a content has this signature, by the given key or else by the one beside it; and what was found."""
    given = None if public_key is None else _read_key("public", Path(public_key)).public_bytes_raw()
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return True, f"not checked. {_NEEDED}"
    try:
        beside = bytes.fromhex(signature["public_key"])
        Ed25519PublicKey.from_public_bytes(given or beside).verify(bytes.fromhex(signature["value"]), content)
    except (InvalidSignature, ValueError, KeyError, TypeError):
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
    hint = _MADE if private else ""
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
    text = _canonical({name: value for name, value in values.items() if name != "digest"})
    return hashlib.sha256(text.encode()).hexdigest()
