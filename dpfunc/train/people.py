"""People as the unit of a job: what is protected, and that earlier runs protected the same."""

from __future__ import annotations

from pathlib import Path

from dpfunc.accounting.record import ONE_RECORD, RECORD_FILE
from dpfunc.errors import InvalidArgument
from dpfunc.train.config import Job
from dpfunc.train.dataset import Records
from dpfunc.train.tables import json_values

_PERSON = "one person: all records with the same value of the unit column"


def unit_of(job: Job) -> str:
    """The unit that the job protects, in the words of its accounting."""
    return ONE_RECORD if job.data.unit_column is None else _PERSON


def left_out(records: Records) -> list[str]:
    """Lines on what was left out, and what is trained and evaluated on; numbers that are private."""
    lines = [f"{records.duplicates} exact duplicates were left out (a private number)."] * bool(records.duplicates)
    if records.persons is not None:
        lines.append(
            f"{len(records.persons)} people with {len(records.train)} records are trained on; {records.above_limit} "
            "records above max_records_per_unit were left out (private numbers)."
        )
    return lines + seen_lines(records)


def seen_lines(records: Records) -> list[str]:
    """A warning of evaluation records that are trained on as well."""
    if not records.seen:
        return []
    return [
        f"WARNING: {records.seen} of {len(records.evaluation)} evaluation records are trained on as well (private "
        "numbers): metrics will say little about new records."
    ]


def check_spent_units(job: Job) -> None:
    """Check that the earlier runs that the job counts protected what it protects: costs of others do not add up.

    Under noise for people, a record may move a step by more than it may under noise for records, and the reverse.

    Guarantees:
        tests/train/test_people.py::test_costs_for_records_and_for_people_do_not_add_up.
    """
    for name in job.data.spent or () if job.privacy.dp_enabled else ():
        found = _unit_of_run(Path(name))
        if found is None and job.data.unit_column is None:
            continue  # a ledger or a journal of any loop, which counts rows
        if found != unit_of(job):
            raise InvalidArgument(
                f"Expected earlier runs that protected {unit_of(job)!r}, as this job does, got data.spent={name!r}, "
                f"which protected {found or 'an unknown unit'!r}. Their costs do not add up. Name the "
                f"{RECORD_FILE} of a run with the same unit, or its journal in its folder."
            )


def _unit_of_run(path: Path) -> str | None:
    """The unit in a record of a run; of a journal, that of the job or the record beside it."""
    beside = (path, path.parent / RECORD_FILE, path.parent / "job.json")
    for values in map(json_values, beside if path.suffix == ".jsonl" else (path,)):
        if isinstance(values.get("unit"), str):
            return str(values["unit"])
        job = values.get("job")
        if isinstance(job, dict) and isinstance(job.get("data"), dict):
            return _PERSON if job["data"].get("unit_column") is not None else ONE_RECORD
    return None
