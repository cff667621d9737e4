"""Results of replays and audits as files, which a certificate takes in. They need no torch to be read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpfunc._utils.validation import fail, signed, unique_json, unsigned
from dpfunc.accounting.events import to_values
from dpfunc.checkpoint._chain import sha256
from dpfunc.errors import InvalidArgument

REPLAY, AUDIT = "dpfunc.replay/1", "dpfunc.audit/1"
# What a certificate says of a result: nothing of a single record, and nothing that is measured on records.
_PUBLIC = {
    REPLAY: ("of", "source", "steps", "run", "reproduced", "weights"),
    AUDIT: (
        "of", "source", "steps", "space", "claim", "epsilon", "epsilon_gaussian", "delta", "confidence", "num_canaries"
    ),
}  # fmt: skip


def replay_values(found: Any, source: Path, plan: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a replay; it holds if nothing moves, and what a run folder has recorded is found again."""
    own = {name: recorded.get(name) for name in ("run", "reproduced", "weights", "same_model")}
    holds = found.holds and own["reproduced"] in (None, found.steps) and own["same_model"] is not False
    return _values_of(REPLAY, source, plan, {**dataclasses.asdict(found), **own, "holds": holds})


def audit_values(found: Any, source: Path, plan: Any, steps: int, about: Mapping[str, str]) -> dict[str, Any]:
    own = {"best": found.best._asdict(), "holds": not found.exceeds, "steps": steps}
    return _values_of(AUDIT, source, plan, {**dataclasses.asdict(found), **own, **about})


def _values_of(schema: str, source: Path, plan: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a result; `source` is the script, or the job file of a run."""
    from dpfunc._utils.versions import installed

    costs = ({**to_values(event), "num_steps": 1} for event in plan.events(0, max(1, found["steps"])))
    return signed({
        "schema": schema,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "of": "job" if source.suffix == ".json" else "script",
        "source": sha256(source),
        "adjacency": plan.adjacency,
        "events": [*{json.dumps(one, sort_keys=True): one for one in costs}.values()],
        "versions": installed(),
        "salt": secrets.token_hex(16),  # the digest of the file tells nothing that could be found by trying
        **found,
    })  # fmt: skip


def in_certificate(path: Path, values: Mapping[str, Any], job: Path) -> dict[str, Any]:
    """Entry of a certificate with these values for the result in a file; `job` is the job file of the run, if any."""
    text = path.read_bytes() if path.is_file() else b""
    try:
        found = unique_json(text)
    except ValueError as error:
        raise InvalidArgument(f"Expected a result of dpfunc verify or audit in {str(path)!r}: {error}.") from error
    kind = found.get("schema") if isinstance(found, dict) else None
    if kind not in _PUBLIC:
        raise fail("a result of dpfunc verify or dpfunc audit (--out)", "schema", kind)
    unsigned("result of a replay or an audit", found)
    if wrong := [name for name, same in _belongs(found, values, job) if not same]:
        hint = "It is of another plan, job, run or model: verify or audit this one."
        raise fail("a result that belongs to this run", wrong[0], found[wrong[0]], hint)
    public = {name: found[name] for name in _PUBLIC[kind]}
    name = "replay" if kind == REPLAY else "audit"
    return {"kind": name, "holds": bool(found["holds"]), **public, "file": hashlib.sha256(text).hexdigest()}


def _belongs(found: Mapping[str, Any], values: Mapping[str, Any], job: Path) -> Iterator[tuple[str, bool]]:
    known = [{**event, "num_steps": 1} for row in values["steps"] for event in row["events"]]
    yield "events", bool(found["events"]) and all(event in known for event in found["events"])
    yield "adjacency", found["adjacency"] == values["claim"]["adjacency"]
    yield "source", found["of"] == "script" or (job.is_file() and found["source"] == sha256(job))
    yield "run", found.get("run") in (None, *values["digests"]["data_order"])
    yield "weights", found.get("weights") in (None, values["digests"]["model"])
