"""Privacy cost of earlier runs on the same records, read from the files that they left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dpfunc.accounting import Ledger
from dpfunc.accounting.record import read_ledger
from dpfunc.checkpoint.journal import count_steps, journal_ledger
from dpfunc.errors import DPFuncError, InvalidArgument


def read_spent(paths: Sequence[Path | str] | None) -> Ledger | None:
    """Ledger of earlier runs: the sum over all files, so name each run once, and none that another one counted.

    Args:
        paths: journals (.jsonl), ledgers (.json), or what runs left as privacy_accounting.json. None or empty: no runs.

    Returns:
        A ledger for `Plan.for_budget(spent=...)` or `DPTrainer(ledger=...)`; None without paths. Public.

    Raises:
        InvalidArgument: a file that is missing, cannot be read, or has no steps: a misspelt path must not be free.
        LedgerConflict: runs of different adjacency.

    Guarantees:
        tests/checkpoint/test_prior_ledgers.py::test_a_killed_run_without_checkpoints_is_counted.

    >>> read_spent(["nowhere.jsonl"])
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a journal or ledger of a run, got 'nowhere.jsonl', which is no file.
    """
    ledgers = [_read(Path(path)) for path in paths or ()]
    return ledgers[0].compose(*ledgers[1:]) if ledgers else None


def _read(path: Path) -> Ledger:
    expected = "Expected a journal or ledger of a run"
    if not path.is_file():
        raise InvalidArgument(f"{expected}, got {str(path)!r}, which is no file.")
    try:
        ledger = journal_ledger(path) if path.suffix == ".jsonl" else read_ledger(path.read_bytes())
    except (DPFuncError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{expected}, got {str(path)!r}, which cannot be read: {error}") from error
    if not ledger.num_steps:
        raise InvalidArgument(f"{expected}, got {str(path)!r}, which has no steps.")
    _check_newest(path)
    return ledger


def _check_newest(path: Path) -> None:
    """Refuse a record written before the last steps of its run, which the journal beside it has."""
    steps = json.loads(path.read_text("utf-8")).get("global_step") if path.suffix == ".json" else None
    for journal in (j for folder in (path.parent, path.parent.parent) for j in folder.glob("*journal.jsonl")):
        taken = count_steps(journal)
        if isinstance(steps, int) and taken > steps:
            raise InvalidArgument(
                f"Expected all steps of a run, got {str(path)!r} with {steps}; the journal beside it has {taken}. Name "
                f"{str(journal)!r}, which also has what that run counted when it began."
            )
