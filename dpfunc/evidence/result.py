"""Results of replays and audits as files, which a certificate takes in. They need no torch to be read.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from dpfunc._utils.files import sha256
from dpfunc._utils.validation import (
    boolean,
    fail,
    hex_digits,
    integer,
    non_negative,
    one_of,
    open_unit,
    signed,
    unsigned,
)
from dpfunc.accounting.ledger import parsed, to_values

REPLAY, AUDIT = "dpfunc.replay/1", "dpfunc.audit/1"
_SCHEMAS = {REPLAY: "replay", AUDIT: "audit"}
_Check = Callable[[str, Any], Any]
# What a certificate says of a result: nothing of a single record, and nothing that is measured on records.
_COMMON: dict[str, _Check] = {
    "holds": boolean, "of": partial(one_of, allowed=("job", "script")), "source": hex_digits, "steps": integer,
    "file": hex_digits,
}  # fmt: skip
_PUBLIC: dict[str, dict[str, _Check]] = {
    "replay": dict.fromkeys(("run", "reproduced", "weights"), lambda name, value: value),  # see `entry`
    "audit": {
        "space": partial(one_of, allowed=("gradient", "input")), "delta": open_unit, "confidence": open_unit,
        "num_canaries": integer, **dict.fromkeys(("claim", "epsilon", "epsilon_gaussian"), non_negative),
    },
}  # fmt: skip


def replay_values(result: Any, source: Path, plan: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a replay; it holds if nothing moves, and what a run folder has recorded is found again."""
    own = {name: recorded.get(name) for name in ("run", "reproduced", "weights", "same_model")}
    holds = result.holds and own["reproduced"] in (None, result.steps) and own["same_model"] is not False
    return _values_of(REPLAY, source, plan, {**dataclasses.asdict(result), **own, "holds": holds})


def audit_values(result: Any, source: Path, plan: Any, steps: int, about: Mapping[str, str]) -> dict[str, Any]:
    """The values of an audit of so many steps; it holds if the claim is not refuted."""
    return _values_of(AUDIT, source, plan, {
        **dataclasses.asdict(result), "best": result.best._asdict(), "holds": not result.exceeds, "steps": steps,
        **about,
    })  # fmt: skip


def _values_of(schema: str, source: Path, plan: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a result; `source` is the script, or the job file of a run."""
    from dpfunc._utils.versions import installed

    costs = ({**to_values(event), "num_steps": 1} for event in plan.events(0, max(1, result["steps"])))
    return signed({
        "schema": schema,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "of": "job" if source.suffix == ".json" else "script",
        "source": sha256(source),
        "adjacency": plan.adjacency,
        "events": [*{json.dumps(one, sort_keys=True): one for one in costs}.values()],
        "versions": installed(),
        "salt": secrets.token_hex(16),  # the digest of the file tells nothing that could be found by trying
        **result,
    })  # fmt: skip


def in_certificate(path: Path, values: Mapping[str, Any], job: Path) -> dict[str, Any]:
    """Entry of a certificate with these values for the result in a file; `job` is the job file of the run, if any."""
    text = path.read_bytes() if path.is_file() else b""
    what = f"a result of dpfunc verify or audit (--out) in {str(path)!r}"
    result = unsigned("result of a replay or an audit", parsed(text, what, *_SCHEMAS, hint=""))
    if wrong := [name for name, same in _belongs(result, values, job).items() if not same]:
        raise fail(
            "a result that belongs to this run", wrong[0], result[wrong[0]],
            "It is of another plan or job: verify or audit this one.",
        )  # fmt: skip
    own = {"kind": _SCHEMAS[result["schema"]], "file": hashlib.sha256(text).hexdigest()}
    return entry({**result, **own}, values["digests"])


def entry(result: Mapping[str, Any], digests: Mapping[str, Any]) -> dict[str, Any]:
    """Check the fields of a result, and return those that a certificate with these digests shows.

    `same_code` says that the result is of the code that took the steps.
    """
    kind = one_of("kind", result["kind"], _PUBLIC)
    shown = {name: check(name, result[name]) for name, check in (_COMMON | _PUBLIC[kind]).items()}
    if result["holds"] and shown.get("reproduced") not in (None, result["steps"]):
        raise fail("the steps of a replay that holds", "reproduced", shown["reproduced"])
    known = {"run": digests["data_order"], "weights": [digests["model"]]}
    if wrong := [name for name, own in known.items() if shown.get(name) not in (None, *own)]:
        raise fail("a result of this run", wrong[0], shown[wrong[0]], "It is of another run: verify this one.")
    return {"kind": kind, **shown, "same_code": shown["source"] in digests["code"]}


def _belongs(result: Mapping[str, Any], values: Mapping[str, Any], job: Path) -> dict[str, bool]:
    known = [{**event, "num_steps": 1} for row in values["steps"] for event in row["events"]]
    return {
        "events": bool(result["events"]) and all(event in known for event in result["events"]),
        "adjacency": result["adjacency"] == values["claim"]["adjacency"],
        "source": result["of"] == "script" or (job.is_file() and result["source"] == sha256(job)),
    }
