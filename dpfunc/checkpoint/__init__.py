"""Records of a run on disk: checkpoints, the journal of released steps, and the record of what they cost.

May import: its folder, step and below. Privacy depends on it: no.
"""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc.checkpoint.journal import Journal, journal_ledger
    from dpfunc.checkpoint.record import make_record
    from dpfunc.checkpoint.saving import Checkpoint, load, save

__all__ = ["Checkpoint", "Journal", "journal_ledger", "load", "make_record", "save"]

if not TYPE_CHECKING:
    __getattr__ = lazy(
        __name__, {"journal": "Journal journal_ledger", "record": "make_record", "saving": "Checkpoint load save"}
    )
