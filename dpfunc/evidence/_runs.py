"""Runs in a certificate: their steps, from the journal of each, and what follows from them.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from dpfunc._utils.files import sha256, weights_in
from dpfunc._utils.validation import expect, fail, hex_digits, integer, positive
from dpfunc.accounting import Ledger
from dpfunc.accounting.ledger import to_values
from dpfunc.accounting.record import NOT_COVERED, RECORD_FILE, SETTINGS, Record, check_field, recorded
from dpfunc.checkpoint import chain
from dpfunc.checkpoint.journal import Taken, read_steps, steps_ledger, whole_ledger
from dpfunc.errors import InvalidArgument
from dpfunc.evidence._basis import CLAIM, Basis, Values, events_in
from dpfunc.evidence._figures import RECORDED, ROUNDING, figures_of
from dpfunc.evidence.result import entry
from dpfunc.types import Adjacency

_SETTINGS = (*SETTINGS, "max_grad_norm", "noise_key")
_PLACED = ("unit", "adjacency", "delta")  # which a place in a budget has alike with the run


def ledger_of(values: Values) -> Ledger:
    """The ledger of the steps in a certificate, earlier ones included."""
    events = [*events_in(values["earlier"])]
    for row in values["steps"]:
        count = row["last"] - row["first"] + 1
        events += [dataclasses.replace(each, num_steps=each.num_steps * count) for each in events_in(row["events"])]
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


def read_run(folder: Path) -> _Part:
    """The record of a run and the steps in its journal, which must agree, and the digests of its files."""
    expect((folder / RECORD_FILE).is_file(), f"the folder of a run with {RECORD_FILE} in it", "run", str(folder))
    journals = sorted(folder.glob("*journal.jsonl"))
    expect(
        len(journals) == 1, "one journal (*journal.jsonl) in the folder of the run", "journals", len(journals),
        "" if journals else "A private search leaves none: certify it apart.",
    )  # fmt: skip
    record, runs = Record.from_json((folder / RECORD_FILE).read_bytes()), read_steps(journals[0])
    written = whole_ledger(runs.values())
    if record.run not in runs or written != record.ledger:
        raise InvalidArgument(
            f"Expected a record of all that the journal has, {written} of {[*runs]}, got one of {record.ledger} of run "
            f"{record.run!r}. What the record claims cannot be derived. Make the record at the end of the run, or "
            "restore it, with the journal of its own run."
        )
    lines, job = chain.read_chain(journals[0]), folder / "job.json"
    code = {str(line.get("code") or "") for _, line in lines} | {sha256(job) if job.is_file() else ""}
    file = sha256(folder / RECORD_FILE)
    return _Part(record, runs, lines[-1][0].digest, file, weights_in(folder), code - {""})


def facts_of(parts: Sequence[_Part]) -> dict[str, Any]:
    """The facts in a certificate of runs: record and steps of all of them, and digests of their files."""
    record, runs = _together(parts)
    plain, earlier = json.loads(record.to_json()), record.ledger.beyond(steps_ledger(runs.values()))
    small = all(record.delta * part.record.dataset_size < 1 for part in parts)
    return {
        "claim": {**{name: plain[name] for name in CLAIM}, "delta_below_one_over_records": small},
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


def _derived(given: Values, values: Values) -> dict[str, Any]:
    """The steps in a certificate of runs, and what follows from them."""
    claim, ledger, steps = values["claim"], ledger_of(given), _joined(given["steps"], bool(given["earlier"]))
    if recorded(ledger, claim["delta"], claim["epsilon"], claim["accountant"], RECORDED) is None:
        raise fail(
            f"an upper bound of the steps, {ledger.epsilon(claim['delta']).epsilon:.6g}", "epsilon", claim["epsilon"],
            "What is claimed does not follow from the steps.",
        )  # fmt: skip
    digests = {
        **values["digests"],
        "data_order": [hex_digits("run", run, 16) for run in dict.fromkeys(row["run"] for row in steps)],
        "journal": hex_digits("journal", given["digests"]["journal"], 32),
    }
    results = {each["file"]: entry(each, digests) for each in given["evidence"]}  # each once
    return {
        "steps": steps,
        "result": figures_of(ledger, claim["delta"]),
        "digests": digests,
        "evidence": sorted(results.values(), key=lambda each: (each["kind"], each["file"]), reverse=True),
        "budget": None if given["budget"] is None else _placed(given["budget"], {**values, "steps": steps}),
    }


def _joined(rows: Sequence[Mapping[str, Any]], earlier: bool) -> list[dict[str, Any]]:
    """Rows of the steps of runs as `_rows` makes them: each run after the other, each step once, and none left out."""
    ends: dict[str, int] = {}
    made: list[dict[str, Any]] = []
    for row in rows:
        run, first = row["run"], integer("first", row["first"])
        row = {"run": run, "first": first, "last": integer("last", row["last"], minimum=first)}
        row["events"] = [to_values(event) for event in events_in(rows[len(made)]["events"])]
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
    claim, own = values["claim"], _own_ledger(values)
    others, most = Ledger(events_in(place["others"]), own.adjacency), positive("epsilon", place["epsilon"])
    for name in _PLACED:
        expect(place[name] == claim[name], f"a run with the {name} of its budget, {place[name]!r}", name, claim[name])
    total = others.compose(own).epsilon(values["claim"]["delta"]).epsilon
    expect(total <= most * (1 + ROUNDING), f"all runs within the budget of the data set, {most:g}", "epsilon", total)
    return {
        "run": check_field("unit", place["run"]),
        "number": integer("number", place["number"], minimum=1),
        "epsilon": place["epsilon"],
        **{name: values["claim"][name] for name in _PLACED},
        "others": [to_values(event) for event in others.events],
    }


def _own_ledger(values: Values) -> Ledger:
    """The ledger of the steps in a certificate, without earlier ones."""
    return ledger_of({**values, "earlier": []})


RUNS = Basis(
    schema="dpfunc.certificate/2",
    part="steps",
    word="steps, earlier runs, date, unit, bound of gradients, budgets, evidence, digests",
    settings=_SETTINGS,
    not_covered=NOT_COVERED,
    derive=_derived,
    events=lambda values: _own_ledger(values).events,
    assumptions=lambda values: {
        "The two accountants share no code.": values["result"]["accountants"][1]["name"] == "opacus"
    },
)
