"""Results of replays and audits as files, which a certificate takes in. They need no torch to be read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping
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


def _values_of(schema: str, source: Path, plan: Any, steps: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a result of some steps of a plan; `source` is the script, or the job file of a run."""
    from dpfunc._utils.versions import installed

    costs = {
        json.dumps(one, sort_keys=True): one
        for one in (_cost(to_values(event)) for event in plan.events(0, max(1, steps)))
    }
    return signed({
        "schema": schema,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "of": "job" if source.suffix == ".json" else "script",
        "source": sha256(source),
        "adjacency": plan.adjacency,
        "events": list(costs.values()),
        "versions": installed(),
        "salt": secrets.token_hex(16),  # the digest of the file tells nothing that could be found by trying
        **found,
    })  # fmt: skip


def _cost(event: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one step."""
    return {**event, "num_steps": 1}


def in_certificate(path: Path, values: Mapping[str, Any], job: Path) -> dict[str, Any]:
    """Entry of a certificate for the result in a file.

    Args:
        values: of the certificate. job: the job file of the run, if there is one.

    Raises:
        InvalidArgument: no such result, or one of another plan, job, run or model.
    """
    text = path.read_bytes() if path.is_file() else b""
    try:
        found = unique_json(text)
    except ValueError as error:
        raise InvalidArgument(f"Expected a result of dpfunc verify or audit in {str(path)!r}: {error}.") from error
    kind = found.get("schema") if isinstance(found, dict) else None
    if kind not in _PUBLIC:
        raise fail("a result of dpfunc verify or dpfunc audit (--out)", "schema", kind)
    unsigned("result of a replay or an audit", found)
    known = [_cost(event) for row in values["steps"] for event in row["events"]]
    own = {
        "events": bool(found["events"]) and all(event in known for event in found["events"]),
        "adjacency": found["adjacency"] == values["claim"]["adjacency"],
        "source": found["of"] == "script" or (job.is_file() and found["source"] == sha256(job)),
        "run": found.get("run") in (None, *values["digests"]["data_order"]),
        "weights": found.get("weights") in (None, values["digests"]["model"]),
    }
    for name, same in own.items():
        if not same:
            hint = "It is of another plan, job, run or model: verify or audit this one."
            raise fail("a result that belongs to this run", name, found[name], hint)
    public = {name: found[name] for name in _PUBLIC[kind]}
    name = "replay" if kind == REPLAY else "audit"
    return {"kind": name, "holds": bool(found["holds"]), **public, "file": hashlib.sha256(text).hexdigest()}


def replay_values(found: Any, source: Path, plan: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a replay; it holds if nothing moves, and what a run folder has recorded is found again."""
    same = recorded.get("reproduced") in (None, found.steps) and recorded.get("same_model") is not False
    own = {name: recorded.get(name) for name in ("run", "reproduced", "weights", "same_model")}
    values = {**dataclasses.asdict(found), **own, "holds": found.holds and same}
    return _values_of(REPLAY, source, plan, found.steps, values)


def audit_values(found: Any, source: Path, plan: Any, steps: int, about: Mapping[str, str]) -> dict[str, Any]:
    """The values of an audit, with its space and its score; it holds if the claim is not refuted."""
    values = {**dataclasses.asdict(found), "best": found.best._asdict(), "holds": not found.exceeds, "steps": steps}
    return _values_of(AUDIT, source, plan, steps, {**values, **about})
