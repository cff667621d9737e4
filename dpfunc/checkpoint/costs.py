"""Costs of earlier runs on the same records, from the files that they left.

May import: its folder, step and below. Privacy depends on it: yes.
"""

from collections.abc import Sequence
from pathlib import Path

from dpfunc._utils.validation import fail
from dpfunc.accounting import Ledger
from dpfunc.accounting.ledger import OTHER_VERSION, parsed
from dpfunc.accounting.record import RECORD_FILE, RUN, SELECTION, Record, SelectionRecord, recorded
from dpfunc.checkpoint.journal import count_steps, journal_ledger
from dpfunc.errors import DPFuncError, InvalidArgument

_COST = f"a ledger, as Ledger.to_json writes it, or a journal (.jsonl), or the record of a run ({RECORD_FILE}),"
_ROUNDING = 1e-4  # relative; as tight as the accountants are


def read_spent(paths: Sequence[Path | str] | None) -> Ledger | None:
    """Ledger of earlier runs, the sum over all files; None without paths. Name no run that another one counted.

    They are journals, ledgers, or what runs left as privacy_accounting.json. One that cannot be read or has no steps is
    refused: a misspelt path must not be free (test_a_killed_run_without_checkpoints_is_counted).
    """
    ledgers = [_spent(Path(path)) for path in paths or ()]
    return ledgers[0].compose(*ledgers[1:]) if ledgers else None


def read_cost(path: Path) -> Ledger | Record | SelectionRecord:
    """The cost of runs in a file: a record, a ledger, or a journal (.jsonl), whose ledger it is."""
    if path.suffix == ".jsonl":
        return journal_ledger(path)
    text = path.read_bytes()
    values = parsed(text, _COST)
    schema = str(values.get("schema")) if isinstance(values, dict) else ""
    kinds: dict[str, type[Ledger | Record | SelectionRecord]] = {
        RUN: Record, SELECTION: SelectionRecord, "dpfunc.ledger/": Ledger,
    }  # fmt: skip
    for prefix, kind in kinds.items():
        if schema.startswith(prefix):
            return kind.from_json(text)
    # The state of a checkpoint has a schema too, and a ledger which lacks the steps that were taken after it.
    raise InvalidArgument(
        f"Expected {_COST} got {str(path)!r}, which is none of them. The journal of a run of dpfunc train is "
        f"privacy_journal.jsonl. {OTHER_VERSION}"
    )


def _spent(path: Path) -> Ledger:
    """The ledger of a run, with at least one step, and with all that the journals beside its record have."""
    expected = f"Expected a journal or ledger of a run, got {str(path)!r}, which"
    if not path.is_file():
        raise InvalidArgument(f"{expected} is no file.")
    try:
        found = read_cost(path)
        ledger = found if isinstance(found, Ledger) else _of_run(found)
    except (DPFuncError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{expected} cannot be read: {error}") from error
    if not ledger.num_steps:
        raise InvalidArgument(f"{expected} has no steps.")
    for journal in (j for place in (path.parent, path.parent.parent) for j in place.glob("*journal.jsonl")):
        if isinstance(found, Record) and (taken := count_steps(journal)) > found.global_step:
            raise InvalidArgument(
                f"Expected all steps of a run, got {str(path)!r} with {found.global_step}; the journal beside it has "
                f"{taken}. Name {str(journal)!r}, which also has what that run counted when it began."
            )
    return ledger


def _of_run(record: Record | SelectionRecord) -> Ledger:
    """The ledger of the record of a run, whose epsilon must be that of its ledger."""
    if isinstance(record, SelectionRecord):
        raise InvalidArgument(
            "Expected a ledger or the record of a run, got the record of a search, which is no sum of steps. Leave "
            "its epsilon and delta out of the budget of other runs on the same records, and publish the sums."
        )
    if recorded(record.ledger, record.delta, record.epsilon, record.accountant, _ROUNDING) is None:
        raise fail(
            f"a record whose epsilon is that of its ledger, {record.ledger.epsilon(record.delta).epsilon:.6g}, by an "
            "upper bound", "epsilon", record.epsilon,
            f"It names {record.accountant}. One of them was changed. Restore the file, or name its journal.",
        )  # fmt: skip
    return record.ledger
